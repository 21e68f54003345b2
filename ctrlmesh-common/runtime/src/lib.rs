//! Shared parts of every ctrlmesh process: drain, readiness, logs, listeners, TLS and admin pages.
//!
//! The modules are listed in reading order: each names only those above it.

pub mod sync;
pub mod allocator;
pub mod boot_clock;
pub mod unix_time;
pub mod jitter;
pub mod duration;
pub mod telemetry;
pub mod traces;
pub mod poll_on_wake;
pub mod drain;
pub mod readiness;
pub mod termination;
pub mod listen;
pub mod tls;
#[cfg(feature = "grpc")]
pub mod grpc;
pub mod admin;
