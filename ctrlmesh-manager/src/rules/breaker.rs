//! Reads a CircuitBreaker as the guards that it gives to pods.

use ctrlmesh_common::api::{
    self, CircuitBreaker, RateLimiting, RecoverType, ResourceRule, TriggerPolicy, parse_duration,
};
use ctrlmesh_common::names::{annotation, label};
use ctrlmesh_common::policy::Guard;
use ctrlmesh_common::policy::guard::{Bucket, RequestMatch, Trigger};
use ctrlmesh_common::selector::Selector;

use super::object_name::{full_name, namespace};
use super::validate;

/// What a CircuitBreaker asks of the proxies.
#[derive(Clone, Debug, PartialEq)]
pub struct Breaker {
    /// `NAMESPACE/NAME`.
    pub name: String,
    pub namespace: String,
    /// Of its pods; none where it is invalid, switched off, or being deleted.
    pub selector: Option<Selector>,
    pub guards: Vec<Guard>,
    /// What `guards` take as JSON.
    pub bytes: usize,
    /// Why it cannot be used.
    pub errors: Vec<String>,
}

impl From<&CircuitBreaker> for Breaker {
    fn from(breaker: &CircuitBreaker) -> Self {
        let (name, namespace) = (full_name(&breaker.metadata), namespace(&breaker.metadata).to_owned());
        let unused = Self { name, namespace, selector: None, guards: Vec::new(), bytes: 0, errors: Vec::new() };
        if !is_on(breaker) {
            return unused;
        }
        let errors = validate::circuit_breaker(breaker).errors;
        let selector = Selector::try_from(&breaker.spec.selector).ok().filter(|_| errors.is_empty());
        if selector.is_none() {
            return Self { errors: errors.iter().map(ToString::to_string).collect(), ..unused };
        }
        let annotations = breaker.metadata.annotations.as_ref();
        let reset = annotations.and_then(|all| all.get(annotation::RESET_CIRCUIT_BREAKER)).map(String::as_str);
        // Other rules are for other servers than the API server.
        let rules = breaker.spec.rate_limitings.iter().filter(|limiting| !limiting.resource_rules.is_empty());
        let guards: Vec<Guard> = rules.map(|limiting| guard(&unused.name, limiting, reset)).collect();
        // Strings and numbers always serialise.
        let bytes = serde_json::to_vec(&guards).unwrap_or_default().len();
        Self { selector, guards, bytes, ..unused }
    }
}

/// Whether it is neither switched off nor being deleted.
fn is_on(breaker: &CircuitBreaker) -> bool {
    let switch = breaker.metadata.labels.as_ref().and_then(|labels| labels.get(label::DISABLE_CIRCUIT_BREAKER));
    breaker.metadata.deletion_timestamp.is_none() && switch.is_none_or(|switch| switch != "true")
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
