//! The machine that this process runs on: kernel features, privileges, cgroups, containers and namespaces.

pub(crate) mod feature;
pub(crate) mod privilege;
pub mod cgroup;
pub mod namespaces;
pub mod containers;
