//! Tells what the trafficInterceptRules of a CircuitBreaker have refused.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{BreakerTargetStatus, CircuitBreaker, InterceptSnapshot};
use ctrlmesh_common::wire::GuardState;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Target;
use crate::rules::breaker::Breaker;
use crate::status::cluster_writer::EventNote;
use crate::status::finding::{listed, seconds};

/// A rule that has refused nothing in a pod for so long is told of again.
const QUIET: SignedDuration = SignedDuration::from_mins(10);

/// What each rule has refused in a pod.
pub(super) fn snapshots(target: &Target<'_>, object: &CircuitBreaker, read: &Breaker) -> Vec<InterceptSnapshot> {
    let of_rule = |rule: &str| {
        let before = target.before.and_then(|before| before.intercept_snapshots.iter().find(|one| one.name == rule));
        // A new leader has not heard yet, and a proxy that has started again has refused nothing since.
        let Some(receipt) = target.receipt else { return before.cloned() };
        let is_its = |one: &&GuardState| one.breaker == read.selection.name && one.rule == rule;
        let reported = receipt.guards.iter().filter(|one| !one.last_refused.is_empty()).find(is_its);
        reported.map_or_else(|| before.cloned(), snapshot)
    };
    object.spec.traffic_intercept_rules.iter().filter_map(|rule| of_rule(&rule.name)).collect()
}

fn snapshot(reported: &GuardState) -> Option<InterceptSnapshot> {
    let at = i64::try_from(reported.changed_at).ok().and_then(|at| Timestamp::from_millisecond(at).ok())?;
    Some(InterceptSnapshot {
        name: reported.rule.clone(),
        refused: i64::try_from(reported.refused).unwrap_or(i64::MAX),
        last_refused: reported.last_refused.clone(),
        last_refused_time: Time(seconds(at)),
    })
}

/// Leaves the rules that have refused something.
pub(super) fn without_counts(snapshots: &mut [InterceptSnapshot]) {
    for one in snapshots {
        one.refused = 0;
        one.last_refused.clear();
        one.last_refused_time = Time(Timestamp::UNIX_EPOCH);
    }
}

/// The rules that have begun to refuse something between two statuses.
pub(super) fn events(before: &[BreakerTargetStatus], after: &[BreakerTargetStatus]) -> Vec<EventNote> {
    let mut begun: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for target in after {
        let same_pod = |one: &&BreakerTargetStatus| one.target.pod_name == target.target.pod_name;
        let known = before.iter().find(same_pod).map(|one| &one.intercept_snapshots[..]).unwrap_or_default();
        for now in &target.intercept_snapshots {
            let last = known.iter().find(|one| one.name == now.name).map(|one| one.last_refused_time.0);
            if last.is_none_or(|last| now.last_refused_time.0.duration_since(last) >= QUIET) {
                let pod = target.target.pod_name.as_deref().unwrap_or_default();
                begun.entry(&now.name).or_default().push(format!("pod {pod} ({})", now.last_refused));
            }
        }
    }
    let note = |(rule, pods): (&str, Vec<String>)| EventNote {
        warning: true,
        reason: "EgressRefused".to_owned(),
        message: format!("trafficInterceptRule {rule:?} refuses what is sent by {}", listed(&pods, ", ")),
    };
    begun.into_iter().map(note).collect()
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::TargetStatus;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn target(pod: &str, rules: &[(&str, i64)]) -> BreakerTargetStatus {
        let snapshot = |(name, second): &(&str, i64)| InterceptSnapshot {
            name: (*name).to_owned(),
            refused: *second,
            last_refused: "a.example.com:443".to_owned(),
            last_refused_time: Time(at(*second)),
        };
        BreakerTargetStatus {
            target: TargetStatus { pod_name: Some(pod.to_owned()), ..TargetStatus::default() },
            intercept_snapshots: rules.iter().map(snapshot).collect(),
            ..BreakerTargetStatus::default()
        }
    }

    fn told(before: &[BreakerTargetStatus], after: &[BreakerTargetStatus]) -> Vec<String> {
        events(before, after).into_iter().map(|event| event.message).collect()
    }

    #[test]
    fn a_rule_is_told_of_when_it_begins_to_refuse_and_after_it_was_quiet() {
        let before = [target("a", &[("one", 100)])];
        let begins = [target("a", &[("one", 100), ("two", 130)]), target("b", &[("two", 131)])];
        let message = r#"trafficInterceptRule "two" refuses what is sent by pod a (a.example.com:443), pod b (a.example.com:443)"#;
        assert_eq!(told(&before, &begins), [message]);
        assert_eq!(told(&begins, &begins), [""; 0]);
        assert_eq!(told(&before, &[target("a", &[("one", 699)])]), [""; 0], "it goes on");
        let again = r#"trafficInterceptRule "one" refuses what is sent by pod a (a.example.com:443)"#;
        assert_eq!(told(&before, &[target("a", &[("one", 700)])]), [again]);
    }

    #[test]
    fn what_was_reported_is_shown_in_whole_seconds() {
        let reported = GuardState {
            rule: "one".to_owned(),
            changed_at: 5_400,
            refused: 7,
            last_refused: "a:80".to_owned(),
            ..GuardState::default()
        };
        let mut shown = [snapshot(&reported).unwrap()];
        assert_eq!((shown[0].refused, shown[0].last_refused_time.0), (7, at(5)));
        without_counts(&mut shown);
        let mut later = [snapshot(&GuardState { refused: 8, changed_at: 9_000, ..reported }).unwrap()];
        without_counts(&mut later);
        assert_eq!(shown, later);
    }
}
