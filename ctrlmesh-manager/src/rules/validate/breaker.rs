//! Validates circuit breakers.

use ctrlmesh_common::api::{
    Bucket, BucketScope, CircuitBreakerSpec, OnOpen, RateLimiting, RecoverPolicy, RecoverType, ResourceRule,
    TriggerPolicy,
};
use ctrlmesh_common::resource::{WILDCARD, without_subresource};

use super::{Report, access, clusters, positive_duration, required_selector};

pub(super) fn check(spec: &CircuitBreakerSpec, report: &mut Report) {
    required_selector("spec.selector", &spec.selector, report);
    if spec.rate_limitings.is_empty() && spec.traffic_intercept_rules.is_empty() {
        report.warning("spec.rateLimitings", "and trafficInterceptRules are empty: nothing is held back");
    }
    for (at, limiting) in spec.rate_limitings.iter().enumerate() {
        check_limiting(&format!("spec.rateLimitings[{at}]"), limiting, report);
    }
    access::check(spec, report);
}

fn check_limiting(field: &str, limiting: &RateLimiting, report: &mut Report) {
    let counts = matches!(limiting.trigger_policy, TriggerPolicy::Normal | TriggerPolicy::LimiterOnly);
    match &limiting.bucket {
        Some(bucket) => {
            positive_duration(&format!("{field}.bucket.interval"), &bucket.interval, report);
            check_bucket(field, bucket, &limiting.resource_rules, report);
        }
        None if counts => {
            report.error(format!("{field}.bucket"), "is required with the trigger policies Normal and LimiterOnly");
        }
        None => {}
    }
    if limiting.resource_rules.is_empty() && limiting.rest_rules.is_empty() {
        report.error(
            format!("{field}.resourceRules"),
            "at least one rule, here or in restRules, is required; the limit would apply to nothing",
        );
    }
    for (at, rule) in limiting.resource_rules.iter().enumerate() {
        clusters::check_names(&format!("{field}.resourceRules[{at}].clusters"), &rule.clusters, report);
    }
    access::check_rest(&format!("{field}.restRules"), &limiting.rest_rules, report);
    let opens = matches!(limiting.trigger_policy, TriggerPolicy::Normal | TriggerPolicy::ForceOpened);
    if limiting.on_open == OnOpen::Hold && !opens {
        report.warning(format!("{field}.onOpen"), "is not used: with this trigger policy the breaker never opens");
    }
    if let Some(policy) = &limiting.recover_policy {
        check_recovery(&format!("{field}.recoverPolicy"), policy, report);
        if limiting.trigger_policy != TriggerPolicy::Normal {
            report.warning(
                format!("{field}.recoverPolicy"),
                "is not used: only with the trigger policy Normal does the breaker open by itself",
            );
        }
    }
}

fn check_bucket(field: &str, bucket: &Bucket, rules: &[ResourceRule], report: &mut Report) {
    let is_shared = bucket.scope != BucketScope::Pod;
    if bucket.limit == Some(0) && is_shared {
        report.error(
            format!("{field}.bucket.limit"),
            "must be at least 1 with the scopes Shard and Operator; a pod that comes begins with an empty bucket",
        );
    }
    if bucket.percent_of_share.is_none() {
        for (name, value) in [("burst", bucket.burst), ("limit", bucket.limit)] {
            if value.is_none() {
                report.error(format!("{field}.bucket.{name}"), "is required, unless there is percentOfShare");
            }
        }
        return;
    }
    if bucket.burst.is_some() || bucket.limit.is_some() {
        report.error(
            format!("{field}.bucket.percentOfShare"),
            "stands in place of burst and limit, and cannot be beside them",
        );
    }
    if is_shared {
        report.error(
            format!("{field}.bucket.scope"),
            "must be Pod with percentOfShare; the share is that of the pod's shard",
        );
    }
    if let Some(at) = rules.iter().position(|rule| !rule.clusters.is_empty()) {
        report.error(
            format!("{field}.resourceRules[{at}].clusters"),
            "must be absent with bucket.percentOfShare; the objects of members are not counted",
        );
    }
    let is_wide = |rule: &ResourceRule| {
        rule.api_groups.iter().any(|group| group == WILDCARD)
            || rule.resources.iter().any(|resource| resource.starts_with(WILDCARD))
    };
    if rules.is_empty() || rules.iter().any(is_wide) {
        report.error(
            format!("{field}.resourceRules"),
            "are required with bucket.percentOfShare, and must write out groups and resources; their objects are counted",
        );
    }
}

/// Refuses limits that count objects of kinds that nobody labels. `labels` takes group and plural.
pub(super) fn check_counted(spec: &CircuitBreakerSpec, labels: &dyn Fn(&str, &str) -> bool, report: &mut Report) {
    for (at, limiting) in spec.rate_limitings.iter().enumerate() {
        if limiting.bucket.as_ref().is_none_or(|bucket| bucket.percent_of_share.is_none()) {
            continue;
        }
        for (number, rule) in limiting.resource_rules.iter().enumerate() {
            for (place, resource) in rule.resources.iter().enumerate() {
                let plural = without_subresource(resource);
                if let Some(group) = rule.api_groups.iter().find(|group| !labels(group, plural)) {
                    report.error(
                        format!("spec.rateLimitings[{at}].resourceRules[{number}].resources[{place}]"),
                        format!(
                            "{plural:?} of apiGroup {group:?} cannot be counted for percentOfShare, because nobody labels it: name it in the resourceSelector of a root, or use burst and limit"
                        ),
                    );
                }
            }
        }
    }
}

fn check_recovery(field: &str, policy: &RecoverPolicy, report: &mut Report) {
    let field = format!("{field}.sleepingWindowSize");
    match &policy.sleeping_window_size {
        Some(size) => positive_duration(&field, size, report),
        None if policy.kind == RecoverType::SleepingWindow => {
            report.error(field, "is required with the type SleepingWindow");
        }
        None => {}
    }
}
