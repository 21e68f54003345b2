//! Network namespaces: their addresses, listeners in them, the route of our IPv6 prefix, and what is dropped past the
//! proxy.

mod netlink;
pub(crate) mod route;
pub mod listener;
pub mod interfaces;
pub(crate) mod nftables;
