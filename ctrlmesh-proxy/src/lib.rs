//! Sits between an operator and its API server: intercepts, injects selectors, forwards.
//!
//! The modules are listed in reading order: each names only those above it.
#![forbid(unsafe_code)]

pub mod metrics;
pub mod net;
pub mod spans;
pub mod manager_client;
pub mod policy;
pub mod trace;
pub mod guard;
pub mod fault;
pub mod shadow;
pub mod traffic;
pub mod upstream;
pub mod egress;
pub mod webhook;
pub mod session;
mod watch;
pub mod serve;
pub mod config;
pub mod node;
pub mod app;
mod command;

pub use command::{command, main};
