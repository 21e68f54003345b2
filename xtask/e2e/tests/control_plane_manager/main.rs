//! The manager and its rules against a real API server.
//!
//! What runs a manager for a whole cluster has a control plane of its own; all other tests share one.
#![allow(clippy::large_futures, reason = "one per test, and never moved")]

mod admission;
mod asked;
mod backlog;
mod definitions;
#[path = "../harness/mod.rs"]
mod harness;
mod migration;
mod named;
mod selectors;
mod shards;
mod unlabelled;
