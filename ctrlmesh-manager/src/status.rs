//! Writes shards, pod labels, status and events to the API server.

pub mod compute;
mod finding;
mod breaker_status;
pub mod breaker_writer;
pub mod cluster_writer;
pub mod status_writer;
