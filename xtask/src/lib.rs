//! The commands of `cargo xtask`. The crate compiles in seconds, since Kubernetes clients are in other crates.
#![forbid(unsafe_code)]

pub mod tools;

mod progress;

mod run;

mod disk_space;

pub mod kubectl;
pub mod helm;

pub mod user_cluster;

mod supervisor;

mod paths;

pub mod build_ebpf;

pub mod platform;

pub mod source;

mod oci;

pub mod images;

pub mod setup;

pub mod node;

pub mod demo;

pub mod docs;
pub mod chart;
pub mod lint;

pub mod release;

pub mod fuzz;

pub mod test;
pub mod bench;
pub mod torture;
