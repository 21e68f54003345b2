//! Says whether every proxy has its policy.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::policy::Redirect;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::StatusInputs;
use super::plan_index::PlanIndex;
use crate::cluster::plan::Plan;
use crate::rules::compile::{CompiledPolicy, Record};
use crate::rules::object_name::name;
use crate::rules::pod::Member;
use crate::status::finding::{Finding, finding};

/// How many pods are named, of all nodes together.
const MAX_NAMES: usize = 10;

pub(super) fn of(
    config: &ShardingConfig,
    record: Option<&Record>,
    pods: &[(&Member, &CompiledPolicy)],
    (index, plan): (&PlanIndex<'_>, &Plan),
    inputs: StatusInputs<'_>,
) -> Finding {
    let staying: Vec<_> = pods.iter().filter(|(member, _)| !member.terminating).collect();
    let Some(record) = record else {
        return finding(false, "Pending", "no proxy gets a new policy");
    };
    // A proxy may have acknowledged a policy before it found out.
    if let Some(unserved) = unserved(staying.iter().map(|(member, _)| *member), &plan.snapshot.unfit_nodes) {
        return finding(false, "NodeCannotServe", unserved);
    }
    // A new leader has not heard from proxies that acknowledged long ago.
    let before = inputs.new_leader && was_programmed(config, record);
    let acknowledged = staying.iter().filter(|(member, policy)| {
        let contact = inputs.contacts.get(&member.name);
        record.written && contact.map_or(before, |contact| contact.acknowledged(policy))
    });
    let (acknowledged, all, epoch) = (acknowledged.count(), staying.len(), record.epoch);
    match (acknowledged, all) {
        (_, 0) if index.may_be_spare(config) && owns_nothing(config, record) => {
            finding(true, "Spare", "no pod is of it, and it owns nothing")
        }
        (_, 0) => finding(false, "NoPods", "no pod is enrolled"),
        (some, all) if some == all => {
            let message = format!("every proxy, {all} of {all}, has acknowledged epoch {epoch}");
            finding(true, "Acknowledged", message)
        }
        _ => {
            let message = format!("{acknowledged} of {all} proxies have acknowledged epoch {epoch}");
            finding(false, "Waiting", message)
        }
    }
}

/// Whether the root gives this shard nothing, and has taken nothing from it that is not another's yet.
fn owns_nothing(shard: &ShardingConfig, root: &Record) -> bool {
    let name = name(&shard.metadata);
    let owns = |table: &Ownership| {
        let revoked = table.revoked.iter();
        let revoked = revoked.flat_map(|revoked| revoked.slots.values().chain(revoked.namespaces.values()));
        table.slots.values().chain(table.namespaces.values()).chain(revoked).any(|owner| owner == name)
    };
    root.ownership.as_ref().is_some_and(|table| !owns(table))
}

fn was_programmed(config: &ShardingConfig, record: &Record) -> bool {
    let Some(status) = &config.status else { return false };
    let holds = |one: &Condition| one.type_ == "Programmed" && one.status == "True";
    status.epoch == i64::try_from(record.epoch).ok() && status.conditions.iter().any(holds)
}

/// Those of `pods` that their node's kernel would have to lead to a proxy, where these nodes' does not let it.
fn unserved<'a>(pods: impl Iterator<Item = &'a Member>, unfit_nodes: &BTreeSet<String>) -> Option<String> {
    let mut by_node: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut count = 0;
    for pod in pods.filter(|pod| pod.redirect != Redirect::Nowhere) {
        let Some(node) = pod.node.as_ref().filter(|node| unfit_nodes.contains(*node)) else { continue };
        count += 1;
        let names = by_node.entry(node).or_default();
        if count <= MAX_NAMES {
            names.push(&pod.name.name);
        }
    }
    let nodes: Vec<&str> = by_node.keys().copied().collect();
    let names: Vec<&str> = by_node.values().flatten().copied().collect();
    let more = if count > MAX_NAMES { format!(" and {} more", count - MAX_NAMES) } else { String::new() };
    (count > 0).then(|| {
        format!("no proxy can redirect connections on {}: {}{more} are not served", nodes.join(", "), names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, node: &str, redirect: Redirect) -> Member {
        let name = format!("ops/{name}").parse().unwrap();
        Member { name, node: Some(node.to_owned()), redirect, ..Member::default() }
    }

    #[test]
    fn pods_on_nodes_that_cannot_serve_them_are_named() {
        let pods = [
            pod("a", "bad", Redirect::Node),
            pod("b", "bad", Redirect::Sidecar),
            pod("c", "bad", Redirect::Nowhere),
            pod("d", "good", Redirect::Node),
        ];
        let said = |unfit: &[&str]| unserved(pods.iter(), &unfit.iter().map(|node| (*node).to_owned()).collect());
        assert_eq!(said(&["other"]), None);
        assert_eq!(said(&["bad"]).unwrap(), "no proxy can redirect connections on bad: a, b are not served");
        let many: Vec<Member> = (0..12).map(|at| pod(&format!("p{at:02}"), "bad", Redirect::Node)).collect();
        let said = unserved(many.iter(), &["bad".to_owned()].into()).unwrap();
        assert!(said.ends_with("p08, p09 and 2 more are not served"), "{said}");
    }
}
