//! How do connections get to the proxy without the operator knowing?
//!
//! Programs in the kernel (`ctrlmesh-ebpf`) do it; this module loads them, attaches them at a pod's cgroup, pins them so
//! that they outlive the process, replaces them without a gap, and explains where a redirected connection wanted to go.
//! It is the only user of aya.

pub mod cgroup;
pub mod command;
mod error;
mod event;
mod interceptor;
mod link;
pub mod listener;
mod map;
mod object;
mod original;
mod pin;
mod privilege;
mod relay;
mod status;
mod table;
mod target;

use std::net::Ipv4Addr;

pub use error::Error;
pub use event::{Event, Events};
pub use interceptor::{Attach, Heartbeat, Interceptor, ListenerCheck, Options};
pub use object::Limits;
pub use original::{Original, Originals};
pub use pin::{Slot, default_pins};
pub use status::{Attachment, Status};
pub use target::{InvalidTarget, Target, Targets};

/// Address from which the proxy connects to a webhook's real server: connections from loopback are not taken over.
pub const INBOUND_SOURCE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
