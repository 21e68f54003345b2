use serde_json::{Value, json};

use super::*;
use crate::rollout::samples::{root, trial};

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn shown(status: Option<Value>) -> String {
    let root = root(status);
    let (rule, status) = (root.spec.root.as_ref().unwrap(), root.status.as_ref());
    screen(&root, rule, status.and_then(|status| status.rollout.as_ref()), at("2026-01-01T00:03:20Z"))
}

#[test]
fn a_screen_has_the_trial_its_checks_and_what_failed() {
    let mut status = trial("Analysing");
    status["trial"]["namespaces"] = json!(["staging"]);
    let check = |verdict: &str, at: &str| {
        let numbers = "objects 30 (900), requests 40 (910)";
        json!({"revision": "new", "step": 1, "verdict": verdict, "message": numbers, "at": at})
    };
    status["checks"] = json!([check("Passed", "2026-01-01T00:03:10Z"), check("Failed", "2026-01-01T00:02:10Z")]);
    let expected = "\
Root:         ops/web, Deployment web
Promoted:     old, in the shards with the first names
Trial:        new
  Phase:      Analysing
  Step:       1 of 3, for 3m20s; it lasts 5m
  Slots:      3, 7
  Namespaces: staging
  Checks:     2 passed, 1 failed (1 may fail)
  Message:    why

Checks:
  AGE     REVISION   STEP   VERDICT   NUMBERS (OF THE PROMOTED REVISION)
  10s     new        1      Passed    objects 30 (900), requests 40 (910)
  1m10s   new        1      Failed    objects 30 (900), requests 40 (910)

Rejected:
  AGE     REVISION   REASON
  3m20s   bad        it wrote 0 times
";
    assert_eq!(shown(Some(status)), expected);
}

#[test]
fn what_a_shadow_would_have_written_is_counted_and_told() {
    let mut status = trial("Analysing");
    status["trial"]["shadow"] = json!(true);
    let of = |verb: &str, name: &str, fields: Value| {
        let object = ("deployments.apps", "shop", name);
        json!({"verb": verb, "resource": object.0, "namespace": object.1, "name": object.2, "fields": fields})
    };
    let differences = [
        of("update", "site", json!(["spec.replicas: is 1, meant 3", "spec.paused: is absent, meant true"])),
        of("deletecollection", "", json!([])),
    ];
    status["shadow"] = json!({"revision": "new", "intended": 9, "equal": 5, "different": 2, "refused": 1, "unknown": 0,
        "differences": differences});
    let screen = shown(Some(status.clone()));
    let summary = "of 9 intended writes 5 equal, 2 different, 1 refused, 1 being compared\n";
    assert!(screen.contains("  Shadows: 3, 7\n") && screen.contains(&format!("  Shadow:  {summary}")), "{screen}");
    let root = root(Some(status));
    let told = report(&root, root.status.as_ref().unwrap().rollout.as_ref().unwrap().shadow.as_ref().unwrap());
    let expected = format!(
        "Root:     ops/web\nRevision: new\nWrites:   {summary}
Differences:
  VERB               RESOURCE           NAMESPACE   NAME   DIFFERENCE
  update             deployments.apps   shop        site   spec.replicas: is 1, meant 3
  update             deployments.apps   shop        site   spec.paused: is absent, meant true
  deletecollection   deployments.apps   shop        -      is still there
"
    );
    assert_eq!(told, expected);
}

#[test]
fn a_screen_without_a_trial_or_a_status_says_so() {
    let idle = shown(Some(json!({"promoted": "old", "second": true})));
    assert!(idle.ends_with("Promoted: old, in the shards with the second names\nTrial:    none\n"), "{idle}");
    assert!(shown(None).contains("Promoted: none yet"));
}

#[test]
fn a_step_without_slots_says_what_that_means() {
    let shown = |phase: &str| {
        let mut status = trial(phase);
        status["trial"]["slots"] = json!([]);
        shown(Some(status))
    };
    assert!(shown("Promoting").contains("Slots:   all, pod by pod\n"));
    let held = shown("Held");
    assert!(held.contains("Slots:   none\n") && held.contains("1 of 3, for 3m20s\n"), "{held}");
}

#[test]
fn what_cannot_hold_new_versions_back_is_named_first() {
    let mut root = root(Some(trial("Analysing")));
    let condition = json!({
        "type": "Progressing", "status": "False", "reason": "StrategyCannotHold",
        "message": "maxUnavailable is 25%:\nset it to 0", "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    root.status.as_mut().unwrap().conditions = vec![serde_json::from_value(condition).unwrap()];
    assert!(list(&[root.clone()]).contains("   maxUnavailable is 25%: set it to 0\n"));
    let rule = root.spec.root.as_ref().unwrap();
    let text = screen(&root, rule, None, at("2026-01-01T00:00:00Z"));
    assert!(text.contains("Warning:  maxUnavailable is 25%: set it to 0\n"), "{text}");
}

#[test]
fn a_list_has_one_line_a_root() {
    let roots = [root(Some(trial("Waiting"))), root(Some(json!({"promoted": "old"}))), root(None)];
    let expected = "\
ROOT   PROMOTED   TRIAL   PHASE     STEP   PASSED   FAILED   MESSAGE
web    old        new     Waiting   1/3    2        1        why
web    old        -       -         -      -        -        no new version is tried
web    -          -       -         -      -        -        no pod is enrolled yet
";
    assert_eq!(list(&roots), expected);
}

#[test]
fn an_outcome_says_how_the_revision_stands() {
    for (status, revision, says) in [
        (trial("Promoting"), "new", "revision new: Promoting, step 1 of 3: why\n"),
        (trial("Promoting"), "bad", "revision bad is not tried, because it has failed\n"),
        (json!({"promoted": "new"}), "new", "revision new is promoted\n"),
        (json!({"promoted": "new"}), "bad", "revision bad is not tried now; when it has pods"),
    ] {
        let root = root(Some(status));
        let status = root.status.as_ref().and_then(|status| status.rollout.as_ref()).unwrap();
        let line = outcome(&root, status, revision);
        assert!(line.starts_with(says), "{line}");
    }
}

#[test]
fn ages_are_as_kubectl_says_them() {
    let ages = [(0, "0s"), (59, "59s"), (60, "1m"), (61, "1m1s"), (3600, "1h"), (3660, "1h1m"), (180_000, "2d")];
    for (seconds, age) in ages {
        assert_eq!(duration(seconds), age);
    }
}
