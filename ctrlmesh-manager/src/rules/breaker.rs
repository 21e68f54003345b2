//! Reads a CircuitBreaker as the guards and egress rules that it gives to pods.

use ctrlmesh_common::api::{
    self, BucketDivision, BucketScope, CircuitBreaker, OnOpen, RateLimiting, RecoverType, ResourceRule, ShareSize,
    TriggerPolicy, parse_duration,
};
use ctrlmesh_common::names::{annotation, label};
use ctrlmesh_common::policy::Guard;
use ctrlmesh_common::policy::guard::{Bucket, Budget, Part, RequestMatch, Trigger};
use ctrlmesh_common::wire;

use super::pod_selection::PodSelection;
use super::validate;

mod access;

pub use access::Access;

/// What a CircuitBreaker asks of the proxies.
#[derive(Clone, Debug, PartialEq)]
pub struct Breaker {
    pub selection: PodSelection,
    pub rules: Vec<Rule>,
    /// What its pods may talk to beside the API server.
    pub access: Access,
    /// What their guards and egress rules take as JSON.
    pub bytes: usize,
    /// How shared buckets are divided, as its status says.
    pub divisions: Vec<BucketDivision>,
    /// How many objects are in the shares, as its status says.
    pub shares: Vec<ShareSize>,
}

/// A rule as the guard that it gives to pods.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Without a part, and without the size of a share.
    pub guard: Guard,
    pub scope: BucketScope,
    /// A hash of which objects count for a budget.
    pub requests_hash: String,
}

/// What a part of a shared bucket takes as JSON, at most: three names and four numbers.
const PART_BYTES: usize = 640;

/// What the size of a share takes as JSON, at most.
const SIZE_BYTES: usize = 32;

impl From<&CircuitBreaker> for Breaker {
    fn from(breaker: &CircuitBreaker) -> Self {
        let switch = (label::DISABLE_CIRCUIT_BREAKER, false);
        let selection = PodSelection::read(breaker, switch, &breaker.spec.selector, validate::circuit_breaker);
        // Also where it is switched off: proxies may still enforce their parts.
        let divisions = breaker.status.as_ref().map(|status| status.divisions.clone()).unwrap_or_default();
        let shares = breaker.status.as_ref().map(|status| status.shares.clone()).unwrap_or_default();
        if selection.selector.is_none() {
            let (rules, access) = (Vec::new(), Access::default());
            return Self { selection, rules, access, bytes: 0, divisions, shares };
        }
        let annotations = breaker.metadata.annotations.as_ref();
        let reset = annotations.and_then(|all| all.get(annotation::RESET_CIRCUIT_BREAKER)).map(String::as_str);
        let rules = breaker.spec.rate_limitings.iter();
        let rules: Vec<Rule> = rules.map(|limiting| rule(&selection.name, limiting, reset)).collect();
        // Strings and numbers always serialise.
        let of_pod = |rule: &Rule| match (rule.scope, rule.guard.budget) {
            (BucketScope::Pod, None) => 0,
            (BucketScope::Pod, Some(_)) => SIZE_BYTES,
            _ => PART_BYTES,
        };
        let bytes = |rule: &Rule| serde_json::to_vec(&rule.guard).unwrap_or_default().len() + 1 + of_pod(rule);
        let access = Access::read(&selection.name, &breaker.spec);
        let bytes = rules.iter().map(bytes).sum::<usize>() + access.bytes();
        Self { selection, rules, access, bytes, divisions, shares }
    }
}

impl Breaker {
    /// Its guards, for the pod with this UID of an operator's shard.
    pub fn guards(&self, uid: &str, operator: Option<&str>, shard: Option<&str>) -> impl Iterator<Item = Guard> {
        self.rules.iter().map(move |rule| {
            let Rule { guard, scope, .. } = rule;
            let part = group(*scope, operator, shard).map(|group| self.part(group, uid));
            let budget = guard.budget.map(|budget| Budget { objects: self.objects(rule, operator, shard), ..budget });
            Guard { part, budget, ..guard.clone() }
        })
    }

    /// The written size of a share, if it is of the kinds that the rule has now.
    pub fn share_size(&self, rule: &Rule, shard: &str) -> Option<&ShareSize> {
        let wanted = (&*rule.guard.rule, shard, &*rule.requests_hash);
        let is_it = |one: &&ShareSize| (&*one.limit, &*one.shard, &*one.resource_rules_hash) == wanted;
        self.shares.iter().find(is_it)
    }

    /// Whether pods share a bucket.
    pub fn is_shared(&self) -> bool {
        self.rules.iter().any(|rule| rule.scope != BucketScope::Pod)
    }

    fn objects(&self, rule: &Rule, operator: Option<&str>, shard: Option<&str>) -> Option<u64> {
        let shard = group(BucketScope::Shard, operator, shard)?;
        u64::try_from(self.share_size(rule, &shard)?.objects).ok()
    }

    fn part(&self, group: String, uid: &str) -> Part {
        let Some(division) = self.divisions.iter().find(|one| one.group == group) else {
            return Part { group, generation: 0, of: 1, number: None };
        };
        let number = division.pods.iter().position(|pod| pod.uid == uid).and_then(|at| u32::try_from(at).ok());
        let (generation, of) = (u64::try_from(division.generation).unwrap_or_default(), division.parts.max(1));
        Part { group, generation, of, number: number.filter(|number| *number < of) }
    }
}

/// Whose pods a division is for.
pub fn scope_of(group: &str) -> BucketScope {
    if group.matches('/').count() > 1 { BucketScope::Shard } else { BucketScope::Operator }
}

/// The pods with which a pod of this operator's shard shares a bucket; none where the bucket is its own.
pub fn group(scope: BucketScope, operator: Option<&str>, shard: Option<&str>) -> Option<String> {
    let operator = operator.unwrap_or_default();
    match scope {
        BucketScope::Pod => None,
        BucketScope::Operator => Some(operator.to_owned()),
        BucketScope::Shard => Some(format!("{operator}/{}", shard.unwrap_or_default())),
    }
}

/// A rule of a valid breaker.
fn rule(breaker: &str, limiting: &RateLimiting, reset: Option<&str>) -> Rule {
    let trigger = match limiting.trigger_policy {
        TriggerPolicy::Normal => Trigger::Normal,
        TriggerPolicy::LimiterOnly => Trigger::LimiterOnly,
        TriggerPolicy::ForceOpened => Trigger::ForceOpened,
        TriggerPolicy::ForceClosed => Trigger::ForceClosed,
    };
    let recovers = limiting.recover_policy.as_ref().filter(|policy| policy.kind == RecoverType::SleepingWindow);
    let window = recovers.and_then(|policy| policy.sleeping_window_size.as_deref());
    let names_rule = |value: &&str| value.strip_prefix(&limiting.name).is_some_and(is_end);
    let guard = Guard {
        breaker: breaker.to_owned(),
        rule: limiting.name.clone(),
        bucket: limiting.bucket.as_ref().and_then(bucket),
        budget: limiting.bucket.as_ref().and_then(budget),
        part: None,
        trigger,
        sleeping_window_nanoseconds: window.and_then(nanoseconds),
        requests: limiting.resource_rules.iter().map(requests).collect(),
        urls: limiting.rest_rules.iter().filter_map(access::url_request).collect(),
        reset: reset.filter(names_rule).map(str::to_owned),
        holds: limiting.on_open == OnOpen::Hold,
    };
    let scope = limiting.bucket.as_ref().map(|bucket| bucket.scope).unwrap_or_default();
    // Strings always serialise.
    let requests_hash = format!("{:016x}", wire::digest(&serde_json::to_vec(&guard.requests).unwrap_or_default()));
    Rule { guard, scope, requests_hash }
}

/// Behind the name in a reset stands nothing, or a space and any text.
fn is_end(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with(' ')
}

fn bucket(bucket: &api::Bucket) -> Option<Bucket> {
    let interval_nanoseconds = nanoseconds(&bucket.interval)?;
    Some(Bucket { burst: bucket.burst?, limit: bucket.limit?, interval_nanoseconds })
}

fn budget(bucket: &api::Bucket) -> Option<Budget> {
    let interval_nanoseconds = nanoseconds(&bucket.interval)?;
    Some(Budget { percent: bucket.percent_of_share?, interval_nanoseconds, objects: None })
}

/// Of a valid duration: at most 292 years, so that it fits.
pub(super) fn nanoseconds(text: &str) -> Option<u64> {
    u64::try_from(parse_duration(text)?.as_nanos()).ok()
}

fn requests(rule: &ResourceRule) -> RequestMatch {
    RequestMatch {
        api_groups: rule.api_groups.clone(),
        resources: rule.resources.clone(),
        verbs: rule.verbs.clone(),
        namespaces: rule.namespaces.clone(),
        clusters: rule.clusters.clone(),
    }
}
