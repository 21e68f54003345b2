//! Finds the shard of a pod that is being admitted.

use std::time::Instant;

use ctrlmesh_common::api::ShardingConfig;
use k8s_openapi::api::core::v1::Pod;

use super::{RecentPods, Review, enrolled};
use crate::cluster::cache::Snapshot;
use crate::rules::compile::{self, World};
use crate::rules::pod::{Admitted, Member};
use crate::rules::shared::{Shared, each};

/// The pod, where its shard depends on which other pods exist, so that one replica must assign it.
///
/// Other pods get theirs by name or label, or have one already. Only the metadata is read: the pod may be large.
pub fn shared_pod(review: &Review, snapshot: &Snapshot) -> Option<Member> {
    let object = enrolled(review).filter(|_| !review.dry_run)?;
    let member = Member::of_deployment(review.namespace.as_deref()?, &object.metadata)?;
    let divides = |config: &ShardingConfig| {
        let near = config.metadata.namespace.as_ref() == Some(&member.name.namespace);
        let root = config.spec.root.as_ref().filter(|_| near);
        let deployment = root.and_then(|root| root.target_deployment.as_deref());
        deployment.is_some_and(|name| member.revision_in(name).is_some())
    };
    let is_shared = member.labelled_shard().is_none() && each(&snapshot.configs).any(divides);
    is_shared.then_some(member)
}

/// Assigns `member` a shard, for another replica. None where there is not exactly one.
///
/// A pod that is refused there after all counts here for a moment.
pub fn assign_shard(member: &Member, snapshot: &Snapshot, recent: &mut RecentPods, now: Instant) -> Option<String> {
    let unseen = recent.unseen(&snapshot.members, now);
    let shards = shards(member, snapshot, &unseen).ok()?;
    let [shard] = <[String; 1]>::try_from(shards).ok()?;
    recent.admitted(member, &shard, &snapshot.members, now);
    Some(shard)
}

/// Whether the root of `shard` tries each new version of `member`'s workload before it promotes it.
///
/// The root is known by its workload and by the prefix of its shards: the leader may assign a shard that is not known
/// here yet.
pub(super) fn has_rollout(member: &Member, shard: &str, snapshot: &Snapshot) -> bool {
    let namespace = &member.name.namespace;
    let near = snapshot.configs.iter().filter(|config| config.metadata.namespace.as_ref() == Some(namespace));
    let staying = near.filter(|config| config.metadata.deletion_timestamp.is_none());
    staying.filter_map(|config| config.spec.root.as_ref()).any(|rule| {
        let is_tried = rule.rollout.is_some() && rule.disable != Some(true);
        is_tried && member.is_of_target(rule) && shard.starts_with(&format!("{}-", rule.prefix))
    })
}

pub(super) fn member(review: &Review, pod: &Pod) -> Member {
    let mut member = Member::from(pod);
    member.name.namespace = review.namespace.clone().unwrap_or_default();
    // It is being injected now.
    member.admitted = Admitted::Injected;
    member
}

/// The shards that would select the pod, given the known and the `unseen` pods.
///
/// # Errors
/// Where only an invalid ShardingConfig may select it: without a shard, the pod would see everything.
pub(super) fn shards(member: &Member, snapshot: &Snapshot, unseen: &[Shared<Member>]) -> Result<Vec<String>, String> {
    let namespace = &member.name.namespace;
    let configs: Vec<Shared<ShardingConfig>> = snapshot
        .configs
        .iter()
        .filter(|config| config.metadata.namespace.as_ref() == Some(namespace))
        .cloned()
        .collect();
    let members: Vec<Shared<Member>> =
        snapshot.members.iter().chain(unseen).filter(|member| member.name.namespace == *namespace).cloned().collect();
    let world = World { configs: &configs, members: &members, ..snapshot.world() };
    let (operators, troubles) = compile::operators(world);
    let places = operators.iter().enumerate();
    let places =
        places.filter_map(|(at, operator)| Some((at, operator.shard_for(member, &members)?.metadata.name.clone()?)));
    let mut places: Vec<(usize, String)> = places.collect();
    if places.len() > 1 {
        let superseded = compile::superseded(&operators, world);
        places.retain(|(at, _)| !superseded.contains(at));
    }
    let shards: Vec<String> = places.into_iter().map(|(_, shard)| shard).collect();
    let Some(invalid) = operators.iter().find(|operator| operator.may_have(member, None)) else {
        return Ok(shards);
    };
    if !shards.is_empty() {
        return Ok(shards);
    }
    let name = invalid.full_name();
    let of_it = troubles.iter().filter(|trouble| trouble.configs.contains(&name));
    let why: Vec<&str> = of_it.map(|trouble| trouble.message.as_str()).collect();
    let why = why.join("; ");
    Err(format!("the pod may be of ShardingConfig {name:?}, which is invalid; mend it first: {why}"))
}
