//! Events of single connections, for debugging: sampled, and off by default.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use aya::maps::{MapData, RingBuf};
use ctrlmesh_common::kernel::{self, Outcome};

use crate::Error;
use crate::pins::{Pins, Slot};
use crate::programs::map;

/// Reads events. One reader at a time: what one read, no other sees.
pub struct Events {
    ring: RingBuf<MapData>,
}

/// One connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Name of the outcome.
    pub outcome: &'static str,
    /// Pod.
    pub slot: Slot,
    /// Cgroup of the process.
    pub cgroup: u64,
    /// Process.
    pub pid: u32,
    /// Where it wanted to go.
    pub target: SocketAddr,
}

impl Events {
    /// Opens the ring buffer that a loader pinned below `pins`.
    ///
    /// # Errors
    /// If there is none, others have a part in the folder, or it may not be read.
    pub fn open(pins: &Path) -> Result<Self, Error> {
        let pins = Pins::at(pins);
        pins.exist()?;
        Ok(Self { ring: map::events(&pins)? })
    }
}

impl Iterator for Events {
    type Item = Event;

    /// The next event; `None` when all are read for now.
    fn next(&mut self) -> Option<Event> {
        let item = self.ring.next()?;
        let event = kernel::Event::read(&item)?;
        let outcome = Outcome::ALL.into_iter().find(|outcome| *outcome as u32 == event.outcome)?;
        Some(Event {
            outcome: outcome.name(),
            slot: Slot::new(event.slot),
            cgroup: event.cgroup,
            pid: event.pid,
            target: SocketAddr::new(IpAddr::from(event.address), u16::from_be(event.port)),
        })
    }
}
