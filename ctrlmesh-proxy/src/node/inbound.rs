//! Takes the calls that arrive for the webhook of a pod.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::error::NotServed;
use crate::net::accept::{Acceptor, Origin, PodSlot, Purpose};
use ctrlmesh_common::kernel::INBOUND_PER_POD;
use ctrlmesh_intercept::listener::{self, Namespace};
use ctrlmesh_intercept::{Error, Interceptor, Slot, interfaces};
use ctrlmesh_runtime::drain::Drain;

/// Connections to the webhook of one pod. Anybody in the cluster can open them, so they are not taken from those that
/// the pod itself has.
pub(super) const MAX_CONNECTIONS: usize = 256;

/// The sockets at which calls to the webhook of a pod are accepted.
#[derive(Default)]
pub(super) struct WebhookListener {
    /// Absent: no call is taken.
    port: Option<u16>,
    /// Whether nothing is left of the process before this one.
    is_current: bool,
    /// Why it could not listen, so that it is logged once.
    pub(super) refused: Option<String>,
    /// Accepting ends with it.
    _accepting: Option<DropGuard>,
}

/// The pod whose calls are taken.
pub(super) struct CalledPod<'a> {
    pub(super) slot: Slot,
    pub(super) namespace: &'a Namespace,
    pub(super) acceptor: Acceptor,
    pub(super) drain: Drain,
}

impl WebhookListener {
    /// Whether the calls to this port are taken, and no others.
    pub(super) fn listens_at(&self, port: Option<u16>) -> bool {
        self.is_current && self.port == port
    }

    /// Takes no calls of a pod, and lets those pass that the process before this one took.
    pub(super) fn listen_nowhere(&mut self, interceptor: &mut Interceptor, slot: Slot) -> Result<(), NotServed> {
        interceptor.keep_inbound(slot, &[])?;
        *self = Self { is_current: true, ..Self::default() };
        Ok(())
    }

    /// Takes the calls to `port` of a pod, and none to others; returns the addresses.
    pub(super) fn listen(
        &mut self,
        interceptor: &mut Interceptor,
        pod: &CalledPod<'_>,
        port: Option<u16>,
    ) -> Result<Vec<SocketAddr>, NotServed> {
        let Some(port) = port else {
            self.listen_nowhere(interceptor, pod.slot)?;
            return Ok(Vec::new());
        };
        let own = own_addresses(pod.namespace)?.into_iter();
        let mut addresses: Vec<SocketAddr> = own.map(|ip| SocketAddr::new(ip, port)).collect();
        // What was there before leaves its room in the kernel's table.
        interceptor.keep_inbound(pod.slot, &addresses)?;
        let stop = CancellationToken::new();
        let accepting = stop.clone().drop_guard();
        for is_ipv6 in [false, true] {
            let mut of_family: Vec<SocketAddr> = addresses.clone();
            of_family.retain(|address| address.is_ipv6() == is_ipv6);
            let Some(first) = of_family.first() else { continue };
            let listener = listener::inbound(pod.namespace, first.ip())?;
            for address in &of_family {
                match interceptor.take_inbound(pod.slot, pod.namespace, *address, &listener) {
                    // Another pod of the node has it, too: a bridge's, or one of a second network.
                    Err(Error::Taken { .. }) => addresses.retain(|one| one != address),
                    taken => taken?,
                }
            }
            pod.accept(&listener, of_family, stop.clone()).map_err(NotServed::Accept)?;
        }
        if addresses.is_empty() {
            return Err(NotServed::NoAddress);
        }
        // Only now: until then the kernel sent calls to the sockets before.
        *self = Self { port: Some(port), is_current: true, refused: None, _accepting: Some(accepting) };
        Ok(addresses)
    }
}

impl CalledPod<'_> {
    /// Accepts at a socket to which the kernel sends connections that are meant for `addresses`.
    fn accept(
        &self,
        listener: &std::net::TcpListener,
        addresses: Vec<SocketAddr>,
        stop: CancellationToken,
    ) -> io::Result<()> {
        let listener = TcpListener::from_std(listener.try_clone()?)?;
        let pod = Some(PodSlot(self.slot.get()));
        // A process of the pod can dial the socket's own address, too.
        let origin = move |_: &_, own, _| {
            let purpose = Purpose::Webhook;
            addresses.contains(&own).then_some(Origin { pod, destination: Some(own), purpose })
        };
        let accepting = self.acceptor.clone().run(listener, origin, self.drain.clone());
        self.drain.spawn(async move {
            stop.run_until_cancelled(accepting).await;
        });
        Ok(())
    }
}

/// The addresses of a pod under which others reach it: at most as many as the kernel has room for.
pub(super) fn own_addresses(namespace: &Namespace) -> Result<Vec<IpAddr>, NotServed> {
    let is_local = |ip: &IpAddr| match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let found = namespace.run(interfaces::addresses)?.map_err(NotServed::Addresses)?;
    let mut addresses: Vec<IpAddr> = Vec::new();
    // In the order of the interfaces: a pod's own one comes before those of further networks.
    for (address, _) in found.into_iter().filter(|(address, is_loopback)| !is_loopback && !is_local(address)) {
        if addresses.len() < INBOUND_PER_POD as usize && !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() { Err(NotServed::NoAddress) } else { Ok(addresses) }
}
