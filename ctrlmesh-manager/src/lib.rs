//! The manager decides who owns what.
#![forbid(unsafe_code)]

pub mod telemetry;
pub mod drain;
pub mod readiness;
pub mod metrics;
pub mod definitions;
pub mod pod;
pub mod validate;
pub mod shard;
pub mod scheme;
pub mod manifest;
pub mod compile;
pub mod served;
pub mod cache;
pub mod rest;
pub mod plan;
pub mod status;
pub mod control;
pub mod label;
pub mod rights;
pub mod inject;
pub mod admit;
pub mod judges;
pub mod seats;
pub mod tls;
pub mod lease;
pub mod certs;
pub mod identity;
pub mod board;
pub mod doubt;
pub mod listen;
pub mod push;
pub mod config;
pub mod reach;
pub mod context;
pub mod webhook;
pub mod pen;
pub mod roster;
pub mod migration;
pub mod govern;
pub mod admin;
pub mod app;
#[cfg(test)]
mod deployed;
