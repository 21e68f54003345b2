//! Redirects connections with programs in the kernel, without the operator knowing.
//!
//! This crate loads the programs of `ctrlmesh-ebpf`, attaches them at a pod's cgroup, and pins them so that they
//! outlive the process. It replaces them without a gap, and tells where a redirected connection wanted to go.
//!
//! The modules are listed in reading order: each names only those above it.
#![forbid(unsafe_code)]

mod target;
mod host;
mod error;
mod network;
mod bypass;
mod pins;
mod programs;
mod interceptor;
pub mod command;

use std::net::{Ipv4Addr, Ipv6Addr};

pub use bypass::{BypassFilter, Bypasses};
pub use error::Error;
pub use host::{cgroup, containers, namespaces};
pub use interceptor::Interceptor;
pub use interceptor::attach::{Attach, Heartbeat, ListenerCheck, Options};
pub use interceptor::serve::HeartbeatWriter;
pub use interceptor::status::{Attachment, Status};
pub use interceptor::uninstall::uninstall;
pub use network::{interfaces, listener};
pub use pins::{Slot, default_pins};
pub use programs::event::{Event, Events};
pub use programs::object::Limits;
pub use programs::original::{Original, Originals};
pub use target::{InvalidTarget, Target, Targets};

/// Address from which the proxy connects to a webhook's real server: connections from loopback are not taken over.
pub const INBOUND_SOURCE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// The same for a server that listens on IPv6 only.
pub const INBOUND_SOURCE_V6: Ipv6Addr = Ipv6Addr::LOCALHOST;
