//! Decides the next ownership table of a root that is fenced.
//!
//! What moves is taken away first, and given once it is proved that its former owner cannot write any more. The
//! protocol is [`ctrlmesh_common::handover`]; here stands what it is asked.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_common::handover::{self, Desired, Server, Step, Waiting};
use ctrlmesh_common::ownership::{Ownership, UNSHARDED};
use ctrlmesh_common::slots::SlotSet;

use super::near::Namespace;
use super::owning::{self, Workload};
use super::placement::Placement;
use super::{World, record};
use crate::rules::balance::{self, LoadDivision, SlotOwners};
use crate::rules::evidence::{self, RootEvidence};
use crate::rules::fenced::{is_handing_back, is_server_fenced};
use crate::rules::label_coverage;
use crate::rules::object_name::full_name;
use crate::rules::pod::Member;
use crate::rules::shard::{Shard, Share, Versions};

/// Most things that are named together.
const LISTED: usize = 5;

#[derive(Clone, Debug)]
pub(super) struct Handover {
    pub(super) step: Step,
    /// What is waited for, for people. Empty: everything is where the root wants it.
    pub(super) waiting: Vec<String>,
    /// The owners that the slots of shares that are divided by load are to have.
    pub(super) wanted: SlotOwners,
}

/// The table in the status. One without an epoch, or without room for a later one, was written by somebody else, and is
/// ignored.
pub(super) fn current(root: &ShardingConfig) -> Ownership {
    let table = root.status.as_ref().and_then(|status| status.ownership.as_ref());
    table.filter(|table| record::extendable(table.epoch) > 0).cloned().unwrap_or_default()
}

/// `None` while it is not known which pods of the namespace are not enrolled, and while such pods of the workload go on
/// as before, because the objects are not labelled yet. `near` is what is in the root's namespace.
pub(super) fn next(
    root: &ShardingConfig,
    rule: &Root,
    shards: &[Shard],
    placement: &Placement<'_>,
    near: &Namespace<'_>,
    world: World<'_>,
) -> Option<Handover> {
    let unenrolled = near.unenrolled.as_ref()?.iter().copied().filter(|pod| pod.is_of_target(rule));
    let unenrolled: Vec<&Member> = unenrolled.collect();
    let division: Vec<_> = shards.iter().map(|shard| shard.share.clone()).collect();
    let hash = world.labelling.hash;
    let workload = Workload {
        shares: &division,
        placed: placement.pods(),
        enrolled: &near.enrolled,
        unenrolled: &unenrolled,
        hash,
        is_leaving: is_handing_back(root),
        versions: Versions::of(root),
        elects: root.spec.controller.is_some() || !has_several_shards(&division),
        is_elastic: rule.is_elastic(),
        held_back: world.held_back,
        waiting: root.spec.controller.is_some().then_some(world.waiting),
        load: LoadDivision::of(root, world.loads),
    };
    let current = current(root);
    if !world.leads && current != Ownership::default() {
        let step = Step { table: current, waiting: Vec::new() };
        return Some(Handover { step, waiting: Vec::new(), wanted: balance::wanted(root).clone() });
    }
    let mut desired = owning::owning(workload, &current, record::newest_of_root(root, shards, &near.configs));
    let wanted = owning::wanted(workload, &desired);
    // Nobody fences or labels by a root from a file, which has no generation.
    let is_watched = is_server_fenced(rule) && root.metadata.generation.is_some();
    let unproved = if is_watched { Server::Enforces(0) } else { Server::None };
    let uid = root.metadata.uid.as_deref().unwrap_or_default();
    let gathered = world.evidence.get(&full_name(&root.metadata));
    let mut evidence = evidence::counted(gathered, uid, &current, unproved);
    // The API server fences by labels, and proxies by paths.
    let goes_by_labels = is_watched && evidence.server != Server::None && !workload.is_leaving;
    let is_labelled = !goes_by_labels || label_coverage::was_established(root);
    let is_unlabelled = !is_labelled && !label_coverage::is_established_of_any_generation(root);
    if is_unlabelled && current == Ownership::default() && unenrolled.iter().any(|pod| !pod.stopped) {
        // They work on, unfenced, until the objects are labelled.
        return None;
    }
    let is_held_up = is_unlabelled && owning::stay(&mut desired, &current);
    if !is_labelled {
        // The fence proves nothing before they are there.
        evidence.server = Server::Enforces(0);
    }
    let step = handover::next(&current, &desired, hash, &evidence);
    let waiting = if !is_labelled && (is_held_up || step.table.revoked.is_some()) {
        vec!["not every object of its kinds is labelled yet: see condition Labelled".to_owned()]
    } else {
        awaited(workload, &step, &desired, shards, gathered.filter(|_| evidence.server == Server::None))
    };
    Some(Handover { step, waiting, wanted })
}

/// Whether a version of the operator is divided. Of one that is not, the operator's own election counts, if it has one.
fn has_several_shards(shares: &[Share]) -> bool {
    [false, true].into_iter().any(|second| shares.iter().filter(|share| share.second == second).count() > 1)
}

/// `gathered` is what is known of the pods where only proxies fence.
fn awaited(
    workload: Workload<'_>,
    step: &Step,
    desired: &Desired,
    shards: &[Shard],
    gathered: Option<&RootEvidence>,
) -> Vec<String> {
    let pods = workload.enrolled.iter().chain(workload.unenrolled);
    let proofs = proofs(step, &pods.map(|pod| (pod.uid.as_str(), pod.name.name.as_str())).collect(), gathered);
    if !proofs.is_empty() || workload.is_leaving {
        return proofs;
    }
    let unsharded = desired.slots.iter().filter(|(_, owner)| *owner == UNSHARDED);
    let unsharded: SlotSet = unsharded.map(|(slot, _)| *slot).collect();
    if workload.is_elastic && !unsharded.is_empty() {
        return vec![format!("pods that are not enrolled have slots {unsharded} until they end, or others are ready")];
    }
    owning::awaited(workload, desired).into_iter().map(|shard| no_ready_pod(shard, shards, step)).collect()
}

/// What the protocol waits for. `pods` are names by UID.
fn proofs(step: &Step, pods: &BTreeMap<&str, &str>, gathered: Option<&RootEvidence>) -> Vec<String> {
    let name = |uid: &str| pods.get(uid).map_or_else(|| format!("with UID {uid}"), |name| (*name).to_owned());
    let mut messages: Vec<String> = Vec::new();
    for waiting in step.waiting.iter().take(LISTED) {
        messages.push(match waiting {
            Waiting::Server { epoch } => format!("the API server does not enforce epoch {epoch} yet"),
            Waiting::Pod { uid, owner, epoch } => {
                let otherwise = gathered.map(|gathered| otherwise(gathered, uid)).unwrap_or_default();
                format!("the proxy of pod {} of {owner} has not acknowledged epoch {epoch}{otherwise}", name(uid))
            }
            Waiting::PodEnd { uid, owner } => format!("pod {} of {owner} has not ended", name(uid)),
            Waiting::Epoch => "no epoch is left: status.ownership was written by hand; remove it".to_owned(),
        });
    }
    let more = step.waiting.len().saturating_sub(LISTED);
    if more > 0 {
        messages.push(format!("and {more} more"));
    }
    if let Some(revoked) = step.table.revoked.as_ref().filter(|_| messages.is_empty()) {
        messages.push(format!("what moves is taken away in epoch {}", revoked.epoch));
    }
    messages
}

/// What ends the wait for a proxy that stays silent.
fn otherwise(gathered: &RootEvidence, uid: &str) -> String {
    match gathered.lapses_at.get(uid) {
        Some(at) => format!("; if it stays silent, its policy lapses at {at}"),
        None => "; if it stays silent, the pod has to end: its policy is not known to lapse".to_owned(),
    }
}

fn no_ready_pod(shard: &str, shards: &[Shard], step: &Step) -> String {
    let named = shards.iter().map(|shard| &shard.share).find(|share| share.name == shard);
    let mut elsewhere: BTreeMap<&str, SlotSet> = BTreeMap::new();
    for slot in named.into_iter().flat_map(|named| named.slots.iter()) {
        if let Some(owner) = step.table.slots.get(&slot).filter(|owner| *owner != shard) {
            let slots = elsewhere.entry(owner).or_default();
            *slots = slots.union([slot].into_iter().collect());
        }
    }
    let elsewhere: Vec<String> = elsewhere.iter().map(|(owner, slots)| format!("slots {slots} at {owner}")).collect();
    let at = if elsewhere.is_empty() { String::new() } else { format!("; until then {}", elsewhere.join(", ")) };
    format!("{shard} has no ready pod{at}")
}

#[cfg(test)]
mod tests;
