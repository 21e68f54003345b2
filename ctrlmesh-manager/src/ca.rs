//! The certificate authorities of the mesh: stored, rotated, and distributed as a trust bundle.
//!
//! There are two. The mesh's signs for node proxies, and one of each namespace that follows from it for the proxies in
//! pods: all only for names of the API server. The manager's signs for the manager, and only for its names. Neither can
//! replace the other.

pub mod authority;
mod namespace;
mod predecessor;
pub mod cluster_ca;
pub mod api_server;
pub mod rotation;
pub mod recovery;
mod write_attempts;
pub mod store;
pub mod trust_bundle;
pub mod serving;
