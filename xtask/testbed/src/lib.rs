//! A real control plane for tests and for the demo: etcd and kube-apiserver, nothing mocked.
//!
//! What is started ends with the process that started it, however that ends: a supervisor holds the other end of a
//! pipe, and when the pipe closes it kills what it started and removes the folder.
#![forbid(unsafe_code)]

mod supervise;
mod network;
mod skip;
mod tools;
mod wait;

mod pki;

mod access;

mod etcd;

mod handshakes;

mod api_server;

mod control_plane;

mod client;

mod node;

mod cluster;

pub mod audit_log;

pub mod holders;

pub mod shares;

pub mod witness;

pub use client::{BoundToken, retry};
pub use cluster::{Cluster, KUBECONFIG, Space};
pub use control_plane::{ControlPlane, Options};
pub use network::{Entered, Network};
pub use node::{ExistingNode, Node, Program, State, Worker};
pub use skip::{is_full, skipped};
pub use supervise::{folder_prefix, started};
pub use tools::{Tools, ToolsError};
pub use wait::{until, until_within};
