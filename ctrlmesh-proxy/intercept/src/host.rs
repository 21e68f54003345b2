//! The machine that this process runs on: kernel features, privileges and cgroups.

pub(crate) mod feature;
pub(crate) mod privilege;
pub mod cgroup;
