//! Clients through the proxy to a real API server.
#![allow(clippy::large_futures, clippy::float_cmp, reason = "one per test, and never moved")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(clippy::disallowed_methods, reason = "tests are not drained")]

mod bed;
mod classify;
mod clients;
mod collector;
mod escapes;
mod exemplars;
#[path = "../harness/go.rs"]
mod go;
mod informer;
mod locks;
#[path = "../harness/members.rs"]
mod member_server;
mod members;
#[path = "../harness/prometheus.rs"]
mod prometheus;
mod reads;
mod reflector;
mod refusals;
mod shadow;
mod traces;
#[path = "../../../../ctrlmesh-proxy/tests/harness/mod.rs"]
mod harness;
