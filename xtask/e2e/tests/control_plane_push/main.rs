//! The path of policies from manager to real proxies, with a real API server and attackers.
#![allow(clippy::large_futures, reason = "one per test, and never moved")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(clippy::disallowed_methods, reason = "tests are not drained")]

mod accounts;
mod address;
mod alerts_fire;
mod alerts_of_managers;
mod alerts_of_proxies;
mod attacks;
mod audit;
mod bed;
mod browser;
mod budgets;
mod comeback;
mod commands;
mod dashboard;
mod dead;
mod faults;
mod follow;
mod full;
mod gone;
mod guards;
mod handover;
#[path = "../harness/mod.rs"]
mod harness;
mod names;
mod namespaces;
mod observability;
mod outage;
mod owned;
mod pace;
mod process;
mod prometheus;
#[path = "../harness/prometheus.rs"]
mod prometheus_server;
mod relabel;
mod replicas;
mod resume;
mod rights;
mod rollout_commands;
mod rollout_metrics;
mod rotation;
mod routed;
mod placement;
mod steer;
mod stream;
mod takeover;
mod token;
mod unwritten;
mod tickets;
mod webhooks;
