//! What does one manager cost, with 10,000 proxies?
//!
//! The manager's part runs in a process of its own, as it would; the proxies are simulated by another, each with its own
//! connection, its own pod and its own token, which a real API server reviews. What is written on standard output is
//! Markdown.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot go on panics")]
#![allow(clippy::disallowed_methods, reason = "benchmarks are not drained")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "that is what it is for")]
#![allow(clippy::large_futures, reason = "one, and never moved")]

mod compiled;
mod pods;
mod proxies;
mod served;

use std::time::Duration;

use ctrlmesh_testbed::{ControlPlane, Options};
use tokio::time::Instant;

/// Simulated proxies.
const PROXIES: usize = 10_000;

/// The same, with `--quick`.
const PROXIES_QUICK: usize = 500;

/// ShardingConfigs.
const CONFIGS: usize = 1000;

/// How often everything is changed.
const CHANGES: u64 = 10;

/// Within which all proxies are to be back.
const BACK: Duration = Duration::from_secs(10);

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--serve") {
        return served::main(&arguments[at + 1..]);
    }
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let proxies = if quick { PROXIES_QUICK } else { PROXIES };
    compiled::measure(CONFIGS, proxies);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(measure(proxies));
}

/// What was measured.
#[derive(Debug, Default)]
struct Measured {
    connected: Duration,
    changes: Vec<Duration>,
    resident: (u64, u64),
    bytes: (usize, usize),
    started: Duration,
    back: Duration,
}

async fn measure(count: usize) {
    let plane = ControlPlane::start(&Options::default()).unwrap();
    let namespace = plane.namespace("bench").await.unwrap();
    let begun = Instant::now();
    let pods = pods::create(&plane, &namespace, count).await;
    eprintln!("{count} pods made in {:?}", begun.elapsed());
    let mut manager = served::Manager::start(&plane, &namespace, &pods, None);
    let mut measured = Measured { resident: (manager.resident(), 0), ..Measured::default() };
    let begun = Instant::now();
    let proxies = proxies::Proxies::start(&pods, &manager);
    manager.ask("connected", count);
    measured.connected = begun.elapsed();
    for _ in 0..CHANGES {
        measured.changes.extend(manager.change(count));
    }
    measured.changes.sort();
    measured.resident.1 = manager.resident();
    measured.bytes = proxies.bytes();
    let address = manager.address();
    manager.kill();
    let begun = Instant::now();
    let mut manager = served::Manager::start(&plane, &namespace, &pods, Some(address));
    measured.started = begun.elapsed();
    manager.ask("connected", count);
    measured.back = begun.elapsed();
    measured.print(count);
}

impl Measured {
    fn print(&self, count: usize) {
        let last = self.changes.len() - 1;
        let at = |hundredths: usize| self.changes[last * hundredths / 100];
        let (idle, full) = (self.resident.0 >> 20, self.resident.1 >> 20);
        println!("| {count} proxies on one manager | |\n| --- | --- |");
        println!("| all connected, from nothing | {:.1?} |", self.connected);
        println!("| one change of every policy, until it is acknowledged: p50 | {:.0?} |", at(50));
        println!("| p99 | {:.0?} |", at(99));
        println!("| all | {:.0?} |", at(100));
        println!("| resident memory without a proxy, and with all | {idle} MB, {full} MB |");
        let (down, up) = self.bytes;
        println!("| bytes of messages a client and change, down and up | {down}, {up} |");
        println!("| killed and restarted: listening after | {:.1?} |", self.started);
        println!("| all proxies back after | {:.1?} (target {BACK:?}) |", self.back);
    }
}
