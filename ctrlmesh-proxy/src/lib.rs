//! Sits between an operator and its API server: intercepts, injects selectors, forwards.
//!
//! The modules are listed in reading order: each names only those above it.
#![forbid(unsafe_code)]

pub mod accept;
pub mod admin;
pub mod app;
pub mod body;
pub mod config;
pub mod drain;
pub mod metrics;
pub mod readiness;
pub mod serve;
pub mod telemetry;
pub mod tls;
pub mod tunnel;
pub mod upstream;
