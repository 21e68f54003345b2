//! The certificate authorities of the mesh: stored, rotated, and distributed as a trust bundle.
//!
//! There are two. The mesh's signs for proxies, and only for names of the API server. The manager's signs for the
//! manager, and only for its names. Neither can replace the other.

pub mod authority;
pub mod cluster_ca;
pub mod api_server;
pub mod rotation;
pub mod recovery;
mod write_attempts;
pub mod store;
pub mod trust_bundle;
pub mod serving;
