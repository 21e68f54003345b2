//! Compiles CircuitBreakers into the guards of pods.
//!
//! Guards change nothing that a pod sees or owns. So they come after epochs and ownership, and both stay as they are.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ctrlmesh_common::api::{
    self, CircuitBreaker, RateLimiting, RecoverType, ResourceRule, TriggerPolicy, parse_duration,
};
use ctrlmesh_common::names::{annotation, label};
use ctrlmesh_common::policy::Guard;
use ctrlmesh_common::policy::guard::{Bucket, RequestMatch, Trigger};
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::wire::MAX_POLICY_BYTES;

use super::{CompiledPolicy, Trouble};
use crate::rules::object_name::{full_name, namespace};
use crate::rules::pod::Member;
use crate::rules::validate;

/// The most that the guards of one pod may take of its policy, in bytes of JSON.
const MAX_GUARDS_BYTES: usize = 256 << 10;

/// No less than the name of their field and what stands around it.
const FIELD_BYTES: usize = 64;

/// The CircuitBreakers in force, and the policies with their guards.
#[derive(Debug)]
pub(super) struct Guarded<'a> {
    breakers: Vec<Breaker>,
    /// Indices of `breakers`, by name.
    by_namespace: BTreeMap<&'a str, Vec<usize>>,
    /// By the address of the policy without guards, which is beside it, and the breakers.
    policies: HashMap<(usize, Vec<usize>), PolicyPair>,
    troubles: Vec<Trouble>,
}

#[derive(Debug)]
struct PolicyPair {
    _unguarded: Arc<CompiledPolicy>,
    guarded: Arc<CompiledPolicy>,
}

#[derive(Debug)]
struct Breaker {
    name: String,
    selector: Selector,
    guards: Vec<Guard>,
    bytes: usize,
}

impl<'a> Guarded<'a> {
    /// An invalid breaker is reported and not used.
    pub(super) fn new(breakers: &'a [CircuitBreaker]) -> Self {
        let mut guarded = Self {
            breakers: Vec::new(),
            by_namespace: BTreeMap::new(),
            policies: HashMap::new(),
            troubles: Vec::new(),
        };
        let mut sorted: Vec<(String, &CircuitBreaker)> =
            breakers.iter().filter(|one| is_on(one)).map(|one| (full_name(&one.metadata), one)).collect();
        sorted.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (name, breaker) in sorted {
            match compiled(&name, breaker) {
                Ok(compiled) => {
                    let at = guarded.breakers.len();
                    guarded.by_namespace.entry(namespace(&breaker.metadata)).or_default().push(at);
                    guarded.breakers.push(compiled);
                }
                Err(troubles) => guarded.troubles.extend(troubles),
            }
        }
        guarded
    }

    /// The policy of `pod` with its guards. Pods that share a policy and have the same breakers share the result.
    pub(super) fn guard(&mut self, policy: Arc<CompiledPolicy>, pod: &Member) -> Arc<CompiledPolicy> {
        let left = MAX_POLICY_BYTES.saturating_sub(policy.json().len() + FIELD_BYTES);
        let breakers = self.of_pod(pod, left.min(MAX_GUARDS_BYTES));
        if breakers.is_empty() && policy.policy.guards.is_empty() {
            return policy;
        }
        let all = &self.breakers;
        let key = (Arc::as_ptr(&policy).addr(), breakers);
        if let Some(pair) = self.policies.get(&key) {
            return pair.guarded.clone();
        }
        let guards: Vec<Guard> = key.1.iter().flat_map(|at| all[*at].guards.iter().cloned()).collect();
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
        let matching = near.copied().filter(|at| self.breakers[*at].selector.matches(&pod.labels));
        let (mut breakers, mut bytes) = (Vec::new(), 0);
        for at in matching {
            let breaker = &self.breakers[at];
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

/// Whether it is neither switched off nor being deleted.
fn is_on(breaker: &CircuitBreaker) -> bool {
    let switch = breaker.metadata.labels.as_ref().and_then(|labels| labels.get(label::DISABLE_CIRCUIT_BREAKER));
    breaker.metadata.deletion_timestamp.is_none() && switch.is_none_or(|switch| switch != "true")
}

fn compiled(name: &str, breaker: &CircuitBreaker) -> Result<Breaker, Vec<Trouble>> {
    let errors = validate::circuit_breaker(breaker).errors;
    let selector = Selector::try_from(&breaker.spec.selector).ok().filter(|_| errors.is_empty());
    let Some(selector) = selector else {
        return Err(errors.iter().map(|error| trouble(name, error.to_string())).collect());
    };
    let annotations = breaker.metadata.annotations.as_ref();
    let reset = annotations.and_then(|all| all.get(annotation::RESET_CIRCUIT_BREAKER)).map(String::as_str);
    // Other rules are for other servers than the API server.
    let rules = breaker.spec.rate_limitings.iter().filter(|limiting| !limiting.resource_rules.is_empty());
    let guards: Vec<Guard> = rules.map(|limiting| guard(name, limiting, reset)).collect();
    // Strings and numbers always serialise.
    let bytes = serde_json::to_vec(&guards).unwrap_or_default().len();
    Ok(Breaker { name: name.to_owned(), selector, guards, bytes })
}

/// The guard of a rule of a valid breaker.
fn guard(breaker: &str, limiting: &RateLimiting, reset: Option<&str>) -> Guard {
    let trigger = match limiting.trigger_policy {
        TriggerPolicy::Normal => Trigger::Normal,
        TriggerPolicy::LimiterOnly => Trigger::LimiterOnly,
        TriggerPolicy::ForceOpened => Trigger::ForceOpened,
        TriggerPolicy::ForceClosed => Trigger::ForceClosed,
    };
    let recovers = limiting.recover_policy.as_ref().filter(|policy| policy.kind == RecoverType::SleepingWindow);
    let window = recovers.and_then(|policy| policy.sleeping_window_size.as_deref());
    let names_rule = |value: &&str| value.strip_prefix(&limiting.name).is_some_and(is_end);
    Guard {
        breaker: breaker.to_owned(),
        rule: limiting.name.clone(),
        bucket: limiting.bucket.as_ref().and_then(bucket),
        trigger,
        sleeping_window_nanoseconds: window.and_then(nanoseconds),
        requests: limiting.resource_rules.iter().map(requests).collect(),
        reset: reset.filter(names_rule).map(str::to_owned),
    }
}

/// Behind the name in a reset stands nothing, or a space and any text.
fn is_end(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with(' ')
}

fn bucket(bucket: &api::Bucket) -> Option<Bucket> {
    let interval_nanoseconds = nanoseconds(&bucket.interval)?;
    Some(Bucket { burst: bucket.burst, limit: bucket.limit, interval_nanoseconds })
}

/// At most 292 years, so that it fits.
fn nanoseconds(text: &str) -> Option<u64> {
    u64::try_from(parse_duration(text)?.as_nanos()).ok()
}

fn requests(rule: &ResourceRule) -> RequestMatch {
    RequestMatch {
        api_groups: rule.api_groups.clone(),
        resources: rule.resources.clone(),
        verbs: rule.verbs.clone(),
        namespaces: rule.namespaces.clone(),
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
