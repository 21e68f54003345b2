//! Compiles CircuitBreakers into the guards of pods.
//!
//! Guards change nothing that a pod sees or owns. So they come after epochs and ownership, and both stay as they are.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ctrlmesh_common::policy::Guard;
use ctrlmesh_common::wire::MAX_POLICY_BYTES;

use super::{CompiledPolicy, Trouble};
use crate::rules::breaker::Breaker;
use crate::rules::pod::Member;

/// The most that the guards of one pod may take of its policy, in bytes of JSON.
const MAX_GUARDS_BYTES: usize = 256 << 10;

/// No less than the name of their field and what stands around it.
const FIELD_BYTES: usize = 64;

/// The CircuitBreakers, and the policies with their guards.
#[derive(Debug)]
pub(super) struct Guarded<'a> {
    breakers: Vec<&'a Breaker>,
    /// Indices of `breakers`, by name.
    by_namespace: BTreeMap<&'a str, Vec<usize>>,
    /// By the address of the policy without guards, which is beside it, the breakers, and the pod's UID where it shares
    /// a bucket.
    policies: HashMap<(usize, Vec<usize>, String), PolicyPair>,
    troubles: Vec<Trouble>,
}

#[derive(Debug)]
struct PolicyPair {
    _unguarded: Arc<CompiledPolicy>,
    guarded: Arc<CompiledPolicy>,
}

impl<'a> Guarded<'a> {
    /// An invalid breaker is reported and not used.
    pub(super) fn new(breakers: &'a [Breaker]) -> Self {
        let mut sorted: Vec<&Breaker> = breakers.iter().collect();
        sorted.sort_by_key(|breaker| &breaker.name);
        let errors = sorted.iter().flat_map(|breaker| breaker.errors.iter().map(|error| (&breaker.name, error)));
        let troubles = errors.map(|(breaker, error)| trouble(breaker, error.clone())).collect();
        let mut by_namespace: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, breaker) in sorted.iter().enumerate() {
            by_namespace.entry(&breaker.namespace).or_default().push(at);
        }
        Self { breakers: sorted, by_namespace, policies: HashMap::new(), troubles }
    }

    /// The policy of `pod` with its guards. Pods that share a policy and have the same breakers share the result.
    pub(super) fn guard(&mut self, policy: Arc<CompiledPolicy>, pod: &Member) -> Arc<CompiledPolicy> {
        let left = MAX_POLICY_BYTES.saturating_sub(policy.json().len() + FIELD_BYTES);
        let breakers = self.of_pod(pod, left.min(MAX_GUARDS_BYTES));
        if breakers.is_empty() && policy.policy.guards.is_empty() {
            return policy;
        }
        let all = &self.breakers;
        let shares = breakers.iter().any(|at| all[*at].is_shared());
        let uid = if shares { pod.uid.clone() } else { String::new() };
        let key = (Arc::as_ptr(&policy).addr(), breakers, uid);
        if let Some(pair) = self.policies.get(&key) {
            return pair.guarded.clone();
        }
        let (operator, shard) = (policy.operator.as_deref(), policy.shard.as_deref());
        let guards = key.1.iter().flat_map(|at| all[*at].guards(&pod.uid, operator, shard));
        let guards: Vec<Guard> = guards.collect();
        let guarded = policy.with_guards(&guards);
        self.policies.insert(key, PolicyPair { _unguarded: policy, guarded: guarded.clone() });
        guarded
    }

    pub(super) fn into_troubles(self) -> Vec<Trouble> {
        self.troubles
    }

    /// The breakers that select the pod, as many as have room.
    fn of_pod(&mut self, pod: &Member, room: usize) -> Vec<usize> {
        let near = self.by_namespace.get(pod.name.namespace.as_str()).into_iter().flatten();
        let selects = |breaker: &Breaker| breaker.selector.as_ref().is_some_and(|one| one.matches(&pod.labels));
        let matching = near.copied().filter(|at| selects(self.breakers[*at]));
        let (mut breakers, mut bytes) = (Vec::new(), 0);
        for at in matching {
            let breaker = self.breakers[at];
            if bytes + breaker.bytes > room {
                self.troubles.push(no_room(&breaker.name, pod, room));
            } else {
                bytes += breaker.bytes;
                breakers.push(at);
            }
        }
        breakers
    }
}

fn no_room(breaker: &str, pod: &Member, room: usize) -> Trouble {
    trouble(
        breaker,
        format!(
            "does not hold for Pod {}: the rules of all CircuitBreakers of a pod may have {room} bytes; list fewer namespaces or resources",
            pod.name
        ),
    )
}

fn trouble(breaker: &str, message: String) -> Trouble {
    Trouble { object: format!("CircuitBreaker {breaker}"), configs: Vec::new(), message }
}

#[cfg(test)]
mod tests;
