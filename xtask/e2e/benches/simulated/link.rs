//! One simulated proxy's connection to the manager, from an address of its own, as pods and nodes have one.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::wire::{Content, Hello, PodEntry, PolicySummary, Report, Update};
use ctrlmesh_proxy::manager_client::{Connection, Endpoint};
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::jitter::random;
use tokio::net::TcpSocket;
use tokio::sync::mpsc;
use tokio::time;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// The longest wait before coming back, as in the real one: doubled after each attempt, up to the second.
const WAIT: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(8));

/// Where the first one comes from.
const FIRST: Ipv4Addr = Ipv4Addr::new(127, 1, 0, 1);

/// Reports that wait to be sent.
const REPORTS: usize = 8;

/// Where the manager is, and whom the proxies believe to be it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ManagerAddress<'a> {
    pub(crate) address: SocketAddr,
    pub(crate) ca: &'a Path,
}

/// How one proxy reaches the manager.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    manager: Endpoint,
    to: SocketAddr,
    from: IpAddr,
}

/// A stream of policies.
pub(crate) struct Followed {
    pub(crate) connection: Connection,
    pub(crate) updates: Streaming<Update>,
    pub(crate) reports: mpsc::Sender<Report>,
}

/// The wait before a proxy comes back.
#[derive(Debug)]
pub(crate) struct Wait(Duration);

impl Link {
    /// That of the proxy of this number, from 0; its token is kept as `name` in `folder`.
    pub(crate) fn new(manager: ManagerAddress<'_>, folder: &Path, name: &str, token: &str, number: u32) -> Self {
        let file = folder.join(name);
        fs::write(&file, token).unwrap();
        let endpoint = Endpoint {
            address: manager.address.to_string().parse().unwrap(),
            service_ip: None,
            ca: manager.ca.to_owned(),
            token: file,
            state: folder.to_owned(),
        };
        let from = Ipv4Addr::from_bits(FIRST.to_bits() + number).into();
        Self { manager: endpoint, to: manager.address, from }
    }

    /// Connects, and says whom the proxy serves.
    pub(crate) async fn follow(&self, hello: Hello, ticket: &Bytes) -> anyhow::Result<Followed> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(self.from, 0))?;
        let stream = socket.connect(self.to).await?;
        let mut connection = self.manager.connect_over(stream, &Drain::default()).await?;
        let (reports, outbound) = mpsc::channel(REPORTS);
        reports.send(Report { content: Some(Content::Hello(hello)) }).await?;
        let updates = connection.follow(ReceiverStream::new(outbound), ticket).await?;
        Ok(Followed { connection, updates, reports })
    }
}

impl Wait {
    /// Before the first attempt.
    pub(crate) async fn begin() -> Self {
        time::sleep(random(WAIT.0)).await;
        Self(WAIT.0)
    }

    /// After an attempt that brought something new or not.
    pub(crate) async fn before_next(&mut self, brought: bool) {
        self.0 = if brought { WAIT.0 } else { (self.0 * 2).min(WAIT.1) };
        time::sleep(random(self.0)).await;
    }
}

/// The policy in an entry.
pub(crate) fn policy(entry: &PodEntry) -> Policy {
    serde_json::from_slice(&entry.policy).unwrap()
}

/// What a proxy says of an entry that it has put in force.
pub(crate) fn summary(entry: &PodEntry, epoch: u64) -> PolicySummary {
    PolicySummary {
        pod: entry.pod.clone(),
        digest: entry.digest,
        epoch,
        operator: entry.operator.clone(),
        version: entry.version,
        webhook: None,
    }
}
