use ctrlmesh_common::selector::Selector;

use super::*;

const PODS: (&str, &str) = ("", "pods");
const NODES: (&str, &str) = ("", "nodes");

fn limit(resource: &str, selector: &str) -> Limit {
    let resources =
        ResourceMatch { api_groups: vec![String::new()], resources: vec![resource.to_owned()] };
    Limit {
        relate_resources: vec![resources],
        selector: Selector::parse(selector).unwrap(),
        changed_at: None,
    }
}

fn policy(selector: &str, epoch: u64) -> Arc<Policy> {
    let selector = Selector::parse(selector).unwrap();
    let limits = vec![Limit { selector, ..Limit::default() }];
    Arc::new(Policy { epoch, limits, ..Policy::default() })
}

/// Pods as they are told, secrets always the same, nodes not at all.
fn of_pods(selector: &str, epoch: u64) -> Arc<Policy> {
    let limits = vec![limit("pods", selector), limit("secrets", "s=1")];
    Arc::new(Policy { epoch, limits, ..Policy::default() })
}

fn epochs(suspects: Vec<Arc<InForce>>) -> Vec<u64> {
    suspects.iter().map(|past| past.epoch).collect()
}

/// Asks of all that nobody reads under, and is answered `version`.
fn clear(history: &History, now: &InForce, resource: (&str, &str), version: u64) {
    for unread in history.unread(now, resource) {
        unread.was_read_until(resource, version);
    }
}

#[test]
fn every_policy_that_said_otherwise_is_suspected_once() {
    let history = History::default();
    for (epoch, selector) in ["a=1", "a=2", "a=1", "a=3"].into_iter().enumerate() {
        history.in_force(&policy(selector, epoch as u64));
    }
    let now = history.in_force(&policy("a=3", 4));
    assert_eq!(now.epoch, 4);
    assert_eq!(epochs(history.suspects(&now, PODS, 7).unwrap()), [1, 2]);
}

#[test]
fn a_version_newer_than_what_was_read_under_a_policy_clears_it() {
    let history = History::default();
    history.in_force(&policy("a=1", 1));
    let now = history.in_force(&policy("a=2", 2));
    clear(&history, &now, PODS, 10);
    assert_eq!(epochs(history.suspects(&now, PODS, 10).unwrap()), [1]);
    assert!(history.suspects(&now, PODS, 11).unwrap().is_empty());
    assert_eq!(epochs(history.suspects(&now, NODES, 11).unwrap()), [1]);
    // What is known is not asked again.
    assert!(history.unread(&now, PODS).is_empty());
}

#[test]
fn what_is_still_read_under_a_policy_has_no_last_version() {
    let history = History::default();
    let reading = history.in_force(&policy("a=1", 1)).read();
    let now = history.in_force(&policy("a=2", 2));
    assert!(history.unread(&now, PODS).is_empty());
    drop(reading);
    assert_eq!(history.unread(&now, PODS).len(), 1);
}

#[test]
fn a_policy_that_comes_back_is_read_again() {
    let history = History::default();
    history.in_force(&policy("a=1", 1));
    let other = history.in_force(&policy("a=2", 2));
    let unread = history.unread(&other, PODS);
    history.in_force(&policy("a=1", 3));
    let now = history.in_force(&policy("a=2", 4));
    // The answer to what was asked before it came back.
    unread[0].was_read_until(PODS, 10);
    assert_eq!(epochs(history.suspects(&now, PODS, 11).unwrap()), [3]);
}

#[test]
fn an_epoch_alone_changes_nothing() {
    let history = History::default();
    let first = history.in_force(&policy("a=1", 0)).read();
    let all: Vec<_> = (1..100).map(|epoch| history.in_force(&policy("a=1", epoch))).collect();
    let now = all.last().unwrap();
    assert_eq!((now.epoch, first.policy().epoch), (99, 0));
    assert!(history.suspects(now, PODS, 7).unwrap().is_empty());
}

#[test]
fn what_is_forgotten_concerns_the_resources_that_changed_until_a_version_clears_it() {
    let history = History::default();
    let mut now = history.in_force(&of_pods("a=0", 0));
    for epoch in 1..=40 {
        let reading = now.read();
        now = history.in_force(&of_pods(&format!("a={epoch}"), epoch));
        drop(reading);
    }
    assert_eq!(history.suspects(&now, PODS, 7).unwrap_err(), Forgotten);
    for unchanged in [NODES, ("", "secrets"), ("apps", "deployments")] {
        assert!(history.suspects(&now, unchanged, 7).unwrap().is_empty(), "{unchanged:?}");
    }
    clear(&history, &now, PODS, 10);
    assert_eq!(history.suspects(&now, PODS, 10).unwrap_err(), Forgotten);
    assert!(history.suspects(&now, PODS, 11).unwrap().is_empty());
    // A client that follows every change keeps it cleared.
    for epoch in 41..=80 {
        now = history.in_force(&of_pods(&format!("a={epoch}"), epoch));
        clear(&history, &now, PODS, epoch);
        assert!(history.suspects(&now, PODS, epoch + 1).unwrap().is_empty());
    }
}

#[test]
fn what_is_still_read_under_a_forgotten_policy_keeps_all_of_it_uncleared() {
    let history = History::default();
    let reading = history.in_force(&of_pods("a=0", 0)).read();
    let all: Vec<_> = (1..=40).map(|n| history.in_force(&of_pods(&format!("a={n}"), n))).collect();
    let now = all.last().unwrap();
    clear(&history, now, PODS, 10);
    assert_eq!(history.suspects(now, PODS, 11).unwrap_err(), Forgotten);
    drop(reading);
    clear(&history, now, PODS, 12);
    assert!(history.suspects(now, PODS, 13).unwrap().is_empty());
}

#[test]
fn a_forgotten_lock_concerns_what_can_be_a_lock() {
    let history = History::default();
    let lock = |shard: &str| {
        let lock = ctrlmesh_common::policy::Lock {
            namespace: "ops".into(),
            name: "op".into(),
            shard: shard.into(),
        };
        Arc::new(Policy { lock: Some(lock), ..Policy::default() })
    };
    let all: Vec<_> = (0..=40).map(|n| history.in_force(&lock(&format!("s{n}")))).collect();
    let now = all.last().unwrap();
    assert!(history.suspects(now, PODS, 7).unwrap().is_empty());
    let leases = ("coordination.k8s.io", "leases");
    assert_eq!(history.suspects(now, leases, 7).unwrap_err(), Forgotten);
}
