//! How do connections get to the proxy without the operator knowing?
//!
//! Programs in the kernel (`ctrlmesh-ebpf`) do it; this module loads them, attaches them at a pod's cgroup, pins them so
//! that they outlive the process, replaces them without a gap, and explains where a redirected connection wanted to go.
//! It is the only user of aya.

mod error;
mod feature;
mod privilege;
mod target;
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
