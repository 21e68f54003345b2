//! Drops what pods send to the API server past their proxy.
//!
//! Programs at `connect()` see the address that a pod dials, before a Service of its own, or of somebody it deceived,
//! leads elsewhere. What comes out of that translation is seen where packets leave the node, or arrive at it. So a
//! table of nftables in the node's network namespace drops TCP packets from addresses of pods to those of API servers.
//! The proxy's own connections come from the node's address.
//!
//! The table outlives the process by 15 minutes. The kernel programs end with the cgroups of their pods; of an address
//! nothing says that it is another pod's now.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::network::interfaces;
use crate::network::nftables::{self, Rules};

/// The table is written again after so long, a third of what it lives.
const RENEWAL: Duration = Duration::from_secs(nftables::LIFETIME.as_secs() / 3);

/// The table of one owner in the network namespace of the process.
#[derive(Debug)]
pub struct BypassFilter {
    table: String,
    written: Option<(Rules, Instant)>,
    /// What the table has counted since it was written.
    counted: BTreeMap<IpAddr, u64>,
}

/// What is dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bypasses {
    /// Addresses of pods. Those of the node itself, and those that nobody sends from, do not count.
    pub pods: BTreeSet<IpAddr>,
    /// All addresses of the API server.
    pub servers: BTreeSet<SocketAddr>,
    /// Those of them at which API servers listen themselves. Where one is an address of the node, its port is closed to
    /// the pods at all addresses of the node.
    pub endpoints: BTreeSet<SocketAddr>,
}

impl BypassFilter {
    /// Writes nothing yet: a table that is there stays.
    pub fn new(owner: &str) -> Self {
        Self { table: table(owner), written: None, counted: BTreeMap::new() }
    }

    /// Drops this from now on, and nothing else, for 15 minutes. Returns whether something was written.
    ///
    /// # Errors
    /// If the kernel has no nftables, or does not let us. The table stays as it was.
    pub fn apply(&mut self, bypasses: &Bypasses) -> io::Result<bool> {
        let own: BTreeSet<IpAddr> = interfaces::addresses()?.into_iter().map(|(address, _)| address).collect();
        let ports = bypasses.endpoints.iter().filter(|server| own.contains(&server.ip()));
        let sources = bypasses.pods.iter().filter(|pod| is_of_a_pod(pod) && !own.contains(pod));
        let rules = Rules {
            local_ports: ports.map(SocketAddr::port).collect(),
            sources: sources.copied().collect(),
            destinations: bypasses.servers.union(&bypasses.endpoints).copied().collect(),
        };
        if self.written.as_ref().is_some_and(|(before, at)| *before == rules && at.elapsed() < RENEWAL) {
            return Ok(false);
        }
        nftables::write(&self.table, &rules)?;
        (self.written, self.counted) = (Some((rules, Instant::now())), BTreeMap::new());
        Ok(true)
    }

    /// How many packets of each pod were dropped since this was asked last, where any were. A table that somebody has
    /// removed is written again by the next [`Self::apply`].
    ///
    /// # Errors
    /// If the kernel does not answer.
    pub fn dropped(&mut self) -> io::Result<BTreeMap<IpAddr, u64>> {
        if self.written.is_none() {
            return Ok(BTreeMap::new());
        }
        let Some(now) = nftables::dropped(&self.table)? else {
            self.written = None;
            return Ok(BTreeMap::new());
        };
        let before = std::mem::replace(&mut self.counted, now);
        let news = self.counted.iter().map(|(pod, now)| (*pod, now - before.get(pod).unwrap_or(&0).min(now)));
        Ok(news.filter(|(_, news)| *news > 0).collect())
    }

    /// Removes the table of `owner`. Where the kernel has no nftables, or does not let us see them, there is none of
    /// ours.
    ///
    /// # Errors
    /// If it stays.
    pub fn remove(owner: &str) -> io::Result<()> {
        const NONE: [Errno; 5] =
            [Errno::EPERM, Errno::EACCES, Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT, Errno::EOPNOTSUPP];
        match nftables::remove(&table(owner)) {
            Err(error) if NONE.iter().any(|none| error.raw_os_error() == Some(*none as i32)) => Ok(()),
            removed => removed,
        }
    }
}

fn table(owner: &str) -> String {
    format!("ctrlmesh-{owner}")
}

fn is_of_a_pod(address: &IpAddr) -> bool {
    !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}
