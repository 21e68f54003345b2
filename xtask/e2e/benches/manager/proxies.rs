//! Simulates the connections of ten thousand proxies.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::wire::{Content, Hello, PodEntry, PodId, PolicySummary, Report, Verdict};
use ctrlmesh_proxy::manager_client::Endpoint;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::jitter::random;
use prost::Message as _;
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{self, Instant};
use tokio_stream::wrappers::ReceiverStream;

use crate::pods::OnePod;

/// The longest wait before coming back, as in the real one: doubled after each attempt, up to the second.
const WAIT: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(8));

/// Where the first one comes from; each has an address of its own, as pods have.
const FIRST: Ipv4Addr = Ipv4Addr::new(127, 1, 0, 1);

/// How often it is looked whether all have acknowledged.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// All of them.
pub(crate) struct Proxies {
    _tasks: JoinSet<()>,
    _folder: TempDir,
    counted: Arc<Rates>,
}

#[derive(Debug, Default)]
struct Rates {
    updates: AtomicUsize,
    down: AtomicUsize,
    up: AtomicUsize,
    /// When each of the latest was acknowledged.
    acknowledged: Mutex<Vec<Instant>>,
}

/// One of them.
struct Proxy {
    manager: Endpoint,
    to: SocketAddr,
    from: IpAddr,
    pod: OnePod,
}

impl Proxies {
    /// Starts one for each pod, of the manager at `address` that `ca` vouches for.
    pub(crate) fn start(pods: &[OnePod], address: SocketAddr, ca: &Path) -> Self {
        let folder = TempDir::new().unwrap();
        let (mut tasks, counted) = (JoinSet::new(), Arc::<Rates>::default());
        for (number, pod) in (0_u32..).zip(pods) {
            let token = folder.path().join(&pod.uid);
            fs::write(&token, &pod.token).unwrap();
            let manager = Endpoint {
                address: address.to_string().parse().unwrap(),
                service_ip: None,
                ca: ca.to_owned(),
                token,
                state: folder.path().to_owned(),
            };
            let from = Ipv4Addr::from_bits(FIRST.to_bits() + number).into();
            let proxy = Proxy { manager, to: address, from, pod: pod.clone() };
            tasks.spawn(live(proxy, counted.clone()));
        }
        Self { _tasks: tasks, _folder: folder, counted }
    }

    /// When each of the next `count` policies was acknowledged, in this order, once all were.
    pub(crate) async fn acknowledged(&self, count: usize) -> Vec<Instant> {
        loop {
            {
                let mut times = self.counted.acknowledged.lock().unwrap();
                if times.len() >= count {
                    return std::mem::take(&mut times);
                }
            }
            time::sleep(LOOK_EVERY).await;
        }
    }

    /// Of one policy, the bytes of the message down and of that up.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let updates = self.counted.updates.load(Ordering::Relaxed).max(1);
        let of = |bytes: &AtomicUsize| bytes.load(Ordering::Relaxed) / updates;
        (of(&self.counted.down), of(&self.counted.up))
    }
}

async fn live(proxy: Proxy, counted: Arc<Rates>) {
    let mut known = None;
    let mut ticket = Bytes::new();
    let mut wait = WAIT.0;
    time::sleep(random(wait)).await;
    loop {
        let before = known.clone();
        drop(follow(&proxy, (&mut known, &mut ticket), &counted).await);
        wait = if known == before { (wait * 2).min(WAIT.1) } else { WAIT.0 };
        time::sleep(random(wait)).await;
    }
}

async fn follow(
    proxy: &Proxy,
    (known, ticket): (&mut Option<PolicySummary>, &mut Bytes),
    counted: &Rates,
) -> anyhow::Result<()> {
    let Proxy { manager, to, from, pod } = proxy;
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(*from, 0))?;
    let stream = socket.connect(*to).await?;
    let mut link = manager.connect_over(stream, &Drain::default()).await?;
    let (reports, outbound) = mpsc::channel(8);
    let id = PodId { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() };
    let hello = Hello { pod: Some(id), known: known.iter().cloned().collect(), ..Hello::default() };
    reports.send(Report { content: Some(Content::Hello(hello)) }).await?;
    let mut updates = link.follow(ReceiverStream::new(outbound), ticket).await?;
    while let Some(update) = updates.message().await? {
        counted.down.fetch_add(update.encoded_len(), Ordering::Relaxed);
        if !update.ticket.is_empty() {
            *ticket = Bytes::copy_from_slice(&update.ticket);
        }
        for entry in update.policies {
            let (operator, version) = (entry.operator.clone(), entry.version);
            let verdict = verdict(entry);
            *known = Some(PolicySummary {
                operator,
                version,
                pod: verdict.pod.clone(),
                digest: verdict.digest,
                epoch: verdict.epoch,
                webhook: None,
            });
            let report = Report { content: Some(Content::Verdict(verdict)) };
            counted.updates.fetch_add(1, Ordering::Relaxed);
            counted.up.fetch_add(report.encoded_len(), Ordering::Relaxed);
            reports.send(report).await?;
            counted.acknowledged.lock().unwrap().push(Instant::now());
        }
    }
    Ok(())
}

fn verdict(entry: PodEntry) -> Verdict {
    let policy: ctrlmesh_common::policy::Policy = serde_json::from_slice(&entry.policy).unwrap();
    Verdict { pod: entry.pod, digest: entry.digest, epoch: policy.epoch, refused: String::new() }
}
