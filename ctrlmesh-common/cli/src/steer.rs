//! `ctrlmesh move`, `drain` and `rebalance`: change by hand which shard of a root owns what.
//!
//! They write the root, with the rights of whoever calls them. The manager moves what is written as it moves all else.

mod args;
mod error;
mod what;
mod pods;
mod division;
mod drain;
mod load;
mod write;
mod proposal;
mod render;
#[cfg(test)]
mod samples;

use std::collections::BTreeMap;
use std::io::{Write as _, stdout};
use std::slice;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::balance::{Weights, even_out, spread};
use ctrlmesh_common::names::label;
use ctrlmesh_common::slots::SlotSet;
use kube::ResourceExt as _;
use serde::Serialize;
use tokio::time::Instant;

pub(crate) use self::args::{DrainArgs, MoveArgs, RebalanceArgs};
use self::args::{Measure, WriteArgs};
use self::division::Division;
use self::drain::Standby;
use self::error::{SteerError, names};
use self::pods::{LivePods, ShardPod};
use self::proposal::Proposal;
use self::what::What;
use crate::cluster::{self, ClusterArgs, Connection};
use crate::failure;
use crate::plan::change::Change;
use crate::plan::live::{Live, count};
use crate::status::shards::{PodOverview, pods};
use crate::text::{self, Document};
use crate::top::sample::Sample;

/// Kind of the document about what was moved.
const KIND: &str = "ShareChange";

/// A connection, and the cluster as it was when the command began.
struct Cluster {
    connection: Connection,
    live: Live,
    pods: LivePods,
}

/// A root, and what is proposed for it.
struct Step {
    root: ShardingConfig,
    proposal: Proposal,
}

/// Which pods are drained.
enum Drained {
    Pod(String),
    OnNode(String),
}

/// What is to be printed.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    roots: Vec<Proposal>,
    /// Pods whose shard keeps what it owns, since another pod of it takes over.
    standbys: Vec<Standby>,
    /// Resources whose objects cannot be listed, with the reason.
    not_counted: Vec<String>,
}

/// Gives slots or a namespace to a shard.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn give(arguments: &MoveArgs) -> Result<(), SteerError> {
    cluster::block_on(async {
        let cluster = Cluster::read(&arguments.cluster).await?;
        let root = cluster.root_of(&arguments.to)?;
        let mut division = cluster.division(root)?;
        let Some(to) = division.owner(&arguments.to) else {
            let (namespace, shards) = (cluster.namespace(), division.names().cloned().collect());
            return Err(SteerError::NoSuchShard { name: arguments.to.clone(), namespace, shards });
        };
        match What::read(&arguments.what)? {
            What::Slots(slots) => division.give(slots, to),
            What::Namespace(name) if !cluster.live.namespaces.contains(&name) => {
                return Err(SteerError::NoSuchNamespace { name });
            }
            What::Namespace(name) => {
                division.give_namespace(&name, cluster.live.labelling.hash.slot(&name), to);
            }
        }
        let (change, not_counted) = cluster.counted(root).await?;
        let step = cluster.step(root, &division, &change)?;
        let report = Report { not_counted, ..Report::default() };
        Box::pin(cluster.carry_out(&arguments.writing, vec![step], report)).await
    })
}

/// Takes what the shards of a pod, or of the pods on a node, own.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn drain(arguments: &DrainArgs) -> Result<(), SteerError> {
    cluster::block_on(async {
        let cluster = Cluster::read(&arguments.cluster).await?;
        let (roots, drained) = cluster.drained(&arguments.target)?;
        let mut changes = Vec::new();
        for root in &roots {
            changes.push(cluster.live.change(root, &cluster.live.configs)?);
        }
        let mut report =
            Report { not_counted: count(&cluster.connection.client, &mut changes).await?, ..Report::default() };
        let mut steps = Vec::new();
        for (root, change) in roots.into_iter().zip(&changes) {
            let mut division = cluster.division(root)?;
            let weights = Weights(change.by_slot());
            let is_drained = |pod: &ShardPod| drained.includes(&pod.name, pod.node.as_deref());
            report.standbys.extend(drain::drain(&mut division, &root.name_any(), &is_drained, &weights)?);
            steps.push(cluster.step(root, &division, change)?);
        }
        Box::pin(cluster.carry_out(&arguments.writing, steps, report)).await
    })
}

/// Evens out what the shards of a root own. A shard without a pod gets nothing, and what it has is given away.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn rebalance(arguments: &RebalanceArgs) -> Result<(), SteerError> {
    cluster::block_on(async {
        if arguments.sample.is_zero() {
            return Err(SteerError::NoSample);
        }
        let cluster = Cluster::read(&arguments.cluster).await?;
        let root = cluster.root(&arguments.root)?;
        let mut division = cluster.division(root)?;
        let (change, not_counted) = cluster.counted(root).await?;
        let weights = match arguments.by {
            Measure::Objects if !not_counted.is_empty() && !arguments.writing.dry_run => {
                return Err(SteerError::NotCounted { resources: not_counted });
            }
            Measure::Objects => change.by_slot(),
            Measure::Slots => BTreeMap::new(),
            Measure::Requests => {
                let sample = Sample::within(&cluster.connection.client, arguments.sample).await?;
                load::by_slot(&sample, &division, cluster.live.labelling.hash, &cluster.namespace())?
            }
        };
        level(&mut division, &root.name_any(), &Weights(weights))?;
        let step = cluster.step(root, &division, &change)?;
        let report = Report { not_counted, ..Report::default() };
        Box::pin(cluster.carry_out(&arguments.writing, vec![step], report)).await
    })
}

/// Evens out the shards that have a pod that can take something over.
fn level(division: &mut Division, root: &str, weights: &Weights) -> Result<(), SteerError> {
    let (mut idle, mut serving) = (SlotSet::EMPTY, Vec::new());
    for shard in &mut division.shards {
        if shard.pods.iter().any(|pod| pod.is_live) {
            serving.push(&mut shard.slots);
        } else {
            idle = idle.union(std::mem::take(&mut shard.slots));
        }
    }
    if serving.is_empty() {
        return Err(SteerError::NoOtherPod { name: root.to_owned() });
    }
    spread(idle, &mut serving, weights);
    even_out(&mut serving, weights);
    Ok(())
}

impl Drained {
    fn includes(&self, pod: &str, on: Option<&str>) -> bool {
        match self {
            Self::Pod(name) => pod == name,
            Self::OnNode(node) => on == Some(node),
        }
    }
}

impl Cluster {
    async fn read(arguments: &ClusterArgs) -> Result<Self, SteerError> {
        let connection = Connection::of(arguments).await?;
        let live = Live::read(&connection.client).await?;
        let pods = LivePods::read(&connection.client).await;
        Ok(Self { connection, live, pods })
    }

    fn division(&self, root: &ShardingConfig) -> Result<Division, SteerError> {
        Division::of(root, &self.live, &self.pods)
    }

    fn namespace(&self) -> String {
        self.connection.namespace.clone()
    }

    fn roots(&self) -> impl Iterator<Item = &ShardingConfig> {
        self.live.configs.iter().filter(|config| config.spec.root.is_some())
    }

    fn config(&self, name: &str) -> Option<&ShardingConfig> {
        let namespace = &self.connection.namespace;
        let mut configs = self.live.configs.iter();
        configs.find(|one| one.metadata.namespace.as_ref() == Some(namespace) && one.name_any() == name)
    }

    fn root(&self, name: &str) -> Result<&ShardingConfig, SteerError> {
        match self.config(name) {
            Some(config) if config.spec.root.is_some() => Ok(config),
            Some(_) => Err(SteerError::NoRoot { name: name.to_owned() }),
            None => Err(SteerError::NoSuchRoot { name: name.to_owned(), namespace: self.namespace() }),
        }
    }

    /// The root that made this shard.
    fn root_of(&self, shard: &str) -> Result<&ShardingConfig, SteerError> {
        let root_of = |config: &ShardingConfig| config.labels().get(label::AUTO_SHARDING_ROOT).cloned();
        if let Some(root) = self.config(shard).and_then(root_of) {
            return self.root(&root);
        }
        let namespace = self.namespace();
        let here = self.live.configs.iter().filter(|one| one.namespace().as_ref() == Some(&namespace));
        let shards = here.filter(|one| root_of(one).is_some()).map(kube::ResourceExt::name_any).collect();
        Err(SteerError::NoSuchShard { name: shard.to_owned(), namespace, shards })
    }

    /// The roots of a pod, or of the pods on a node, and which pods these are.
    fn drained(&self, target: &str) -> Result<(Vec<&ShardingConfig>, Drained), SteerError> {
        let (kind, name) = target.split_once('/').map_or((None, target), |(kind, name)| (Some(kind), name));
        let namespace = &self.connection.namespace;
        let (pod, node) = (Drained::Pod(name.to_owned()), Drained::OnNode(name.to_owned()));
        let meant = match kind {
            None => vec![pod, node],
            Some("pod" | "pods") => vec![pod],
            Some("node" | "nodes") => vec![node],
            Some(_) => Vec::new(),
        };
        for drained in meant {
            let is_here = |root: &ShardingConfig| {
                matches!(drained, Drained::OnNode(_)) || root.metadata.namespace.as_ref() == Some(namespace)
            };
            let roots = self.with(|root, pod| is_here(root) && drained.includes(&pod.name, pod.node.as_deref()));
            if !roots.is_empty() {
                return Ok((roots, drained));
            }
        }
        Err(SteerError::NothingToDrain { name: name.to_owned(), namespace: namespace.clone() })
    }

    /// The roots with such a pod.
    fn with(&self, is: impl Fn(&ShardingConfig, &PodOverview) -> bool) -> Vec<&ShardingConfig> {
        let has = |root: &&ShardingConfig| {
            let made = self.live.configs.iter();
            let mut made = made.filter(|one| ctrlmesh_manager::rules::shard::is_made_by(root, one));
            made.any(|shard| pods(shard, None).iter().any(|pod| is(root, pod)))
        };
        self.roots().filter(has).collect()
    }

    /// The root as it is with its objects, and the resources that cannot be counted.
    async fn counted(&self, root: &ShardingConfig) -> Result<(Change, Vec<String>), SteerError> {
        let mut change = self.live.change(root, &self.live.configs)?;
        let not_counted = count(&self.connection.client, slice::from_mut(&mut change)).await?;
        Ok((change, not_counted))
    }

    /// What the division is to be written as, and what it moves.
    fn step(&self, root: &ShardingConfig, division: &Division, counted: &Change) -> Result<Step, SteerError> {
        let wanted = division.written(root);
        let mut change = self.live.change(&wanted, &self.live.configs)?;
        change.count_as(counted);
        Ok(Step { root: root.clone(), proposal: Proposal::of(root, &wanted, change.plan()) })
    }

    /// Shows what is to be written, writes it, and waits if that is wanted.
    async fn carry_out(&self, writing: &WriteArgs, steps: Vec<Step>, mut report: Report) -> Result<(), SteerError> {
        let is_for_people = writing.output.is_none();
        let show = |text: String| if is_for_people { write!(stdout().lock(), "{text}") } else { Ok(()) };
        show(render::proposals(&steps, &report))?;
        let client = &self.connection.client;
        let (mut written, mut failures) = (Vec::new(), Vec::new());
        for Step { root, mut proposal } in steps {
            if let Some(patch) = &proposal.patch {
                match Box::pin(write::write(client, &root, patch, writing.dry_run)).await {
                    Ok(root) => {
                        proposal.written = !writing.dry_run;
                        show(render::written(&root, writing.dry_run))?;
                        written.push(root);
                    }
                    Err(error) => failures.push(error),
                }
            }
            report.roots.push(proposal);
        }
        let end = Instant::now() + writing.timeout;
        for root in written.iter().filter(|_| writing.wait) {
            if let Err(error) = Box::pin(write::settled(client, root, end)).await {
                failures.push(error);
                continue;
            }
            let is_it = |one: &&mut Proposal| (one.plan.namespace.clone(), one.plan.name.clone()) == names(root);
            report.roots.iter_mut().filter(is_it).for_each(|one| one.settled = Some(true));
            show(render::settled(root))?;
        }
        if let Some(format) = writing.output {
            write!(stdout().lock(), "{}", text::document(format, &Document::new(KIND, &report))?)?;
        }
        all_done(failures)
    }
}

/// # Errors
/// The only failure, or all of them as one.
fn all_done(mut failures: Vec<SteerError>) -> Result<(), SteerError> {
    match (failures.pop(), failures.is_empty()) {
        (None, _) => Ok(()),
        (Some(only), true) => Err(only),
        (Some(last), false) => {
            let failures = failures.into_iter().chain([last]).map(|error| failure::causes(&error));
            Err(SteerError::Partly { failures: failures.collect() })
        }
    }
}

#[cfg(test)]
mod tests;
