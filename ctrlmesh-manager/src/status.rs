//! Writes shards, pod labels, status and events to the API server.

pub mod compute;
pub mod cluster_writer;
pub mod status_writer;
