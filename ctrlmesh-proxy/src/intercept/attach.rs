//! What is to be attached, and how?

use std::path::PathBuf;
use std::time::Duration;

use ctrlmesh_common::kernel::{
    CHECK_HEARTBEAT, CHECK_LISTENER, CHECK_PORT, FAIL_OPEN, Pod, REPORT,
};

use super::object::Limits;
use super::pin::{self, Slot};
use super::target::Targets;

/// How to open an interceptor.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder of the pins.
    pub pins: PathBuf,
    /// Whose attachments these are; nobody touches another's.
    pub owner: String,
    /// Sizes of tables.
    pub limits: Limits,
}

/// A pod or a container to be attached.
#[derive(Clone, Debug)]
pub struct Attach {
    /// Its cgroup.
    pub cgroup: PathBuf,
    /// Cgroups below it whose connections pass: the proxy's own container.
    pub except: Vec<PathBuf>,
    /// What is redirected.
    pub targets: Targets,
    /// The proxy's port.
    pub port: u16,
    /// Connections that the proxy cannot take pass, rather than fail.
    pub fail_open: bool,
    /// How to know that the proxy listens.
    pub listener: ListenerCheck,
    /// How to know that the proxy does not hang.
    pub heartbeat: Option<Heartbeat>,
    /// Report connections as events.
    pub report: bool,
}

/// How to know that the proxy listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerCheck {
    /// By its socket, given with `Interceptor::listen`: the quickest and surest.
    Held,
    /// By asking the client's network namespace who listens on the port: for a proxy that is somebody else's. Its socket
    /// must be bound to the wildcard address and to no device.
    Port,
    /// Not at all: the client's SYN finds out.
    None,
}

/// How to know that the proxy does not hang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Whose beat; the slot, if none is given.
    pub number: Option<u32>,
    /// Oldest beat that counts as life.
    pub max_age: Duration,
}

// === impl Options ===

impl Options {
    /// At the usual place, with the usual sizes.
    pub fn new(owner: &str) -> Self {
        Self { pins: pin::default_pins(), owner: owner.to_owned(), limits: Limits::default() }
    }
}

// === impl Attach ===

impl Attach {
    /// What the kernel's programs read about the pod.
    pub(super) fn entry(&self, slot: Slot, table: u16) -> Pod {
        let max_age = self.heartbeat.map_or(Duration::ZERO, |beat| beat.max_age);
        Pod {
            max_age_ns: u64::try_from(max_age.as_nanos()).unwrap_or(u64::MAX),
            flags: self.flags(),
            heartbeat: self.heartbeat.and_then(|beat| beat.number).unwrap_or(slot.index()),
            table,
            port: self.port.to_be(),
            reserved: 0,
        }
    }

    fn flags(&self) -> u32 {
        let listener = match self.listener {
            ListenerCheck::Held => CHECK_LISTENER,
            ListenerCheck::Port => CHECK_PORT,
            ListenerCheck::None => 0,
        };
        let set = |flag, on| if on { flag } else { 0 };
        listener
            | set(FAIL_OPEN, self.fail_open)
            | set(CHECK_HEARTBEAT, self.heartbeat.is_some())
            | set(REPORT, self.report)
    }
}
