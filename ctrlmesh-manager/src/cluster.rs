//! Watches the API server and plans anew when something changes.

pub mod backoff;
pub mod write_error;
pub mod served_resources;
pub mod event_recorder;
pub mod cache;
mod comebacks;
pub mod plan;
pub mod confirmations;
pub mod evidence;
mod load_meter;
pub mod balancer;
pub mod silence;
