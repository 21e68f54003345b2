use super::*;
use crate::labels::NAMESPACES;
use crate::rules::label_coverage::{CONDITION, KindName};

#[test]
fn unlabelled_kinds_are_reported_until_their_pass_ends() {
    let (gauge, progress) = (Gauge::default(), Progress::default());
    let begin = |kind| KindProgress::new(&gauge, &progress, kind);
    let (mut pods, maps) = (begin("pods"), begin("configmaps"));
    assert_eq!((progress.left(), gauge.get()), (None, 2), "nothing lacked any");
    maps.labelled();
    let left = progress.left().unwrap();
    assert!(left.ends_with(": configmaps, pods"), "{left}");
    drop(maps);
    assert_eq!((progress.left(), gauge.get()), (None, 1));
    pods.labelled();
    assert!(progress.left().is_some_and(|left| left.ends_with(": pods")));
    assert!(pods.set(false) && !pods.set(false));
    assert_eq!((progress.left(), gauge.get()), (None, 0));
}

#[test]
fn all_kinds_and_admission_must_be_finished() {
    let (gauge, progress) = (Gauge::default(), Progress::default());
    let list = ListProgress::new(&gauge, &progress);
    let mut pods = KindProgress::new(&gauge, &progress, "pods");
    let unfinished = || progress.unfinished().unwrap_or_default();
    assert_eq!(unfinished(), "it has only begun", "no kind is known yet");
    progress.at_once(Err("forbidden".to_owned()));
    assert!(unfinished().ends_with("forbidden"));
    progress.at_once(Ok(()));
    assert_eq!(unfinished(), "not gone through yet: pods");
    assert_eq!(progress.left(), None, "nothing lacks what shards go by");
    pods.set(false);
    assert_eq!(progress.unfinished(), None);
    list.report(Some("bad".to_owned()));
    assert!(unfinished().ends_with(": bad"));
    list.report(None);
    pods.failed("gone wrong");
    assert!(unfinished().contains("gone wrong"));
}

#[test]
fn a_late_pass_does_not_end_its_successor() {
    let (gauge, progress) = (Gauge::default(), Progress::default());
    progress.at_once(Ok(()));
    let old = KindProgress::new(&gauge, &progress, "pods");
    let new = KindProgress::new(&gauge, &progress, "pods");
    drop(old);
    assert!(progress.unfinished().is_some());
    drop(new);
    assert_eq!((progress.unfinished(), gauge.get()), (None, 0));
}

#[test]
fn failures_are_reported_also_after_a_pass() {
    let (gauge, progress) = (Gauge::default(), Progress::default());
    let mut pods = KindProgress::new(&gauge, &progress, "pods");
    pods.set(false);
    pods.failed("forbidden");
    pods.failed("another reason");
    let left = progress.left().unwrap();
    let why = "the objects of pods cannot all be labelled, and are tried again: forbidden";
    assert_eq!((left.as_str(), pods.why().as_deref()), (why, Some(why)));
    assert_eq!(gauge.get(), 1);
    pods.set(false);
    assert_eq!((progress.left(), gauge.get()), (None, 0));
}

#[test]
fn an_unwatchable_kind_is_reported_until_it_is_watched() {
    let (gauge, progress) = (Gauge::default(), Progress::default());
    let mut pods = KindProgress::new(&gauge, &progress, "pods");
    pods.set(false);
    pods.unseen(Some("forbidden"));
    let why = Some("the objects of pods cannot be seen: forbidden".to_owned());
    assert_eq!((progress.left(), pods.why(), gauge.get()), (why.clone(), why, 1));
    pods.unseen(None);
    assert_eq!((progress.left(), pods.why()), (None, None));
}

#[test]
fn problems_of_the_list_are_reported_once() {
    let (gauge, progress) = (Gauge::default(), Progress::default());
    let list = ListProgress::new(&gauge, &progress);
    assert!(!list.report(None));
    assert!(list.report(Some("bad".to_owned())) && !list.report(Some("bad".to_owned())));
    assert!(list.report(Some("worse".to_owned())));
    assert_eq!(gauge.get(), 1);
    let left = progress.left().unwrap();
    assert!(left.ends_with("can be labelled: worse"), "{left}");
    drop(list);
    assert_eq!((progress.left(), gauge.get()), (None, 0), "another replica reads it now");
}

fn kind_name() -> KindName {
    KindName { group: String::new(), resource: "pods".to_owned() }
}

/// The root `ops/a` names pods.
fn root() -> ShardingConfig {
    let text = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a, namespace: ops, generation: 3}\n\
        spec: {root: {prefix: r, targetStatefulSet: op, resourceSelector: [{relateResources: [{apiGroups: [''], resources: [pods]}]}]}}\n";
    serde_saphyr::from_str(text).unwrap()
}

/// What the labeller publishes of [`root`].
fn named(missing: &[&str]) -> Named {
    let resources = named_resources(root().spec.root.as_ref().unwrap());
    let kinds = [(NAMESPACES.to_owned(), None), ("pods".to_owned(), Some(kind_name()))].into();
    let rule = |kind: &&str| ((*kind).to_owned(), MissingRule { kind: kind_name(), verbs: vec!["patch"] });
    Named {
        roots: [("ops/a".to_owned(), NamedRoot { resources, kinds })].into(),
        only: ["pods".to_owned()].into(),
        missing: missing.iter().map(rule).collect(),
    }
}

fn coverage(progress: &Progress, config: &ShardingConfig) -> LabelCoverage {
    progress.coverage(config, config.spec.root.as_ref().unwrap())
}

#[test]
fn a_root_is_covered_once_its_kinds_were_gone_through() {
    let (gauge, progress) = (Gauge::default(), Progress::default());
    let begin = |kind| KindProgress::new(&gauge, &progress, kind);
    let is_open = |of: &LabelCoverage| matches!(of.gap, Some(LabelGap::InProgress(_))) && !of.permits_grants();
    assert!(is_open(&coverage(&progress, &root())), "nothing is known yet");
    let (mut namespaces, mut pods, _others) = (begin(NAMESPACES), begin("pods"), begin("others"));
    progress.name(named(&[]));
    assert!(is_open(&coverage(&progress, &root())));
    assert_eq!(progress.left(), None, "what only a root names is in its own condition");
    namespaces.set(false);
    assert!(is_open(&coverage(&progress, &root())));
    pods.set(false);
    let covered = coverage(&progress, &root());
    assert_eq!((covered.gap.as_ref(), covered.permits_grants()), (None, true));
    assert_eq!(covered.needed, [kind_name()]);
    // One that cannot be labelled later stops no grant.
    pods.failed("gone wrong");
    let failed = coverage(&progress, &root());
    assert!(matches!(failed.gap, Some(LabelGap::Failed(_))) && failed.permits_grants());
    assert_eq!(progress.left(), None);
    // The root names something else, about which the labeller has said nothing.
    let mut other = root();
    other.spec.root.as_mut().unwrap().resource_selector.clear();
    assert!(is_open(&coverage(&progress, &other)));
}

#[test]
fn a_kind_that_ends_without_a_pass_covers_nothing() {
    let (gauge, progress) = (Gauge::default(), Progress::default());
    let mut namespaces = KindProgress::new(&gauge, &progress, NAMESPACES);
    namespaces.set(false);
    progress.name(named(&[]));
    drop(KindProgress::new(&gauge, &progress, "pods"));
    assert!(!coverage(&progress, &root()).permits_grants());
    progress.name(named(&["pods"]));
    let forbidden = coverage(&progress, &root());
    assert!(matches!(&forbidden.gap, Some(LabelGap::Forbidden(rules)) if rules[0].verbs == ["patch"]));
    assert!(!forbidden.permits_grants() && progress.unfinished().is_some());
    assert_eq!((gauge.get(), progress.left()), (0, None));
}

#[test]
fn a_new_leader_believes_the_status_until_labels_are_missing() {
    let (gauge, progress) = (Gauge::default(), Progress::default());
    let mut config = root();
    let condition = serde_json::json!({"type": CONDITION, "status": "True", "reason": "Complete", "message": "",
        "observedGeneration": 3, "lastTransitionTime": "2026-01-01T00:00:00Z"});
    config.status.get_or_insert_default().conditions = vec![serde_json::from_value(condition).unwrap()];
    assert!(coverage(&progress, &config).gap.is_none() && coverage(&progress, &config).permits_grants());
    let pods = KindProgress::new(&gauge, &progress, "pods");
    progress.name(named(&[]));
    assert_eq!(coverage(&progress, &config).gap, None, "nothing lacked any");
    pods.labelled();
    assert!(coverage(&progress, &config).gap.is_some());
    config.metadata.generation = Some(4);
    let (progress, config) = (Progress::default(), config);
    assert!(!coverage(&progress, &config).permits_grants(), "the status is of other rules");
}
