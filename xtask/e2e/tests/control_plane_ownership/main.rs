//! Ownership that moves between the pods of an operator that runs, judged by the audit logs of two API servers.
//!
//! Real are the API servers, the managers, the proxies and the operators; the pods are objects, of which the test says
//! what kubelet would. Needs root: all of it is in a network of its own.
#![allow(clippy::large_futures, reason = "one per test, and never moved")]
#![allow(clippy::print_stderr, reason = "what a failed test needs, beside its error")]
#![allow(clippy::disallowed_methods, reason = "tests are not drained")]

mod backlog;
mod balance;
mod bed;
mod blows;
mod clock;
mod elastic;
mod elastic_torture;
mod enrolment;
#[path = "../harness/mod.rs"]
mod harness;
mod leaving_pods;
mod load;
mod manager;
#[path = "../harness/members.rs"]
mod member_server;
mod members;
mod moves;
mod operators;
mod pace;
mod partition;
mod pods;
mod process;
mod random;
mod silence;
mod standby;
mod torture;
