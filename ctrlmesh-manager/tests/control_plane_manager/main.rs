//! The manager as a process, and a real API server that asks it: validating, injecting, labelling.
#![allow(clippy::large_futures, reason = "one per test, and never moved")]

mod admission;
mod bed;
#[path = "../harness/mod.rs"]
mod harness;
mod labels;
mod many;
mod shapes;
