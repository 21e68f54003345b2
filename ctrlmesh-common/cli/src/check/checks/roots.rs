//! Checks the conditions of roots and shards by hand, and whether their pods have the newest policies.

use jiff::Timestamp;

use super::super::finding::{Finding, Group, listed};
use super::super::pages;
use super::super::snapshot::{Installed, Snapshot};
use crate::status::overview::{Overview, Problem, overviews};
use crate::text::{counted, cut, line, since};

const CHECK: &str = "conditions";

/// After this time a condition is no passing state.
const PASSING_SECONDS: i64 = 5 * 60;

/// Conditions that ask for somebody at once.
const URGENT: [&str; 2] = ["Accepted", "Degraded"];

/// Conditions of upgrades, which wait for somebody, and for as long as that takes.
const OF_UPGRADES: [&str; 2] = ["Progressing", "RolledBack"];

/// Conditions and reasons of a cluster that has no fence: the proxies fence alone, which the API server's checks say.
const WITHOUT_FENCE: (&str, &str) = ("Fenced", "Unsupported");

/// Reasons of urgent conditions by which something is under way.
const UNDER_WAY: [&str; 2] = ["Labelling", "NotSeen"];

/// Of a condition's message, in characters.
const MESSAGE_WIDTH: usize = 300;

pub(super) fn check(snapshot: &Snapshot, installed: &Installed) -> Vec<Finding> {
    let now = snapshot.server.date.unwrap_or(snapshot.server.answered);
    Group::Roots.of(CHECK, &installed.configs, |configs| {
        let roots = overviews(configs, &[]);
        if roots.is_empty() {
            return vec![Group::Roots.ok(CHECK, "there are no ShardingConfigs")];
        }
        let mut findings: Vec<Finding> = roots.iter().filter_map(|root| problems(root, now)).collect();
        if findings.is_empty() {
            let found = match roots.len() {
                1 => "1 root or shard by hand is as it should be".to_owned(),
                number => format!("{number} roots and shards by hand are as they should be"),
            };
            findings.push(Group::Roots.ok(CHECK, found));
        }
        findings.extend(policies(&roots));
        findings
    })
}

/// One finding a root, about its worst condition.
fn problems(root: &Overview, now: Timestamp) -> Option<Finding> {
    let is_failure = |problem: &&Problem| fails(problem, now);
    let worst = root.problems.iter().find(is_failure).or(root.problems.first())?;
    let others = match root.problems.len() - 1 {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    };
    let Problem { of, condition, reason, message, since: begun } = worst;
    let message = cut(&line(message), MESSAGE_WIDTH);
    let found = format!("{}/{of}: {condition}, {reason} for {}: {message}{others}", root.namespace, since(*begun, now));
    let advice = format!(
        "look at `ctrlmesh status -n {} {}`, and find the reason: {}",
        root.namespace,
        root.name,
        pages::CONDITIONS
    );
    Some(if fails(worst, now) {
        Group::Roots.failed(CHECK, found, advice)
    } else {
        Group::Roots.warning(CHECK, found, advice)
    })
}

/// Whether a condition is more than a passing state.
fn fails(problem: &Problem, now: Timestamp) -> bool {
    let is_lasting = (problem.condition.as_str(), problem.reason.as_str()) == WITHOUT_FENCE;
    if is_lasting || OF_UPGRADES.contains(&problem.condition.as_str()) {
        return false;
    }
    let is_urgent = URGENT.contains(&problem.condition.as_str()) && !UNDER_WAY.contains(&problem.reason.as_str());
    is_urgent || now.duration_since(problem.since).as_secs() >= PASSING_SECONDS
}

/// Whether every pod has the newest epoch.
fn policies(roots: &[Overview]) -> Option<Finding> {
    let pods = |root: &Overview| {
        let shards = root.shards.iter().flat_map(|shard| &shard.pods);
        shards.map(|pod| (format!("{}/{}", root.namespace, pod.name), pod.current)).collect::<Vec<_>>()
    };
    let all: Vec<(String, bool)> = roots.iter().flat_map(pods).collect();
    let late: Vec<&str> = all.iter().filter(|(_, current)| !current).map(|(name, _)| name.as_str()).collect();
    if all.is_empty() {
        return None;
    }
    if late.is_empty() {
        let found = format!("{} with the newest policy", counted(all.len(), "pod"));
        return Some(Group::Roots.ok("policies", found));
    }
    let found = format!("{} of {} without the newest policy: {}", late.len(), counted(all.len(), "pod"), listed(&late));
    let advice = "check again in a minute; then look at the log of the node proxy where the pod runs";
    Some(Group::Roots.warning("policies", found, advice))
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::ShardingConfig;
    use serde_json::{Value, json};

    use super::super::super::finding::State;
    use super::super::super::snapshot::samples;
    use super::*;
    use crate::cluster::answer::Unanswered;

    fn config(conditions: Value, pods: Value) -> ShardingConfig {
        let spec = json!({"selector": {"matchLabels": {"a": "b"}}, "limits": []});
        serde_json::from_value(json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"namespace": "ops", "name": "web"}, "spec": spec,
            "status": {"epoch": 7, "conditions": conditions, "pods": pods}}))
        .unwrap()
    }

    fn condition(kind: &str, status: &str, reason: &str, seconds_ago: i64) -> Value {
        let since = samples::now() - jiff::SignedDuration::from_secs(seconds_ago);
        json!({"type": kind, "status": status, "reason": reason, "message": "so it is",
            "lastTransitionTime": since.to_string()})
    }

    fn findings(conditions: Value, pods: Value) -> Vec<Finding> {
        let mut installed = samples::installed();
        installed.configs = Ok(vec![config(conditions, pods)]);
        check(&samples::snapshot(), &installed)
    }

    #[test]
    fn good_conditions_and_new_policies_are_good() {
        let pods = json!([{"name": "web-a", "epoch": 7}]);
        let good = findings(json!([condition("Accepted", "True", "Valid", 0)]), pods);
        assert_eq!(good.iter().map(|one| one.state).collect::<Vec<_>>(), [State::Ok, State::Ok], "{good:?}");
        assert_eq!(check(&samples::snapshot(), &samples::installed())[0].state, State::Ok);
    }

    #[test]
    fn a_condition_fails_at_once_or_when_it_lasts() {
        for (kind, status, reason, seconds, expected) in [
            ("Degraded", "True", "ProxyAway", 1, State::Failed),
            ("Degraded", "True", "Labelling", 1, State::Warning),
            ("Settled", "False", "Moving", 299, State::Warning),
            ("Settled", "False", "Moving", 300, State::Failed),
            ("Settled", "False", "Undecided", 299, State::Warning),
            ("Settled", "False", "Undecided", 300, State::Failed),
            ("Settled", "True", "Disabled", 9000, State::Ok),
            ("RolledBack", "True", "Failed", 9000, State::Warning),
            ("Owned", "False", "Unowned", 600, State::Failed),
        ] {
            let found = findings(json!([condition(kind, status, reason, seconds)]), json!([]));
            assert_eq!((found.len(), found[0].state), (1, expected), "{kind} {reason} {seconds}");
        }
    }

    #[test]
    fn the_worst_condition_of_a_root_is_shown() {
        let two = json!([condition("Settled", "False", "Moving", 1), condition("Accepted", "False", "Invalid", 65)]);
        let found = findings(two, json!([]));
        let expected = "ops/web: Accepted, Invalid for 1m5s: so it is (and 1 more)";
        assert_eq!((found[0].state, found[0].message.as_str()), (State::Failed, expected));
    }

    #[test]
    fn pods_with_an_older_policy_are_named() {
        let found = findings(json!([]), json!([{"name": "web-a", "epoch": 6}, {"name": "web-b", "epoch": 7}]));
        let expected = "1 of 2 pods without the newest policy: ops/web-a";
        assert_eq!((found[1].state, found[1].message.as_str()), (State::Warning, expected));
    }

    #[test]
    fn without_the_right_roots_are_skipped() {
        let mut installed = samples::installed();
        installed.configs = Err(Unanswered::Forbidden { right: "list shardingconfigs".to_owned() });
        assert_eq!(check(&samples::snapshot(), &installed)[0].state, State::Skipped);
    }
}
