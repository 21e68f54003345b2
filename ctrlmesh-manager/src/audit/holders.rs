//! Knows what the pods of each operator see and watch now, by what their proxies have said.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ctrlmesh_common::selector::{Labels, Selector};
use ctrlmesh_common::wire::{Watched, WatchedKind};

use crate::cluster::plan::Plan;
use crate::push::policy_store::PodWatches;
use crate::rules::compile::CompiledPolicy;
use crate::rules::pod::PodName;

/// What proxies have in force.
pub(super) type InForce = BTreeMap<PodName, PolicyInForce>;

/// What a proxy has in force for a pod, as it said last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PolicyInForce {
    /// Of the pod.
    pub(super) uid: String,
    pub(super) digest: u64,
    /// Nothing was heard of the proxy for a while: nobody knows what it does.
    pub(super) is_away: bool,
}

/// Policies that proxies may have in force, by digest. A proxy says only the digest.
#[derive(Clone, Debug, Default)]
pub(super) struct SentPolicies(HashMap<u64, Arc<CompiledPolicy>>);

/// Pods of one shard whose proxies have the same in force.
#[derive(Debug)]
pub(super) struct Holder<'a> {
    pub(super) shard: &'a str,
    policy: &'a CompiledPolicy,
    pods: Vec<WatchReport<'a>>,
}

/// What the proxy of a pod says of its watches.
#[derive(Clone, Copy, Debug)]
enum WatchReport<'a> {
    /// It is of an older version, or has just begun.
    Nothing,
    Watches(&'a Watched),
    Away,
}

/// What a holder sees of one kind, and watches.
#[derive(Debug)]
pub(super) struct KindHolder<'a> {
    pub(super) shard: &'a str,
    /// `None`: everything.
    selector: Option<Selector>,
    watches: Watches<'a>,
}

#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct Watches<'a> {
    /// A proxy says nothing of watches, or not everything.
    is_unknown: bool,
    is_away: bool,
    everywhere: bool,
    namespaces: BTreeSet<&'a str>,
    /// Whether there are more namespaces than were said.
    more: bool,
    ever: bool,
    /// In milliseconds since 1970; 0: not known.
    last: u64,
}

/// Whether somebody watches an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watching {
    Now,
    /// No longer, since then, in milliseconds since 1970; 0: not known.
    No {
        last: u64,
    },
    /// Nobody knows: the proxies of all pods that could watch it are away.
    Away,
    /// Nobody ever watched it, as far as is known.
    Never,
}

impl SentPolicies {
    /// Remembers what proxies may be sent now.
    pub(super) fn remember(&mut self, plan: &Plan) {
        for policy in plan.sendable().values() {
            self.0.entry(policy.digest()).or_insert_with(|| policy.clone());
        }
    }

    /// Forgets what no proxy has, and none may be sent.
    pub(super) fn forget(&mut self, plan: &Plan, in_force: &InForce) {
        let sendable = plan.sendable().values().map(|policy| policy.digest());
        let used: BTreeSet<u64> = in_force.values().map(|one| one.digest).chain(sendable).collect();
        self.0.retain(|digest, _| used.contains(digest));
    }

    /// By operator, what its pods have in force. What has ended holds nothing, and a shadow writes nothing.
    pub(super) fn holders<'a>(
        &'a self,
        plan: &'a Plan,
        in_force: &InForce,
        watches: &'a BTreeMap<PodName, PodWatches>,
    ) -> BTreeMap<&'a str, Vec<Holder<'a>>> {
        let mut holders: BTreeMap<&str, Vec<Holder<'_>>> = BTreeMap::new();
        for pod in plan.snapshot.members.iter().filter(|pod| !pod.stopped && !pod.ended) {
            let in_force = in_force.get(&pod.name).filter(|one| one.uid == pod.uid);
            let Some(in_force) = in_force else { continue };
            let policy = self.0.get(&in_force.digest).map(Arc::as_ref);
            let Some(policy) = policy.filter(|policy| !policy.policy.is_shadow()) else { continue };
            let Some((operator, shard)) = policy.operator.as_deref().zip(policy.shard.as_deref()) else { continue };
            let watches = watches.get(&pod.name).filter(|of| of.uid == pod.uid);
            let said = match watches {
                _ if in_force.is_away => WatchReport::Away,
                Some(of) => WatchReport::Watches(&of.state),
                None => WatchReport::Nothing,
            };
            let of_operator = holders.entry(operator).or_default();
            let is_alike = |one: &&mut Holder<'_>| {
                one.shard == shard
                    && (std::ptr::eq(one.policy, policy) || one.policy.policy.limits == policy.policy.limits)
            };
            match of_operator.iter_mut().find(is_alike) {
                Some(holder) => holder.pods.push(said),
                None => of_operator.push(Holder { shard, policy, pods: vec![said] }),
            }
        }
        holders
    }
}

impl<'a> Holder<'a> {
    pub(super) fn of_kind(&self, group: &str, plural: &str) -> KindHolder<'a> {
        let selector = self.policy.policy.selector_for(group, plural);
        let mut watches = Watches::default();
        for pod in &self.pods {
            match pod {
                WatchReport::Nothing => watches.is_unknown = true,
                WatchReport::Watches(reported) => watches.add(reported, group, plural),
                WatchReport::Away => watches.is_away = true,
            }
        }
        KindHolder { shard: self.shard, selector, watches }
    }
}

impl<'a> Watches<'a> {
    fn add(&mut self, watched: &'a Watched, group: &str, plural: &str) {
        let is_it = |kind: &&WatchedKind| kind.group == group && kind.resource == plural;
        let Some(kind) = watched.kinds.iter().find(is_it) else {
            self.is_unknown |= watched.more;
            return;
        };
        self.ever |= kind.everywhere || !kind.namespaces.is_empty() || kind.last_watched > 0;
        self.everywhere |= kind.everywhere;
        self.namespaces.extend(kind.namespaces.iter().map(String::as_str));
        self.more |= kind.more;
        self.last = self.last.max(kind.last_watched);
    }
}

impl KindHolder<'_> {
    pub(super) fn sees(&self, labels: &Labels) -> bool {
        self.selector.as_ref().is_none_or(|selector| selector.matches(labels))
    }

    /// Whether a pod is known to have watched the kind, anywhere.
    pub(super) fn has_ever_watched(&self) -> bool {
        self.watches.ever
    }

    /// Of objects in `namespace`, or of cluster scope.
    pub(super) fn watching(&self, namespace: Option<&str>) -> Watching {
        let watches = &self.watches;
        let is_within = namespace.is_some_and(|namespace| watches.more || watches.namespaces.contains(namespace));
        if watches.is_unknown || watches.everywhere || is_within {
            Watching::Now
        } else if watches.is_away {
            Watching::Away
        } else if watches.last > 0 {
            Watching::No { last: watches.last }
        } else {
            Watching::Never
        }
    }
}
