//! Writes shards, pod labels, status and events to the API server.

pub mod compute;
mod finding;
mod targets;
mod interception;
mod breaker_status;
mod injection_status;
pub mod rules_writer;
pub mod cluster_writer;
pub mod status_writer;
