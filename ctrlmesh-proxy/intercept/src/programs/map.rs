//! The kernel's maps, opened from their pins and typed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, RingBuf, SockMap};
use ctrlmesh_common::kernel::{
    Connection, Destination, Inbound, InboundKey, Member, Outcome, Pod, Table, TargetKey, TargetMatch,
};

use crate::Error;
use crate::host::privilege;
use crate::pins::{Pins, Slot};

/// What the loader writes.
pub(crate) struct Maps {
    pins: Pins,
    pub(crate) members: HashMap<MapData, u64, Member>,
    pub(crate) pods: Array<MapData, Pod>,
    pub(crate) targets: LpmTrie<MapData, TargetKey, TargetMatch>,
    pub(crate) destinations: Array<MapData, Destination>,
    pub(crate) tables: Array<MapData, Table>,
    pub(crate) listeners: SockMap<MapData>,
    pub(crate) heartbeats: Array<MapData, u64>,
    pub(crate) inbound: HashMap<MapData, InboundKey, Inbound>,
    pub(crate) inbound_listeners: SockMap<MapData>,
    pub(crate) connections: HashMap<MapData, u32, Connection>,
    pub(crate) counters: PerCpuArray<MapData, u64>,
}

impl Maps {
    pub(crate) fn open(pins: &Pins) -> Result<Self, Error> {
        Ok(Self {
            pins: pins.clone(),
            members: open(pins, "MEMBERS")?,
            pods: open(pins, "PODS")?,
            targets: open(pins, "TARGETS")?,
            destinations: open(pins, "DESTINATIONS")?,
            tables: open(pins, "TABLES")?,
            listeners: open(pins, "LISTENERS")?,
            heartbeats: open(pins, "HEARTBEATS")?,
            inbound: open(pins, "INBOUND")?,
            inbound_listeners: open(pins, "INBOUND_LISTENERS")?,
            connections: open(pins, "CONNECTIONS")?,
            counters: open(pins, "COUNTERS")?,
        })
    }

    /// Why an entry was refused: a full table, or something else.
    pub(crate) fn refused(&self, table: &'static str, error: MapError) -> Error {
        match error {
            error if full(&error) => {
                // Whoever made the map chose its size. A map that cannot be asked counts as empty.
                let map = MapData::from_pin(self.pins.map(table));
                let info = map.and_then(|map| map.info());
                Error::Full { table, entries: info.map_or(0, |info| info.max_entries()) }
            }
            error => Error::map(table)(error),
        }
    }

    /// What is taken over of the connections that arrive in a pod.
    pub(crate) fn inbound_of(&self, slot: Slot) -> Result<Vec<InboundKey>, Error> {
        let entries = self.inbound.iter().filter_map(|entry| match entry {
            Ok((key, inbound)) => (inbound.slot() == slot.get()).then_some(Ok(key)),
            Err(error) => Some(Err(error)),
        });
        entries.collect::<Result<_, MapError>>().map_err(Error::map("INBOUND"))
    }

    /// Webhook calls that are taken, by slot.
    pub(crate) fn webhooks(&self) -> Result<BTreeMap<u16, Vec<SocketAddr>>, Error> {
        let mut webhooks = BTreeMap::<u16, Vec<SocketAddr>>::new();
        for entry in &self.inbound {
            let (key, inbound) = entry.map_err(Error::map("INBOUND"))?;
            webhooks.entry(inbound.slot()).or_default().push(address(&key));
        }
        Ok(webhooks)
    }

    /// Removes the connections to ports at any address that this is true of.
    pub(crate) fn forget_connections(&mut self, over: impl Fn(&Connection) -> bool) -> Result<(), Error> {
        let entries = self.connections.iter().filter_map(|entry| match entry {
            Ok((number, connection)) => over(&connection).then_some(Ok(number)),
            // One that went while we were reading.
            Err(error) if absent(&error) => None,
            Err(error) => Some(Err(error)),
        });
        let numbers: Vec<u32> = entries.collect::<Result<_, MapError>>().map_err(Error::map("CONNECTIONS"))?;
        for number in numbers {
            match self.connections.remove(&number) {
                Err(error) if !absent(&error) => return Err(Error::map("CONNECTIONS")(error)),
                _ => {}
            }
        }
        Ok(())
    }

    /// How many connections to ports at any address are stored.
    pub(crate) fn stored_connections(&self) -> Result<usize, Error> {
        let numbers: Vec<u32> = self.connections.keys().collect::<Result<_, _>>().map_err(Error::map("CONNECTIONS"))?;
        Ok(numbers.len())
    }

    /// How often each outcome happened, on all CPUs together.
    pub(crate) fn counts(&self) -> Result<Vec<(Outcome, u64)>, Error> {
        Outcome::ALL.into_iter().map(|outcome| Ok((outcome, self.count(outcome)?))).collect()
    }

    fn count(&self, outcome: Outcome) -> Result<u64, Error> {
        let values = self.counters.get(&(outcome as u32), 0).map_err(Error::map("COUNTERS"))?;
        Ok(values.iter().sum())
    }

    /// Counts what the loader saw. Only loaders do, one at a time, so nothing is lost between reading and writing.
    pub(crate) fn add(&mut self, outcome: Outcome) -> Result<(), Error> {
        let mut values = self.counters.get(&(outcome as u32), 0).map_err(Error::map("COUNTERS"))?.to_vec();
        if let Some(first) = values.first_mut() {
            *first += 1;
        }
        let values = values.try_into().map_err(|error: std::io::Error| Error::map("COUNTERS")(error.into()))?;
        self.counters.set(outcome as u32, values, 0).map_err(Error::map("COUNTERS"))
    }
}

/// The address and port for which a webhook call is meant.
pub(crate) fn address(key: &InboundKey) -> SocketAddr {
    SocketAddr::new(key.address.into(), u16::try_from(key.port).unwrap_or_default())
}

/// Opens one map.
pub(crate) fn open<M: TryFrom<Map, Error = MapError>>(pins: &Pins, name: &'static str) -> Result<M, Error> {
    data(&pins.map(name), name)
}

/// Opens the ring buffer of events.
pub(crate) fn events(pins: &Pins) -> Result<RingBuf<MapData>, Error> {
    open(pins, "EVENTS")
}

fn data<M: TryFrom<Map, Error = MapError>>(path: &Path, name: &'static str) -> Result<M, Error> {
    let map = MapData::from_pin(path).and_then(Map::from_map_data).and_then(M::try_from);
    map.map_err(|error| privilege::explain_pin("open map", path, error, Error::map(name)))
}

/// Whether the kernel refused an entry for want of room.
fn full(error: &MapError) -> bool {
    const NO_ROOM: [i32; 2] = [nix::libc::E2BIG, nix::libc::ENOSPC];
    matches!(error, MapError::SyscallError(error) if error.io_error.raw_os_error().is_some_and(|code| NO_ROOM.contains(&code)))
}

/// Removes the socket of an entry, if there is one.
pub(crate) fn clear(sockets: &mut SockMap<MapData>, index: u32, name: &'static str) -> Result<(), Error> {
    match sockets.clear_index(&index) {
        // Such a map says of an entry that is not there that it is invalid.
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(nix::libc::EINVAL) => Ok(()),
        Err(error) if !absent(&error) => Err(Error::map(name)(error)),
        _ => Ok(()),
    }
}

/// Whether there was no such entry.
pub(crate) fn absent(error: &MapError) -> bool {
    match error {
        MapError::KeyNotFound => true,
        MapError::SyscallError(error) => error.io_error.raw_os_error() == Some(nix::libc::ENOENT),
        _ => false,
    }
}
