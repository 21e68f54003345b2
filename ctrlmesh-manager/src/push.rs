//! Pushes policies to proxies over gRPC.

pub mod identity;
pub mod policy_store;
pub mod staleness;
pub mod bypass_events;
pub mod service;
