//! Validates circuit breakers.

use ctrlmesh_common::api::{
    BucketScope, CircuitBreakerSpec, ContentType, OnOpen, RateLimiting, RecoverPolicy, RecoverType,
    TrafficInterceptRule, TriggerPolicy,
};

use super::{Report, positive_duration, regular_expression, required_selector};

/// Of rules for other servers than the API server.
const NOT_ENFORCED: &str = "is checked, but not enforced yet: proxies see requests to the API server only";

pub(super) fn check(spec: &CircuitBreakerSpec, report: &mut Report) {
    required_selector("spec.selector", &spec.selector, report);
    if spec.rate_limitings.is_empty() && spec.traffic_intercept_rules.is_empty() {
        report.warning("spec.rateLimitings", "and trafficInterceptRules are empty: nothing is held back");
    }
    for (at, limiting) in spec.rate_limitings.iter().enumerate() {
        check_limiting(&format!("spec.rateLimitings[{at}]"), limiting, report);
    }
    if !spec.traffic_intercept_rules.is_empty() {
        report.warning("spec.trafficInterceptRules", NOT_ENFORCED);
    }
    for (at, rule) in spec.traffic_intercept_rules.iter().enumerate() {
        check_rule(&format!("spec.trafficInterceptRules[{at}]"), rule, report);
    }
}

fn check_limiting(field: &str, limiting: &RateLimiting, report: &mut Report) {
    let counts = matches!(limiting.trigger_policy, TriggerPolicy::Normal | TriggerPolicy::LimiterOnly);
    match &limiting.bucket {
        Some(bucket) => {
            positive_duration(&format!("{field}.bucket.interval"), &bucket.interval, report);
            if bucket.limit == 0 && bucket.scope != BucketScope::Pod {
                report.error(
                    format!("{field}.bucket.limit"),
                    "must be at least 1 with the scopes Shard and Operator; a pod that comes begins with an empty bucket",
                );
            }
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
    if !limiting.rest_rules.is_empty() {
        report.warning(format!("{field}.restRules"), NOT_ENFORCED);
    }
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

fn check_rule(field: &str, rule: &TrafficInterceptRule, report: &mut Report) {
    if rule.content_type == ContentType::Regexp {
        for (at, content) in rule.contents.iter().enumerate() {
            drop(regular_expression(&format!("{field}.contents[{at}]"), content, report));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields that a warning says are not enforced.
    fn unenforced(spec: &str) -> Vec<String> {
        let spec: CircuitBreakerSpec = serde_saphyr::from_str(spec).unwrap();
        let mut report = Report::default();
        check(&spec, &mut report);
        assert_eq!(report.errors, [], "{spec:?}");
        let warnings = report.warnings.into_iter().filter(|warning| warning.message == NOT_ENFORCED);
        warnings.map(|warning| warning.field).collect()
    }

    #[test]
    fn rules_for_other_servers_are_warned_of_and_others_not() {
        let resources = "resourceRules: [{apiGroups: [''], resources: [pods], verbs: [delete], namespaces: ['*']}]";
        let rest = "restRules: [{url: 'http://a/', method: GET}]";
        let spec = |rules: &str, more: &str| {
            format!(
                "{{selector: {{matchLabels: {{a: b}}}}, rateLimitings: [{{name: r, triggerPolicy: ForceOpened, {rules}}}]{more}}}"
            )
        };
        assert!(unenforced(&spec(resources, "")).is_empty());
        assert_eq!(unenforced(&spec(&format!("{resources}, {rest}"), "")), ["spec.rateLimitings[0].restRules"]);
        let traffic = ", trafficInterceptRules: [{name: t, interceptType: Whitelist, contentType: Normal, contents: [a], methods: [GET]}]";
        assert_eq!(unenforced(&spec(resources, traffic)), ["spec.trafficInterceptRules"]);
    }
}
