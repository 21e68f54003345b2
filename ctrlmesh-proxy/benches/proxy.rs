//! Measures what the proxy costs, beside a direct connection, nginx and a bare hyper relay.
//!
//! `cargo bench -p ctrlmesh-proxy -- request|list|watch|rule|idle|profile [--quick]`. All contestants run at once and
//! are asked in turn; every other round goes from the last to the first. CPU is what the kernel counts for a
//! contestant's processes. Each figure is the median of the rounds, with the least and the greatest.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::large_futures, reason = "a bench prints, or panics")]
#![allow(clippy::disallowed_methods, reason = "benches are not drained")]
#![allow(clippy::cast_precision_loss, reason = "what is counted is far below 2^52")]

mod bed;

use std::collections::BTreeMap;
use std::env;
use std::path::Path;
use std::time::Instant;

use bed::load::Client;
use bed::process::Process;
use bed::profile::Profile;
use bed::{Bed, Kind, backend, load, protocol, relay, spread};
use http::Version;
use http_body_util::BodyExt as _;
use nix::sys::resource;
use nix::sys::resource::Resource;
use tokio::runtime;
use tokio::runtime::LocalOptions;

const VERSIONS: [Version; 2] = [Version::HTTP_2, Version::HTTP_11];
const ALL: &[Kind] = &[Kind::Direct, Kind::Nginx, Kind::Relay, Kind::Ours];

/// How much is asked.
#[derive(Clone, Copy)]
struct Size {
    rounds: usize,
    /// Divides what is asked in a round.
    divisor: usize,
}

/// Figures by column, for each contestant.
type Figures = BTreeMap<(usize, &'static str), Vec<f64>>;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = runtime::Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).unwrap();
    match arguments.as_slice() {
        ["backend", address, dir] => {
            runtime.block_on(backend::run(address.parse().unwrap(), Path::new(dir)));
        }
        ["relay", address, dir, to] => {
            runtime.block_on(relay::run(address.parse().unwrap(), Path::new(dir), to.parse().unwrap()));
        }
        _ => {
            let quick = arguments.contains(&"--quick");
            let size = if quick { Size { rounds: 3, divisor: 4 } } else { Size { rounds: 7, divisor: 1 } };
            let chosen =
                |name| !arguments.iter().any(|argument| BENCHES.contains(argument)) || arguments.contains(&name);
            // `cargo test --benches` only builds.
            if arguments.contains(&"--test") {
                return;
            }
            for name in BENCHES.iter().filter(|name| chosen(**name)) {
                match *name {
                    "request" => runtime.block_on(request(size)),
                    "list" => runtime.block_on(list(size)),
                    "watch" => runtime.block_on(watch(size)),
                    "rule" => runtime.block_on(rule(size)),
                    "profile" => runtime.block_on(profile(size)),
                    _ => runtime.block_on(idle(size)),
                }
            }
        }
    }
}

const BENCHES: [&str; 6] = ["request", "list", "watch", "rule", "idle", "profile"];

/// A small GET, one at a time and 64 at once.
async fn request(size: Size) {
    let bed = Bed::start(ALL);
    for version in VERSIONS {
        for (at_once, count) in [(1, 20_000), (64, 1_000)] {
            let mut figures = Figures::new();
            for round in 0..size.rounds {
                for (kind, process) in bed.round(round) {
                    let count = count / size.divisor;
                    load::requests(&bed.pki, process.address, version, SMALL, at_once, count / 10).await;
                    let (before, begun) = (process.cpu_seconds(), Instant::now());
                    let mut took = load::requests(&bed.pki, process.address, version, SMALL, at_once, count).await;
                    let (cpu, wall) = (process.cpu_seconds() - before, begun.elapsed().as_secs_f64());
                    let requests = took.len() as f64;
                    note(&mut figures, kind, "1 p50 µs", load::percentile(&mut took, 0.5));
                    note(&mut figures, kind, "2 p99 µs", load::percentile(&mut took, 0.99));
                    note(&mut figures, kind, "3 CPU µs/request", cpu * 1e6 / requests);
                    note(&mut figures, kind, "4 requests/s", requests / wall);
                }
            }
            show(&format!("small GET, {}, c={at_once}", protocol(version)), &bed.kinds(), figures);
        }
    }
}

/// A list of 100 MB.
async fn list(size: Size) {
    let bed = Bed::start(ALL);
    for version in VERSIONS {
        let mut figures = Figures::new();
        for round in 0..size.rounds {
            for (kind, process) in bed.round(round) {
                let mut client = Client::connect(&bed.pki, process.address, version).await;
                let times = (8 / size.divisor).max(2);
                let (before, begun) = (process.cpu_seconds(), Instant::now());
                let mut bytes = 0;
                for _ in 0..times {
                    bytes += load::drain(client.get("/list").await).await;
                }
                let (cpu, wall) = (process.cpu_seconds() - before, begun.elapsed().as_secs_f64());
                assert_eq!(bytes, times * backend::LIST_BYTES);
                note(&mut figures, kind, "1 MB/s", bytes as f64 / 1e6 / wall);
                note(&mut figures, kind, "2 CPU s/GB", cpu * 1e9 / bytes as f64);
            }
        }
        show(&format!("100 MB list, {}", protocol(version)), &bed.kinds(), figures);
    }
}

/// Events of one watch, a millisecond apart: of ours with a rule, too, whose events are looked at.
async fn watch(size: Size) {
    let bed = Bed::start(&[ALL, &[Kind::Ruled]].concat());
    for (version, (path, bytes)) in VERSIONS.into_iter().flat_map(|one| backend::WATCHES.map(|two| (one, two))) {
        let mut figures = Figures::new();
        for round in 0..size.rounds {
            for (kind, process) in bed.round(round) {
                let mut client = Client::connect(&bed.pki, process.address, version).await;
                let count = 2000 / size.divisor;
                let body = client.get(path).await;
                let before = process.cpu_seconds();
                let mut late = load::events(body, count).await;
                let cpu = process.cpu_seconds() - before;
                note(&mut figures, kind, "1 p50 µs", load::percentile(&mut late, 0.5));
                note(&mut figures, kind, "2 p99 µs", load::percentile(&mut late, 0.99));
                note(&mut figures, kind, "3 CPU µs/event", cpu * 1e6 / count as f64);
            }
        }
        let title = format!("watch event of {bytes} bytes, {}", protocol(version));
        show(&title, &bed.kinds(), figures);
    }
}

/// A list that a rule narrows, beside the same without a rule.
async fn rule(size: Size) {
    let bed = Bed::start(&[Kind::Ours, Kind::Ruled]);
    let mut figures = Figures::new();
    for round in 0..size.rounds * 2 {
        for (kind, process) in bed.round(round) {
            let count = 20_000 / size.divisor;
            let (version, path) = (Version::HTTP_2, "/api/v1/pods?limit=500&resourceVersion=0");
            let before = process.cpu_seconds();
            let mut took = load::requests(&bed.pki, process.address, version, path, 1, count).await;
            let cpu = process.cpu_seconds() - before;
            note(&mut figures, kind, "1 p50 µs", load::percentile(&mut took, 0.5));
            note(&mut figures, kind, "2 CPU µs/request", cpu * 1e6 / count as f64);
        }
    }
    show("small list, h2, c=1", &bed.kinds(), figures);
}

/// Memory of watches on which nothing happens, memory of nothing, and the time until somebody listens.
async fn idle(size: Size) {
    let watches = IDLE_WATCHES.min(most_watches()) / size.divisor;
    for version in VERSIONS {
        let mut figures = Figures::new();
        let mut kinds = [Kind::Nginx, Kind::Relay, Kind::Ours];
        for _ in 0..size.rounds.min(3) {
            let bed = Bed::start(&kinds);
            for (kind, process) in bed.round(0) {
                let before = process.resident_bytes();
                let held = hold(&bed, process, version, watches).await;
                let grown = process.resident_bytes().saturating_sub(before);
                note(&mut figures, kind, "1 KiB/watch", grown as f64 / 1024.0 / watches as f64);
                note(&mut figures, kind, "2 MiB idle", before as f64 / 1024.0 / 1024.0);
                note(&mut figures, kind, "3 ms to listen", process.startup.as_secs_f64() * 1e3);
                drop(held);
            }
            kinds.reverse();
        }
        kinds.sort_by_key(|kind| *kind as usize);
        show(&format!("{watches} idle watches, {}", protocol(version)), &kinds, figures);
    }
}

/// Opens watches, over HTTP/2 as many on one connection as an operator has.
async fn hold(bed: &Bed, process: &Process, version: Version, watches: usize) -> Vec<(Client, hyper::body::Incoming)> {
    let mut held: Vec<(Client, hyper::body::Incoming)> = Vec::with_capacity(watches);
    for number in 0..watches {
        let mut client = match held.last() {
            Some((last, _)) if number % WATCHES_OF_ONE > 0 => last.another(&bed.pki, process.address).await,
            _ => Client::connect(&bed.pki, process.address, version).await,
        };
        let mut body = client.get("/api/v1/pods?watch=true&resourceVersion=1").await;
        // The watch stands once its first event is here.
        body.frame().await.unwrap().unwrap();
        held.push((client, body));
    }
    held
}

/// The functions that cost most on a small GET.
async fn profile(size: Size) {
    let bed = Bed::start(&[Kind::Ours]);
    let (_, process) = bed.round(0)[0];
    for version in VERSIONS {
        let count = 100_000 / size.divisor;
        load::requests(&bed.pki, process.address, version, SMALL, 1, count / 10).await;
        let Some(profile) = Profile::begin(bed.pki.dir.path(), process.id()) else {
            return println!("perf is not installed here: on Debian, apt-get install linux-perf");
        };
        load::requests(&bed.pki, process.address, version, SMALL, 1, count).await;
        println!("\n### small GET, {}, c=1: the functions that cost most\n", protocol(version));
        profile.end().iter().for_each(|line| println!("    {line}"));
    }
}

/// How many watches `idle` opens.
const IDLE_WATCHES: usize = 10_000;

/// How many of them one operator has.
const WATCHES_OF_ONE: usize = 100;

const SMALL: &str = "/api/v1/namespaces/default/configmaps/small";

/// How many watches a contestant can hold: of each, over HTTP/1.1, it has two descriptors open.
fn most_watches() -> usize {
    let (_, most) = resource::getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    // Who is started inherits this; where more is forbidden, we take what is allowed.
    let raised = resource::setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES).is_ok();
    let allowed = if raised { OPEN_FILES } else { most };
    let _as_before = resource::setrlimit(Resource::RLIMIT_NOFILE, allowed, allowed);
    usize::try_from(allowed.saturating_sub(OTHER_FILES) / 2).unwrap()
}

/// How many files a contestant would have open.
const OPEN_FILES: u64 = 65_536;

/// How many it has open beside watches.
const OTHER_FILES: u64 = 1_000;

fn note(figures: &mut Figures, kind: Kind, column: &'static str, value: f64) {
    figures.entry((kind as usize, column)).or_default().push(value);
}

/// Prints one table.
fn show(title: &str, kinds: &[Kind], mut figures: Figures) {
    let mut columns: Vec<&'static str> = figures.keys().map(|(_, column)| *column).collect();
    columns.sort_unstable();
    columns.dedup();
    print!("\n### {title}\n\n| |");
    for column in &columns {
        print!(" {} |", &column[2..]);
    }
    print!("\n| --- |");
    print!("{}", " --- |".repeat(columns.len()));
    println!();
    for kind in kinds {
        print!("| {kind} |");
        for column in &columns {
            print!(
                " {} |",
                figures.get_mut(&(*kind as usize, *column)).map(|values| spread(values)).unwrap_or_default()
            );
        }
        println!();
    }
}
