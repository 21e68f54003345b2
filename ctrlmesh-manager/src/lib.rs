//! The control plane of ctrlmesh: watches the cluster, compiles sharding rules and pushes policies to proxies.
#![forbid(unsafe_code)]

pub use ctrlmesh_runtime::{drain, readiness, telemetry};

pub mod tls;
pub mod metrics;
pub mod listen;
pub mod rules;
pub mod cluster;
pub mod ownership;
pub mod status;
pub mod leader;
pub mod labels;
pub mod ca;
pub mod config;
pub mod admission;
pub mod push;
pub mod rollout;
pub mod install;
pub mod app;
pub mod audit;
mod command;

pub use command::{command, main};
