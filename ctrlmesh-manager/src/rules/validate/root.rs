//! Validates roots: every slot must be in exactly one shard.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{Auto, Balance, Canary, FenceMode, LONGEST_SETTLE, OnLoss, Root, parse_duration};
use ctrlmesh_common::names::{MAX_PREFIX_BYTES, is_dns_subdomain};
use ctrlmesh_common::slots::{self, Slot, SlotSet};

use super::{Report, clusters, limits, rollout};

/// `elects` says whether the operator's lock is named.
pub(super) fn check(root: &Root, elects: bool, report: &mut Report) {
    let names = [
        ("prefix", Some(&root.prefix)),
        ("targetStatefulSet", root.target_stateful_set.as_ref()),
        ("targetDeployment", root.target_deployment.as_ref()),
    ];
    for (field, name) in names {
        if let Some(name) = name.filter(|name| !is_dns_subdomain(name)) {
            let problem = format!("{name:?} is no lower-case DNS subdomain, such as \"my-operator\"");
            report.error(format!("spec.root.{field}"), problem);
        }
    }
    prefix(&root.prefix, report);
    if root.target_stateful_set.is_some() == root.target_deployment.is_some() {
        report
            .error("spec.root.targetStatefulSet", "exactly one of targetStatefulSet and targetDeployment is required");
    }
    check_resources(root, report);
    clusters::check("spec.root.clusters", &root.clusters, report);
    check_unit(root, report);
    rollout::check(root, report);
    let canary = root.canary.as_ref().map_or(SlotSet::EMPTY, |canary| check_canary(canary, report));
    if let Some(auto) = &root.auto {
        check_auto(auto, canary.complement().len(), report);
    }
    if root.is_elastic() {
        check_elastic(root, report);
    }
    if let Some(auto) = root.auto.as_ref().filter(|auto| auto.balance == Some(Balance::Load)) {
        check_balance(auto, root.fence_mode(), report);
    }
    if root.disable == Some(true) {
        return;
    }
    if !elects {
        check_election(root, report);
    }
    match (&root.auto, root.manual.is_empty()) {
        (Some(_), true) => {}
        (None, false) => check_manual(root, canary, report),
        (Some(_), false) | (None, true) => {
            report.error("spec.root.auto", "exactly one of auto and manual is required, unless disable is true");
        }
    }
}

/// The canary leaves so many hashes.
fn check_auto(auto: &Auto, left: usize, report: &mut Report) {
    if left == 0 {
        report.error("spec.root.auto.shardingSize", "no shard can be made, because canary.inShardHash has every hash; allowed is a canary that leaves at least one");
    } else if !usize::try_from(auto.sharding_size).is_ok_and(|size| (1..=left).contains(&size)) {
        let size = auto.sharding_size;
        let message =
            format!("{size} shards cannot be made: allowed are 1 to {left}, the hashes that the canary leaves");
        report.error("spec.root.auto.shardingSize", message);
    }
    if auto.is_elastic() && auto.replicas() != 1 {
        let message = "with elastic, each shard has one pod; others take over when it is away";
        report.error("spec.root.auto.everyShardReplicas", message);
    }
    let settle = auto.elastic.as_ref().and_then(|elastic| elastic.settle.as_deref());
    if settle.is_some_and(|text| parse_duration(text).is_none_or(|settle| settle > LONGEST_SETTLE)) {
        report.error("spec.root.auto.elastic.settle", "must be a duration from 0s to 10m");
    }
}

/// Of pods without a lock, the fence lets one of each shard work.
fn check_election(root: &Root, report: &mut Report) {
    let normal = root.auto.as_ref().map_or(root.manual.len(), |auto| usize::try_from(auto.sharding_size).unwrap_or(0));
    if normal + usize::from(root.canary.is_some()) < 2 {
        return;
    }
    let manual = root.manual.iter().enumerate();
    let manual = manual.map(|(at, shard)| (format!("spec.root.manual[{at}].replicas"), shard.replicas));
    let normal = root.auto.as_ref().filter(|auto| !auto.is_elastic()).map(|auto| Some(auto.replicas()));
    let normal = normal.map(|replicas| ("spec.root.auto.everyShardReplicas".to_owned(), replicas));
    let canary = root.canary.as_ref().map(|one| ("spec.root.canary.replicas".to_owned(), Some(one.replicas)));
    let mut all = normal.into_iter().chain(canary).chain(manual);
    let Some((field, Some(replicas))) = all.find(|(_, replicas)| replicas.is_some_and(|replicas| replicas > 1)) else {
        return;
    };
    let what = if root.fence_mode() == FenceMode::Off {
        "all of them write, because fence is Off"
    } else {
        "one works, and the others see nothing"
    };
    let message = format!(
        "of the {replicas} pods of a shard {what}, and spec.controller is absent: if the operator elects a leader, name its lock in spec.controller.leaderElectionName"
    );
    report.warning(field, message);
}

fn check_elastic(root: &Root, report: &mut Report) {
    let messages = [
        (
            root.fence_mode() == FenceMode::Off,
            "needs fence Server or Proxy; without a fence, what moves could have two writers",
        ),
        (
            root.on_loss == Some(OnLoss::Restart),
            "is not allowed with onLoss Restart; each pod that comes would restart others, which would lose their share by that",
        ),
    ];
    for (_, message) in messages.into_iter().filter(|(is_wrong, _)| *is_wrong) {
        report.error("spec.root.auto.elastic", format!("{message}. Write everyShardReplicas instead"));
    }
}

/// Of shares that are to be kept even by load.
fn check_balance(auto: &Auto, fence: FenceMode, report: &mut Report) {
    let messages = [
        (
            !auto.is_elastic(),
            "Load is allowed only where the shares are elastic; leave everyShardReplicas out, or write Count",
        ),
        (
            fence == FenceMode::Off,
            "Load needs fence Server or Proxy; without a fence, what moves could have two writers",
        ),
    ];
    for (_, message) in messages.into_iter().filter(|(is_wrong, _)| *is_wrong) {
        report.error("spec.root.auto.balance", message);
    }
}

fn check_resources(root: &Root, report: &mut Report) {
    for (at, resources) in root.resource_selector.iter().enumerate() {
        let field = format!("spec.root.resourceSelector[{at}]");
        limits::resources(&field, &resources.relate_resources, report);
        limits::optional_selector(&format!("{field}.selector"), resources.selector.as_ref(), report);
    }
    let entries = root.resource_selector.iter().enumerate();
    let divided = entries
        .map(|(at, resources)| (format!("spec.root.resourceSelector[{at}]"), resources.relate_resources.as_slice()));
    limits::covered_twice("spec.root.resourceSelector", &divided.collect::<Vec<_>>(), report);
}

/// Members are divided only where they are known, and nobody writes to another's.
fn check_unit(root: &Root, report: &mut Report) {
    if !root.divides_clusters() {
        return;
    }
    if root.clusters.is_empty() {
        report.error("spec.root.unit", "Cluster needs spec.root.clusters, which say where the members are");
    }
    if root.fence_mode() != FenceMode::Proxy {
        report.error("spec.root.unit", "Cluster needs fence Proxy; no API server fences what is in a member");
    }
}

/// The names of shards begin with it, and are values of a label.
fn prefix(prefix: &str, report: &mut Report) {
    if prefix.len() > MAX_PREFIX_BYTES {
        report.error("spec.root.prefix", format!("must be at most {MAX_PREFIX_BYTES} characters, because the names of the shards begin with it and are the values of a label"));
    }
}

/// Returns its hashes.
fn check_canary(canary: &Canary, report: &mut Report) -> SlotSet {
    if canary.in_namespaces.is_empty() && canary.in_shard_hash.is_empty() {
        report
            .error("spec.root.canary.inNamespaces", "at least one namespace, or one hash in inShardHash, is required");
    }
    hashes("spec.root.canary.inShardHash", &canary.in_shard_hash, report)
}

fn check_manual(root: &Root, canary: SlotSet, report: &mut Report) {
    let (mut owned, mut ids) = (canary, BTreeSet::new());
    for (at, shard) in root.manual.iter().enumerate() {
        let field = format!("spec.root.manual[{at}]");
        if shard.id < 1 || !ids.insert(shard.id) {
            report.error(format!("{field}.id"), format!("{} is not a number from 1 that no other shard has", shard.id));
        }
        let hashes = hashes(&format!("{field}.hashes"), &shard.hashes, report);
        let twice = owned.intersection(hashes);
        if !twice.is_empty() {
            report.error(
                format!("{field}.hashes"),
                format!("{twice}: owned by another shard already; every hash must be in exactly one"),
            );
        }
        owned = owned.union(hashes);
    }
    let nobodys = owned.complement();
    if !nobodys.is_empty() {
        report.error(
            "spec.root.manual",
            format!(
                "the hashes {nobodys} belong to nobody; every hash 0 to {} must be in exactly one shard",
                slots::COUNT - 1
            ),
        );
    }
}

/// Returns the valid ones.
pub(super) fn hashes(field: &str, hashes: &[String], report: &mut Report) -> SlotSet {
    let mut slots = SlotSet::EMPTY;
    for (at, hash) in hashes.iter().enumerate() {
        match hash
            .parse()
            .ok()
            .and_then(|number: i64| Slot::try_from(number).ok())
            .filter(|slot| slot.to_string() == *hash)
        {
            Some(slot) if slots.contains(slot) => {
                let message = format!("{hash:?} is listed twice; every hash must be different");
                report.error(format!("{field}[{at}]"), message);
            }
            Some(slot) => slots = slots.union([slot].into_iter().collect()),
            None => {
                report.error(format!("{field}[{at}]"), format!("{hash:?} is not a hash; allowed are \"0\" to \"31\""));
            }
        }
    }
    slots
}
