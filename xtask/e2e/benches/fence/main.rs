//! Measures what the fence in the API server adds to a write, and how long a change of the table takes to be proved.
//!
//! Real kube-apiserver and etcd, on this machine, without fsync: so a write is as cheap as it can be. One client
//! changes a `ConfigMap` and a Secret in turn, of which one is fenced; in the second half the other one is. What is
//! written on standard output is Markdown.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot go on panics")]
#![allow(clippy::disallowed_methods, reason = "benchmarks are not drained")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "that is what it is for")]
#![allow(clippy::large_futures, reason = "one, and never moved")]

use std::fmt::Debug;
use std::time::{Duration, Instant};

use bed::{Bed, Operator, create};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Resource};
use rustls::crypto::aws_lc_rs;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

#[allow(dead_code, reason = "the tests use all of it")]
#[path = "../../tests/control_plane_fence/bed.rs"]
mod bed;
#[path = "../../tests/harness/mod.rs"]
mod harness;

/// Writes of each sort, in both halves together.
const PATCHES: usize = 3000;

/// The same, with `--quick`.
const PATCHES_QUICK: usize = 300;

/// Writes before any is measured.
const WARM_UP: usize = 200;

/// The object of either kind.
const NAME: &str = "measured";

/// The API group and plural of the fenced kind, in either half.
const HALVES: [&str; 2] = ["configmaps", "secrets"];

/// Latencies, by who writes what.
#[derive(Default)]
struct Measured {
    unfenced: Vec<Duration>,
    owner: Vec<Duration>,
    other: Vec<Duration>,
}

fn main() {
    drop(aws_lc_rs::default_provider().install_default());
    let quick = std::env::args().any(|argument| argument == "--quick");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(measure(if quick { PATCHES_QUICK } else { PATCHES }));
}

async fn measure(count: usize) {
    let bed = bed::shared().await.unwrap();
    let operator = bed.operator().await.unwrap();
    let place = operator.place("seven");
    let owner = bed.pod(&operator, "op-0").await.unwrap();
    let object = || json!({"metadata": {"name": NAME}});
    create(&Api::<ConfigMap>::namespaced(bed.client.clone(), &place), object()).await.unwrap();
    create(&Api::<Secret>::namespaced(bed.client.clone(), &place), object()).await.unwrap();
    // As in a cluster, every slot has an owner.
    let slots: serde_json::Map<_, _> = (0..32).map(|slot| (slot.to_string(), json!("op-1-normal"))).collect();
    bed.write_table(&operator, 2, json!({"slots": slots})).await.unwrap();
    bed.enforced(&operator, 2).await.unwrap();
    let mut measured = Measured::default();
    for (half, fenced) in HALVES.iter().enumerate() {
        fence(&bed, &operator, fenced).await;
        let (maps, secrets) = (Api::namespaced(owner.clone(), &place), Api::namespaced(owner.clone(), &place));
        let others: (Api<ConfigMap>, Api<Secret>) = both(&bed.client, &place);
        for at in 0..WARM_UP + count / 2 {
            let map = patch::<ConfigMap>(&maps, at).await;
            let secret = patch::<Secret>(&secrets, at).await;
            let other = if half == 0 { patch(&others.0, at).await } else { patch(&others.1, at).await };
            if at >= WARM_UP {
                let (owner, unfenced) = if half == 0 { (map, secret) } else { (secret, map) };
                measured.owner.push(owner);
                measured.unfenced.push(unfenced);
                measured.other.push(other);
            }
        }
    }
    measured.print();
    let mut proofs = Vec::new();
    for epoch in 3..3 + u64::try_from(count / 10).unwrap() {
        let begun = Instant::now();
        bed.write_table(&operator, epoch, json!({})).await.unwrap();
        bed.enforced(&operator, epoch).await.unwrap();
        proofs.push(begun.elapsed());
    }
    println!();
    println!("| the table changes, {} times | p50 | p99 |", proofs.len());
    println!("| --- | --- | --- |");
    let [middle, high] = [at(&mut proofs, 50), at(&mut proofs, 99)];
    println!("| from its write until every endpoint has shown it | {middle:.2?} | {high:.2?} |");
}

fn both(client: &Client, place: &str) -> (Api<ConfigMap>, Api<Secret>) {
    (Api::namespaced(client.clone(), place), Api::namespaced(client.clone(), place))
}

/// Fences this kind of the core group only, and waits until the API server does so.
async fn fence(bed: &Bed, operator: &Operator, plural: &str) {
    let kinds = json!([{"relateResources": [{"apiGroups": [""], "resources": [plural]}]}]);
    let spec = Patch::Merge(json!({"spec": {"root": {"resourceSelector": kinds}}}));
    let before = bed.revision(operator).await.unwrap();
    bed.roots(operator).patch("op", &PatchParams::default(), &spec).await.unwrap();
    bed.another_revision(operator, &before).await.unwrap();
}

async fn patch<K: Resource + Clone + Debug + DeserializeOwned>(api: &Api<K>, at: usize) -> Duration {
    let change: Patch<Value> = Patch::Merge(json!({"metadata": {"annotations": {"round": at.to_string()}}}));
    let begun = Instant::now();
    api.patch(NAME, &PatchParams::default(), &change).await.unwrap();
    begun.elapsed()
}

impl Measured {
    fn print(mut self) {
        println!("| PATCH, {} of each, in turn | p50 | p99 |", self.owner.len());
        println!("| --- | --- | --- |");
        let base = [at(&mut self.unfenced, 50), at(&mut self.unfenced, 99)];
        println!("| a kind that is not fenced | {:.2?} | {:.2?} |", base[0], base[1]);
        for (name, all) in
            [("the owner, a fenced kind", &mut self.owner), ("somebody else, a fenced kind", &mut self.other)]
        {
            let [middle, high] = [at(all, 50), at(all, 99)];
            let more = |now: Duration, base: Duration| (now.as_secs_f64() / base.as_secs_f64() - 1.0) * 100.0;
            println!(
                "| {name} | {middle:.2?} ({:+.1} %) | {high:.2?} ({:+.1} %) |",
                more(middle, base[0]),
                more(high, base[1])
            );
        }
    }
}

fn at(all: &mut [Duration], hundredths: usize) -> Duration {
    all.sort_unstable();
    all[(all.len() - 1) * hundredths / 100]
}
