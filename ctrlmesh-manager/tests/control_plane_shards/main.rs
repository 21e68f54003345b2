//! The shards of roots, written into a real API server, with the controllers of Kubernetes beside us.
#![allow(clippy::large_futures, reason = "one per test, and never moved")]

mod bed;
mod changes;
#[path = "../harness/mod.rs"]
mod harness;
mod made;
