//! Measures one manager with up to 10,000 pods of elastic operators.
//!
//! The manager is the program as users run it, beside a real API server and the StatefulSet controller. kwok simulates
//! nodes and pods. The proxies of the nodes are simulated in this process, each with its own connection and token.
//! At any time two pods that may write the same fail the benchmark. What is written on standard output is Markdown.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot go on panics")]
#![allow(clippy::disallowed_methods, reason = "benchmarks are not drained")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "that is what it is for")]
#![allow(clippy::large_futures, reason = "few, and never moved")]

mod operators;
mod proxies;
mod pods;
mod cluster;
mod deaths;
mod restart;
mod report;
#[path = "../../tests/harness/mod.rs"]
mod harness;
#[path = "../simulated/mod.rs"]
mod simulated;

use std::env;
use std::time::Duration;

use cluster::Cluster;
use kube::Client;
use proxies::Proxies;
use report::Row;
use rustls::crypto::aws_lc_rs;
use serde_json::Value;
use simulated::link::ManagerAddress;
use simulated::processor::Spent;
use simulated::{authority, connected};
use tokio::time::{self, Instant};

/// How many pods there are.
const SIZES: [usize; 5] = [10, 100, 1000, 5000, 10_000];

/// The same, with `--quick`.
const SIZES_QUICK: [usize; 2] = [10, 100];

/// How many replicas die, and how many do with `--quick`.
const DEATHS: (usize, usize) = (100, 20);

/// For how long the manager is left alone, and with `--quick`.
const IDLE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(5));

/// How long the manager may write what follows from the tables, such as shards and conditions, before it counts as
/// left alone; and how much longer for each pod.
const CALM: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(15));

/// How often it is looked whether something has happened.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long anything of one operator may take before the benchmark fails.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

/// The manager's program, as the kernel names it.
const MANAGER: &str = "e2e-manager";

fn main() {
    let arguments: Vec<String> = env::args().collect();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    // One size only, to look at it by itself.
    let one = arguments.iter().skip_while(|argument| *argument != "--pods").nth(1);
    let one: Option<usize> = one.map(|pods| pods.parse().expect("--pods: a number"));
    let sizes = match one {
        Some(pods) => vec![pods],
        None if quick => SIZES_QUICK.to_vec(),
        None => SIZES.to_vec(),
    };
    let deaths = if quick { DEATHS.1 } else { DEATHS.0 };
    let idle = if quick { IDLE.1 } else { IDLE.0 };
    drop(aws_lc_rs::default_provider().install_default());
    let rows: Vec<Row> = sizes
        .into_iter()
        .map(|pods| {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
            runtime.block_on(measure(pods, deaths, idle))
        })
        .collect();
    report::print(&rows, deaths);
}

async fn measure(pods: usize, deaths: usize, idle: Duration) -> Row {
    let cluster = Cluster::start(pods).await;
    let mut row = Row { pods: cluster.pods(), nodes: cluster.nodes.len(), ..Row::default() };
    let ca = authority(&cluster.plane, &cluster.client, &operators::namespace(0)).await;
    let begun = Instant::now();
    let proxies =
        Proxies::start(&cluster.nodes, ManagerAddress { address: cluster.address, ca: &ca }, &cluster.operators);
    connected(&cluster.manager, cluster.nodes.len()).await;
    row.connected = begun.elapsed();
    restart::until_even(&cluster, 0).await;
    row.settled = begun.elapsed();
    eprintln!("all connected after {:.1?}, settled after {:.1?}", row.connected, row.settled);
    time::sleep(CALM.0 + CALM.1 * u32::try_from(row.pods).unwrap()).await;
    let before = Spent::now();
    time::sleep(idle).await;
    row.idle_share = Spent::now().since(&before).of(MANAGER).as_secs_f64() / idle.as_secs_f64();
    row.idle_kilobytes = cluster.manager.resident_kilobytes().unwrap();
    eprintln!("idle: {:.3} of a core, {} kB", row.idle_share, row.idle_kilobytes);
    row.deaths = deaths::measure(&cluster, &proxies, deaths).await;
    eprintln!("{:?}", row.deaths);
    restart::until_even(&cluster, 0).await;
    row.restart = restart::measure(&cluster).await;
    cluster.operators.assert_no_violation();
    row.checked = cluster.operators.checked();
    eprintln!("{}", row.line());
    row
}

/// Asks the API server.
pub(crate) async fn send(client: &Client, method: &str, path: &str, body: &Value) -> Result<Value, kube::Error> {
    let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let request = http::Request::builder().method(method).uri(path).header("content-type", kind).body(body);
    client.request(request.unwrap()).await
}
