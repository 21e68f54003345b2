//! Network namespaces: listeners in them, and the route of our IPv6 prefix.

pub(crate) mod route;
pub mod listener;
