//! Announces the proxy of an attached pod: its listeners, heartbeats and webhook addresses.
//!
//! Only pods that this owner has attached can be announced.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use ctrlmesh_common::kernel::{INBOUND_PER_POD, Inbound, InboundKey};

use crate::Error;
use crate::host::cgroup::Cgroup;
use crate::host::namespaces::{self, Namespaces};
use crate::interceptor::Interceptor;
use crate::interceptor::register::Register;
use crate::network::listener::{self, Namespace};
use crate::pins::Slot;
use crate::pins::record::Record;
use crate::programs::link;
use crate::programs::map;
use crate::programs::map::Maps;
use crate::programs::object::Object;

/// Sends the heartbeats of one owner's pods, on a thread of its own.
pub struct HeartbeatWriter(Register);

impl Interceptor {
    /// The slot of a pod of this owner's.
    pub(crate) fn attached(&mut self, pod: &Path) -> Result<Slot, Error> {
        let cgroup = self.register.hierarchy.cgroup(pod)?;
        let record = self.register.pins.find(&cgroup)?;
        let record = record.ok_or_else(|| Error::NotAttached(cgroup.path))?;
        Ok(self.register.owned(record.slot)?.slot)
    }

    /// Says which socket takes the redirected connections of a pod attached with `ListenerCheck::Held`. When the socket
    /// closes, or its process dies, the kernel knows at once.
    ///
    /// # Errors
    /// If the socket does not listen, or the pod is not this owner's.
    pub fn listen(&mut self, slot: Slot, listener: &TcpListener) -> Result<(), Error> {
        let _lock = self.register.pins.lock()?;
        self.register.owned(slot)?;
        self.register.maps.listeners.set(slot.index(), listener, 0).map_err(Error::map("LISTENERS"))
    }

    /// Makes our IPv6 prefix local in the pod's network namespace, and sends its connections to native IPv6 targets
    /// there, so that sockets for IPv6 only are redirected too. The pod's listener must be one of `listener::outbound`.
    ///
    /// # Errors
    /// If the namespace has no IPv6 or cannot be entered, or the pod is not this owner's. The pod goes on over IPv4
    /// then.
    pub fn serve_ipv6(&mut self, slot: Slot, namespace: &Namespace) -> Result<(), Error> {
        let _lock = self.register.pins.lock()?;
        self.register.owned(slot)?;
        let made = listener::make_prefix_local(namespace);
        // Perhaps it had IPv6 where it was before.
        self.register.native(slot, made.is_ok())?;
        made
    }

    /// Says that the proxy with this number lives.
    ///
    /// # Errors
    /// If no pod of this owner has the number.
    pub fn beat(&mut self, number: u32) -> Result<(), Error> {
        self.register.beat(number)
    }

    /// Sends heartbeats for the same pods from another thread, which no other work of this owner delays.
    ///
    /// # Errors
    /// If the tables cannot be opened.
    pub fn heartbeat_writer(&self) -> Result<HeartbeatWriter, Error> {
        let Register { pins, owner, hierarchy, .. } = &self.register;
        let maps = Maps::open(pins)?;
        Ok(HeartbeatWriter(Register::new(pins.clone(), maps, owner.clone(), hierarchy.clone())))
    }

    /// Gives connections that arrive at `address` in a pod's network namespace to `listener`, one of
    /// [`crate::listener::inbound`] for its family. The proxy itself reaches the server behind from a loopback address:
    /// [`crate::INBOUND_SOURCE`], or [`crate::INBOUND_SOURCE_V6`] for a server that listens on IPv6 only. Where nobody
    /// takes them they are refused, or pass, as the pod's connections do.
    ///
    /// # Errors
    /// If the pod is not this owner's, the namespace is none, the address is another pod's, or the pod has too many.
    pub fn take_inbound(
        &mut self,
        slot: Slot,
        namespace: &Namespace,
        address: SocketAddr,
        listener: &TcpListener,
    ) -> Result<(), Error> {
        let _lock = self.register.pins.lock()?;
        let record = self.register.owned(slot)?;
        let key = InboundKey { address: address.ip().into(), port: u32::from(address.port()) };
        match self.register.maps.inbound.get(&key, 0) {
            Ok(taken) if taken.slot() != slot.get() => {
                return Err(Error::Taken { address, slot: taken.slot() });
            }
            Err(_) if self.register.maps.inbound_of(slot)?.len() >= INBOUND_PER_POD as usize => {
                return Err(Error::TooMany { address });
            }
            _ => {}
        }
        let entry = slot.get() * 2 + u16::from(address.is_ipv6());
        let maps = &mut self.register.maps;
        let set = maps.inbound_listeners.set(u32::from(entry), listener, 0);
        set.map_err(Error::map("INBOUND_LISTENERS"))?;
        let value = Inbound::new(&key, entry);
        let inserted = maps.inbound.insert(key, value, 0);
        inserted.map_err(|error| maps.refused("INBOUND", error))?;
        let inode = namespace.inode()?;
        let same = record.netns.as_ref().is_some_and(|(_, known)| *known == inode);
        if same && link::whole(&self.register.pins, &record, &Object::fingerprint())? {
            return Ok(());
        }
        self.attach_inbound(slot, namespace, inode)
    }

    /// Takes the webhook calls of a pod to these addresses only.
    ///
    /// # Errors
    /// If the pod is not this owner's, or the table cannot be changed.
    pub fn keep_inbound(&mut self, slot: Slot, addresses: &[SocketAddr]) -> Result<(), Error> {
        let _lock = self.register.pins.lock()?;
        self.register.owned(slot)?;
        for key in self.register.maps.inbound_of(slot)? {
            if !addresses.contains(&map::address(&key)) {
                self.register.maps.inbound.remove(&key).map_err(Error::map("INBOUND"))?;
            }
        }
        Ok(())
    }

    /// Answers `SO_ORIGINAL_DST` to the processes of a proxy's cgroup, for as long as this process lives: what it is
    /// for is proxies that cannot read the tables.
    ///
    /// # Errors
    /// If the cgroup is none.
    pub fn answer_original_destination(&mut self, cgroup: &Path) -> Result<(), Error> {
        let cgroup = self.register.hierarchy.cgroup(cgroup)?;
        self.answered.retain(Cgroup::is_there);
        if !self.answered.contains(&cgroup) {
            link::attach_getsockopt(&mut self.object, &cgroup)?;
            self.answered.push(cgroup);
        }
        Ok(())
    }

    /// Replaces the webhook program of a pod that has one.
    pub(crate) fn replace_inbound(&mut self, record: &Record) -> Result<(), Error> {
        let Some((path, inode)) = &record.netns else { return Ok(()) };
        let namespace = reopen(record, path, *inode)?;
        self.attach_inbound(record.slot, &namespace, *inode)
    }

    fn attach_inbound(&mut self, slot: Slot, namespace: &Namespace, inode: u64) -> Result<(), Error> {
        let pins = &self.register.pins;
        pins.note(slot, "netns", namespace.path())?;
        pins.note(slot, "netns-id", Path::new(&inode.to_string()))?;
        link::attach_inbound(&mut self.object, pins, slot, namespace)?;
        pins.note(slot, "inbound-object", Path::new(&Object::fingerprint()))
    }
}

impl HeartbeatWriter {
    /// Says that the proxy with this number lives. Does not wait for other loaders.
    ///
    /// # Errors
    /// If no pod of this owner has the number.
    pub fn beat(&mut self, number: u32) -> Result<(), Error> {
        self.0.beat(number)
    }
}

impl std::fmt::Debug for HeartbeatWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeartbeatWriter").field("owner", &self.0.owner).finish_non_exhaustive()
    }
}

/// A pod's network namespace, by the path at which it was, or by a process of the pod.
fn reopen(record: &Record, path: &Path, inode: u64) -> Result<Namespace, Error> {
    let is = |namespace: &Namespace| namespace.inode().is_ok_and(|found| found == inode);
    if let Some(known) = Namespace::open(path).ok().filter(is) {
        return Ok(known);
    }
    let Namespaces { found, unseen } = namespaces::of(&record.cgroup.path);
    let found = found.iter().find(|(one, _)| *one == inode);
    let found = found.map(|(_, path)| Namespace::open(path)).transpose()?;
    let gone = || Error::NoSuchNamespace { inode, cgroup: record.cgroup.path.clone() };
    found.filter(is).ok_or_else(|| unseen.unwrap_or_else(gone))
}
