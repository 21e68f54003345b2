//! Sits between an operator and its API server: intercepts, injects selectors, forwards.
//!
//! The modules are listed in reading order: each names only those above it.
#![forbid(unsafe_code)]

pub mod telemetry;
pub mod explain;
pub mod seldom;
pub mod drain;
pub mod readiness;
pub mod metrics;
pub mod backlog;
pub mod body;
pub mod watched;
pub mod channel;
pub mod policy;
pub mod accept;
pub mod tls;
pub mod upstream;
pub mod tunnel;
pub mod config;
pub mod serve;
pub mod admin;
pub mod node;
pub mod app;
pub mod run;
