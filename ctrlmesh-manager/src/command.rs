//! The commands that print what is deployed with the manager.

mod crds;
mod rights;

pub(crate) use crds::Crds;
pub(crate) use rights::Rights;
