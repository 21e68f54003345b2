//! Finds the original destination of a redirected connection.
//!
//! Input: the two addresses of the accepted socket. Output: the pod and the target. A process inside the pod can dial
//! such an address itself. So the answer says where to send the bytes, and does not prove who sends them.

use std::net::SocketAddr;
use std::path::Path;

use aya::maps::{Array, HashMap, MapData};
use ctrlmesh_common::kernel::{self, ANY_ADDRESS, Address, Connection, Decoded, Destination, Pod};

use crate::Error;
use crate::pins::{Pins, Slot};
use crate::programs::map;

/// Explains redirected connections.
pub struct Originals {
    pods: Array<MapData, Pod>,
    destinations: Array<MapData, Destination>,
    connections: HashMap<MapData, u32, Connection>,
}

/// Who wanted to go where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Original {
    /// Pod that the connection came from.
    pub slot: Slot,
    /// The target's index in the pod's table.
    pub index: u8,
    /// The address that the client named.
    pub target: SocketAddr,
    /// Whether it is a target for its port alone.
    pub by_port: bool,
}

impl Originals {
    /// Opens the tables that a loader pinned below `pins`.
    ///
    /// # Errors
    /// If there are none, others have a part in the folder, or they may not be read.
    pub fn open(pins: &Path) -> Result<Self, Error> {
        let pins = Pins::at(pins);
        // What others may have written explains nothing.
        pins.exist()?;
        Ok(Self {
            pods: map::open(&pins, "PODS")?,
            destinations: map::open(&pins, "DESTINATIONS")?,
            connections: map::open(&pins, "CONNECTIONS")?,
        })
    }

    /// Explains a connection by the accepted socket's own address and its peer's. `None` if it was not redirected, or
    /// by nobody that the tables know.
    ///
    /// # Errors
    /// If the tables cannot be read.
    pub fn find(&self, local: SocketAddr, peer: SocketAddr) -> Result<Option<Original>, Error> {
        let Some(Decoded { code, host }) = Decoded::read(address(local), address(peer)) else {
            return Ok(None);
        };
        let slot = Slot::new(code.slot);
        let pod = self.pods.get(&slot.index(), 0).map_err(Error::map("PODS"))?;
        let Some(table) = pod.table(code.generation).filter(|_| pod.port == local.port().to_be()) else {
            return Ok(None);
        };
        let entry = self.destinations.get(&kernel::entry(table, code.index), 0).map_err(Error::map("DESTINATIONS"))?;
        let index = code.index;
        let by_port = entry.host_bits == ANY_ADDRESS;
        let address = match host.filter(|_| by_port) {
            Some(number) => self.connection(number)?.and_then(|one| one.original(code.slot, entry.port)),
            None => kernel::original(&entry, host),
        };
        Ok(address.map(|address| Original {
            slot,
            index,
            target: SocketAddr::new(address.into(), u16::from_be(entry.port)),
            by_port,
        }))
    }

    fn connection(&self, number: u32) -> Result<Option<Connection>, Error> {
        match self.connections.get(&number, 0) {
            Ok(connection) => Ok(Some(connection)),
            Err(error) if map::absent(&error) => Ok(None),
            Err(error) => Err(Error::map("CONNECTIONS")(error)),
        }
    }
}

fn address(address: SocketAddr) -> Address {
    address.ip().into()
}
