//! Sits between an operator and its API server: intercepts, injects selectors, forwards.
//!
//! The modules are listed in reading order: each names only those above it.
#![forbid(unsafe_code)]

pub mod telemetry;
pub mod poll_on_wake;
pub mod drain;
pub mod readiness;
pub mod metrics;
pub mod net;
pub mod manager_client;
pub mod policy;
pub mod upstream;
pub mod session;
mod watch;
pub mod serve;
pub mod config;
pub mod admin;
pub mod node;
pub mod app;
pub mod run;
