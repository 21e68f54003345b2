//! Redirects connections with programs in the kernel, without the operator knowing.
//!
//! This crate loads the programs of `ctrlmesh-ebpf`, attaches them at a pod's cgroup, and pins them so that they outlive
//! the process. It replaces them without a gap, and tells where a redirected connection wanted to go.
//!
//! The modules are listed in reading order: each names only those above it.
#![forbid(unsafe_code)]

mod feature;
mod target;
mod privilege;
mod error;
pub mod cgroup;
mod route;
pub mod listener;
mod private;
mod pin;
mod record;
mod map;
mod object;
mod link;
mod table;
mod original;
mod event;
mod status;
mod attach;
mod enrol;
mod interceptor;
mod serving;
mod uninstall;
mod beats;
mod relay;
pub mod command;

use std::net::{Ipv4Addr, Ipv6Addr};

pub use attach::{Attach, Heartbeat, ListenerCheck, Options};
pub use error::Error;
pub use event::{Event, Events};
pub use interceptor::Interceptor;
pub use object::Limits;
pub use original::{Original, Originals};
pub use pin::{Slot, default_pins};
pub use serving::Pulse;
pub use status::{Attachment, Status};
pub use target::{InvalidTarget, Target, Targets};
pub use uninstall::uninstall;

/// Address from which the proxy connects to a webhook's real server: connections from loopback are not taken over.
pub const INBOUND_SOURCE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// The same for a server that listens on IPv6 only.
pub const INBOUND_SOURCE_V6: Ipv6Addr = Ipv6Addr::LOCALHOST;
