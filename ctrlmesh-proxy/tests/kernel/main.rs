//! Tier "kernel": real programs, loaded into this machine's kernel, with cgroups and network namespaces of their own.
//!
//! Needs root, cgroup2, and python3 as a client that knows nothing of us. Large counts run a tenth; all of it with
//! `CTRLMESH_TEST_FULL=1`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(clippy::large_futures, clippy::float_cmp, reason = "one per test, and never moved")]
#![allow(clippy::disallowed_methods, reason = "tests are not drained")]

#[path = "../harness/mod.rs"]
mod harness;
mod any_address;
mod bed;
mod bypass;
mod command;
mod counted;
mod egress;
mod failing;
mod full;
mod inbound;
mod left;
mod life;
mod mounts;
mod node;
mod handover;
mod older;
mod operators;
mod original;
mod pins;
mod privilege;
mod redirect;
mod relays;
mod restart;
mod slots;
mod sockets;
mod uninstall;
mod unspecified;
mod upgrade;
mod waiting;
mod webhooks;
