//! Tier "socket": the real proxy process on loopback, between an operator and a scripted API server.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(clippy::large_futures, clippy::float_cmp, reason = "one per test, and never moved")]
#![allow(clippy::disallowed_methods, reason = "tests are not drained")]

#[path = "../harness/mod.rs"]
mod harness;
mod bytes;
mod connections;
mod counted;
mod faults;
mod fence;
mod forward;
mod forwarding;
mod guards;
mod limits;
mod live_trace;
mod locks;
#[path = "../harness/manager.rs"]
mod manager;
mod policy_late;
mod policy_updates;
mod shadow;
mod sharding;
mod shutdown;
mod silence;
mod spans;
mod stale;
mod starting;
mod streams;
mod traffic;
mod tunnels;
mod unread;
mod versions;
mod websocket;
