//! Compiles CircuitBreakers and FaultInjections into the guards, faults and egress rules of pods.
//!
//! They change nothing that a pod sees or owns. So they come after epochs and ownership, and both stay as they are.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ctrlmesh_common::policy::fault::MAX_REGEXES;
use ctrlmesh_common::policy::{Guard, Policy};
use ctrlmesh_common::wire::MAX_POLICY_BYTES;

use super::egress::PodAccess;
use super::{CompiledPolicy, Trouble};
use crate::rules::breaker::Breaker;
use crate::rules::injection::Injection;
use crate::rules::pod::Member;
use crate::rules::pod_selection::PodSelection;

/// The most that the guards and egress rules of one pod, or its faults, may take of its policy, in bytes of JSON.
const MAX_BYTES: usize = 256 << 10;

/// No less than the names of the fields, what stands around them, and the ports.
const FIELD_BYTES: usize = 384;

/// The CircuitBreakers and FaultInjections, and the policies with what they give.
#[derive(Debug)]
pub(super) struct Guarded<'a> {
    breakers: Sorted<'a, Breaker>,
    injections: Sorted<'a, Injection>,
    /// By the address of the policy without them, which is beside it, and what is added to it.
    policies: HashMap<(usize, Added), PolicyPair>,
    troubles: Vec<Trouble>,
}

/// What a pod's policy gets: indices, and the pod's UID where it shares a bucket.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Added {
    breakers: Vec<usize>,
    injections: Vec<usize>,
    uid: String,
}

#[derive(Debug)]
struct PolicyPair {
    _unguarded: Arc<CompiledPolicy>,
    guarded: Arc<CompiledPolicy>,
}

/// Objects of one kind, by name.
#[derive(Debug)]
struct Sorted<'a, Rules> {
    all: Vec<&'a Rules>,
    /// Indices of `all`.
    by_namespace: BTreeMap<&'a str, Vec<usize>>,
}

/// What an object gives to the pods that it selects.
trait PodRules {
    fn selection(&self) -> &PodSelection;
    fn size(&self) -> Size;
}

/// What rules take of a policy: bytes of JSON, and regular expressions.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    bytes: usize,
    regexes: usize,
}

impl<'a> Guarded<'a> {
    /// What is invalid is reported and not used.
    pub(super) fn new(breakers: &'a [Breaker], injections: &'a [Injection]) -> Self {
        let (breakers, injections) = (Sorted::new(breakers), Sorted::new(injections));
        let troubles = breakers.invalid().chain(injections.invalid()).collect();
        Self { breakers, injections, policies: HashMap::new(), troubles }
    }

    /// The policy of `pod` with its guards, faults and egress rules. Pods that share a policy and are selected by the
    /// same objects share the result.
    pub(super) fn guard(&mut self, policy: Arc<CompiledPolicy>, pod: &Member) -> Arc<CompiledPolicy> {
        let left = MAX_POLICY_BYTES.saturating_sub(policy.json().len() + FIELD_BYTES);
        let (breakers, bytes) = self.breakers.of_pod(pod, left.min(MAX_BYTES), &mut self.troubles);
        let (injections, _) = self.injections.of_pod(pod, (left - bytes).min(MAX_BYTES), &mut self.troubles);
        // It follows from the breakers, the injections and the policy, so it is not part of the key.
        let access = PodAccess::choose(
            breakers.iter().map(|at| self.breakers.all[*at]),
            injections.iter().map(|at| self.injections.all[*at]),
            policy.policy.sees_other_servers(),
        );
        self.troubles.extend(access.troubles(pod));
        let Policy { guards, faults, egress, .. } = &policy.policy;
        let has_none = guards.is_empty() && faults.is_empty() && egress.is_none();
        if breakers.is_empty() && injections.is_empty() && has_none {
            return policy;
        }
        let shares = breakers.iter().any(|at| self.breakers.all[*at].is_shared());
        let uid = if shares { pod.uid.clone() } else { String::new() };
        let key = (Arc::as_ptr(&policy).addr(), Added { breakers, injections, uid });
        if let Some(pair) = self.policies.get(&key) {
            return pair.guarded.clone();
        }
        let (operator, shard) = (policy.operator.as_deref(), policy.shard.as_deref());
        let of_breaker = |at: &usize| self.breakers.all[*at].guards(&pod.uid, operator, shard);
        let mut guards: Vec<Guard> = key.1.breakers.iter().flat_map(of_breaker).collect();
        if !policy.policy.sees_other_servers() {
            for guard in &mut guards {
                guard.urls.clear();
            }
        }
        let guarded = policy.with_guards(&guards, &access.faults(), access.egress().as_ref());
        self.policies.insert(key, PolicyPair { _unguarded: policy, guarded: guarded.clone() });
        guarded
    }

    pub(super) fn into_troubles(self) -> Vec<Trouble> {
        self.troubles
    }
}

impl<'a, Rules: PodRules> Sorted<'a, Rules> {
    fn new(objects: &'a [Rules]) -> Self {
        let mut all: Vec<&Rules> = objects.iter().collect();
        all.sort_by_key(|one| &one.selection().name);
        let mut by_namespace: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, one) in all.iter().enumerate() {
            by_namespace.entry(&one.selection().namespace).or_default().push(at);
        }
        Self { all, by_namespace }
    }

    fn invalid(&self) -> impl Iterator<Item = Trouble> {
        let selections = self.all.iter().map(|one| one.selection());
        selections.flat_map(|one| one.errors.iter().map(|error| trouble(one, error.clone())))
    }

    /// The objects that select the pod, as many as have room, and their bytes.
    fn of_pod(&self, pod: &Member, room: usize, troubles: &mut Vec<Trouble>) -> (Vec<usize>, usize) {
        let near = self.by_namespace.get(pod.name.namespace.as_str()).into_iter().flatten();
        let matching = near.copied().filter(|at| self.all[*at].selection().selects(pod));
        let (mut chosen, mut used) = (Vec::new(), Size::default());
        for at in matching {
            let (one, Size { bytes, regexes }) = (self.all[at].selection(), self.all[at].size());
            if used.bytes + bytes > room {
                troubles.push(no_room(one, pod, room));
            } else if used.regexes + regexes > MAX_REGEXES {
                troubles.push(too_many_regexes(one, pod));
            } else {
                used = Size { bytes: used.bytes + bytes, regexes: used.regexes + regexes };
                chosen.push(at);
            }
        }
        (chosen, used.bytes)
    }
}

impl PodRules for Breaker {
    fn selection(&self) -> &PodSelection {
        &self.selection
    }

    fn size(&self) -> Size {
        Size { bytes: self.bytes, regexes: 0 }
    }
}

impl PodRules for Injection {
    fn selection(&self) -> &PodSelection {
        &self.selection
    }

    fn size(&self) -> Size {
        Size { bytes: self.bytes, regexes: self.regexes }
    }
}

fn no_room(object: &PodSelection, pod: &Member, room: usize) -> Trouble {
    let message = format!(
        "does not hold for Pod {}: the rules of all {}s of a pod may have {room} bytes; list fewer namespaces or resources",
        pod.name, object.kind
    );
    trouble(object, message)
}

fn too_many_regexes(object: &PodSelection, pod: &Member) -> Trouble {
    let message = format!(
        "does not hold for Pod {}: all {}s of a pod may have {MAX_REGEXES} regular expressions",
        pod.name, object.kind
    );
    trouble(object, message)
}

fn trouble(object: &PodSelection, message: String) -> Trouble {
    Trouble { object: object.object(), configs: Vec::new(), message }
}

#[cfg(test)]
mod tests;
