//! The program `ctrlmesh` as users run it, before a scripted API server.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(clippy::disallowed_methods, clippy::large_futures, reason = "tests are not drained")]

#[path = "../harness/mod.rs"]
mod harness;
mod check;
mod dashboard;
mod errors;
mod events;
mod events_watch;
mod explain;
mod manifests;
mod owner;
mod rollout;
mod run_command;
mod run_explained;
mod run_refused;
mod run_terminal;
mod status;
mod top;
mod trace;
