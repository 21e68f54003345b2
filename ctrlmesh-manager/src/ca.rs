//! Who vouches for the manager and for its proxies, and how does everybody come to believe it?
//!
//! Two authorities. The mesh's vouches for proxies to operators, and may speak for the API server's names only; the
//! manager's vouches for the manager, and may speak for that only. Neither can stand in for the other.

pub mod authority;
pub mod cluster_ca;
pub mod api_server;
pub mod rotation;
pub mod recovery;
mod write_attempts;
pub mod store;
pub mod trust_bundle;
pub mod serving;
