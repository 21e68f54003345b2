//! The fence in a real API server: who may write what, and what is known of it.
//!
//! Nothing runs the operator's pods. Their tokens are real, and bound to them.
#![allow(clippy::large_futures, reason = "one per test, and never moved")]

mod bed;
mod callers;
#[path = "../harness/mod.rs"]
mod harness;
mod kept;
mod proved;
mod writes;
