//! `ctrlmesh migrate` on the state that the predecessor leaves: a real API server, our real manager, the real command.
//!
//! The predecessor's program is not to be had. Its objects are made from manifests. A stand-in holds its finalizers.
#![allow(clippy::large_futures, reason = "one per test, and never moved")]

#[path = "../harness/mod.rs"]
mod harness;
mod predecessor;
mod stand_ins;
mod bed;
mod cut;
mod installed;
mod whole;
mod kridge;
