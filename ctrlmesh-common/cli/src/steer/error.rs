//! Why shares cannot be changed, and what to do about it.

use std::io;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_manager::rules::shard::DivideError;

use crate::cluster::ClusterError;
use crate::plan::PlanError;
use crate::text::DocumentError;
use crate::top::TopError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum SteerError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Load(#[from] TopError),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
    #[error("{text:?} is neither slots, such as 5 or 0-3,7, nor a namespace: slots are 0 to 31")]
    NotSlots { text: String },
    #[error("there is no namespace {name:?}: `kubectl get namespaces` lists them")]
    NoSuchNamespace { name: String },
    #[error("there is no shard {name:?} of a root in namespace {namespace:?}; there are: {}", shards.join(", "))]
    NoSuchShard { name: String, namespace: String, shards: Vec<String> },
    #[error("there is no root {name:?} in namespace {namespace:?}: `ctrlmesh status -A` lists those of all namespaces")]
    NoSuchRoot { name: String, namespace: String },
    #[error("ShardingConfig {name:?} is no root: name the root of its shards")]
    NoRoot { name: String },
    #[error("root {name:?} is switched off, and divides nothing: take `spec.root.disable` away first")]
    Disabled { name: String },
    #[error(
        "root {name:?} tries revision {revision}, which owns a part of the slots: end the trial first, by `ctrlmesh rollout promote --full` or `ctrlmesh rollout abort`"
    )]
    Trial { name: String, revision: String },
    #[error(
        "the shares of root {name:?} follow its pods, and nobody gives them to a shard by hand: write `spec.root.auto.everyShardReplicas: 1` in the place of `elastic` first"
    )]
    Elastic { name: String },
    #[error("divide ShardingConfig {name}")]
    Divide { name: String, source: DivideError },
    #[error(
        "no shard of root {name:?} has another pod that could take over, whose proxy is in touch: nothing was written"
    )]
    NoOtherPod { name: String },
    #[error(
        "pod {pod:?} is of canary {shard:?}, whose objects nobody else gets: take `spec.root.canary` away, or move its namespaces first"
    )]
    OfCanary { pod: String, shard: String },
    #[error(
        "there is neither a pod {name:?} of a root in namespace {namespace:?}, nor a pod of any root on a node of that name: `ctrlmesh status -A -o wide` lists both"
    )]
    NothingToDrain { name: String, namespace: String },
    #[error("you may not write ShardingConfig {namespace}/{name}: it takes the right to patch it")]
    Forbidden { namespace: String, name: String, source: Box<kube::Error> },
    #[error("write ShardingConfig {namespace}/{name}")]
    Write { namespace: String, name: String, source: Box<kube::Error> },
    #[error("ShardingConfig {namespace}/{name} has changed meanwhile, and it was not written: try again")]
    Changed { namespace: String, name: String },
    #[error("not all roots were written: {}", failures.join("; "))]
    Partly { failures: Vec<String> },
    #[error("--sample: must be longer than 0s")]
    NoSample,
    #[error("requests were not counted everywhere, and nothing was written: {}", reasons.join("; "))]
    NotRead { reasons: Vec<String> },
    #[error(
        "no pod of the root has asked for anything, and nothing was written: give a longer --sample, or another --by"
    )]
    NoRequests,
    #[error(
        "some objects cannot be counted, and nothing was written: {}; `--by slots` counts none, and `--dry-run` shows what the others come to",
        resources.join("; ")
    )]
    NotCounted { resources: Vec<String> },
    #[error(
        "ShardingConfig {namespace}/{name} is written, but has not settled within {seconds} s: {message}; see `ctrlmesh status -n {namespace} {name}`"
    )]
    NotSettled { namespace: String, name: String, seconds: u64, message: String },
}

/// The namespace and the name of a root.
pub(super) fn names(root: &ShardingConfig) -> (String, String) {
    let metadata = &root.metadata;
    (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
}
