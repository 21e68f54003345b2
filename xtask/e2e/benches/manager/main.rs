//! Measures one manager with 10,000 proxies.
//!
//! The manager is the program as users run it, beside a real API server with 1,000 ShardingConfigs and 10,000 pods:
//! half of them one operator's, the others of a few each. The proxies are simulated in this process, each with its own
//! connection, its own pod and its own token. What is written on standard output is Markdown.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot go on panics")]
#![allow(clippy::disallowed_methods, reason = "benchmarks are not drained")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "that is what it is for")]
#![allow(clippy::large_futures, reason = "one, and never moved")]

mod cluster;
mod compiled;
#[path = "../../tests/harness/mod.rs"]
mod harness;
mod pods;
mod proxies;
#[path = "../simulated/mod.rs"]
mod simulated;

use std::net::SocketAddr;
use std::time::Duration;

use cluster::{Cluster, Config};
use ctrlmesh_testbed::{ControlPlane, Options};
use harness::running::Manager;
use proxies::Proxies;
use rustls::crypto::aws_lc_rs;
use simulated::link::ManagerAddress;
use simulated::processor::Spent;
use simulated::{SYSTEM, authority, connected, free_address};
use tokio::time::{self, Instant};

/// Simulated proxies.
const PROXIES: usize = 10_000;

/// The same, with `--quick`.
const PROXIES_QUICK: usize = 1000;

/// ShardingConfigs.
const CONFIGS: usize = 1000;

/// How often the large operator's ShardingConfig is changed, and how many of the small ones are.
const CHANGES: (usize, usize) = (10, 100);

/// Within which all proxies are to be back.
const BACK: Duration = Duration::from_secs(10);

/// What is left alone between two changes, so that one is not the other's: a status is written once a second, that of
/// an epoch and twice what proxies say of it.
const PAUSE: Duration = Duration::from_secs(4);

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let proxies = if quick { PROXIES_QUICK } else { PROXIES };
    compiled::measure(CONFIGS, proxies);
    drop(aws_lc_rs::default_provider().install_default());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(measure(proxies, if quick { (3, 10) } else { CHANGES }));
}

/// What was measured.
#[derive(Debug, Default)]
struct Costs {
    connected: Duration,
    large: Vec<Duration>,
    small: Vec<Duration>,
    resident: (u64, u64),
    bytes: (usize, usize),
    started: Duration,
    back: Duration,
}

async fn measure(count: usize, changes: (usize, usize)) {
    let plane = ControlPlane::start(&Options::default()).unwrap();
    let begun = Instant::now();
    let cluster = Cluster::new(&plane, CONFIGS, count).await;
    let count = cluster.pods.len();
    eprintln!("{count} pods made in {:?}", begun.elapsed());
    let address = free_address();
    let manager = start(&plane, address);
    let ca = authority(&plane, &cluster.client, &Config::large().namespace).await;
    let idle = manager.resident_kilobytes().unwrap();
    let begun = Instant::now();
    let before = Spent::now();
    let proxies = Proxies::start(&cluster.pods, ManagerAddress { address, ca: &ca });
    connected(&manager, count).await;
    let mut measured = Costs { connected: begun.elapsed(), ..Costs::default() };
    tell("all connected", &manager, &before).await;
    // Each has its first policy then.
    proxies.acknowledged(count).await;
    let before = Spent::now();
    for round in 1..=changes.0 {
        let change = cluster.change(Config::large(), round);
        let times = changed(&proxies, change, cluster.large).await;
        eprintln!("a large one: first {:.2?}, last {:.2?}", times[0], times[times.len() - 1]);
        measured.large.extend(times);
    }
    tell("large changes", &manager, &before).await;
    let before = Spent::now();
    for number in 0..changes.1 {
        let change = cluster.change(Config::small(number), 1);
        measured.small.extend(changed(&proxies, change, cluster.each).await.last());
    }
    tell("small changes", &manager, &before).await;
    measured.resident = (idle, manager.resident_kilobytes().unwrap());
    measured.bytes = proxies.bytes();
    manager.kill().unwrap();
    let (begun, before) = (Instant::now(), Spent::now());
    let manager = start(&plane, address);
    manager.address("proxies").await.unwrap();
    measured.started = begun.elapsed();
    connected(&manager, count).await;
    measured.back = begun.elapsed();
    tell("all back", &manager, &before).await;
    measured.print(&cluster);
}

fn start(plane: &ControlPlane, address: SocketAddr) -> Manager {
    Manager::start(plane, SYSTEM, &[&format!("--listen-grpc={address}")]).unwrap()
}

/// Tells what all that took, on the way.
async fn tell(what: &str, manager: &Manager, before: &Spent) {
    let counted = async |name: &str| {
        let name = format!("ctrlmesh_manager_{name}");
        manager.counted(&name).await.unwrap_or_default()
    };
    let (reviews, refused) = (counted("token_reviews").await, counted("refused").await);
    let tickets = counted("token_review_tickets").await;
    let spent = Spent::now().since(before);
    let most = manager.most_kilobytes().unwrap_or_default() >> 10;
    eprintln!("{what}: {spent}; {reviews} reviews, {tickets} tickets, {refused} refused, at most {most} MB resident");
}

/// After how long each of the `count` proxies concerned has acknowledged a change, in this order.
async fn changed(proxies: &Proxies, change: impl Future<Output = ()>, count: usize) -> Vec<Duration> {
    time::sleep(PAUSE).await;
    let begun = Instant::now();
    change.await;
    let times = proxies.acknowledged(count).await;
    times.into_iter().map(|time| time.duration_since(begun)).collect()
}

impl Costs {
    fn print(mut self, cluster: &Cluster) {
        self.large.sort();
        self.small.sort();
        let at = |times: &[Duration], hundredths: usize| {
            let time = times[(times.len() - 1) * hundredths / 100];
            format!("{time:.2?}")
        };
        let p = |times: &[Duration]| format!("{} / {} / {}", at(times, 50), at(times, 99), at(times, 100));
        let (idle, full) = (self.resident.0 >> 10, self.resident.1 >> 10);
        println!("| {CONFIGS} ShardingConfigs, {} proxies on one manager | |", cluster.pods.len());
        println!("| --- | --- |");
        println!("| all connected, from nothing | {:.1?} |", self.connected);
        println!(
            "| one ShardingConfig of {} pods changed, until a proxy acknowledges: p50 / p99 / all | {} |",
            cluster.large,
            p(&self.large)
        );
        println!(
            "| one of {} pods changed, until all its proxies have: p50 / p99 / longest | {} |",
            cluster.each,
            p(&self.small)
        );
        println!("| resident memory without a proxy, and with all | {idle} MB, {full} MB |");
        let (down, up) = self.bytes;
        println!("| bytes of messages a client and change, down and up | {down}, {up} |");
        println!("| killed and restarted: listening after | {:.1?} |", self.started);
        println!("| all proxies back after | {:.1?} (target {BACK:?}) |", self.back);
    }
}
