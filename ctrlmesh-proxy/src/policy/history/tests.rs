use ctrlmesh_common::policy::{Limit, Members};
use ctrlmesh_common::resource::{MemberKey, ResourceKey, ResourceMatch};
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::slots::NamespaceHash;
use tempfile::TempDir;

use super::*;

const PODS: ResourceKey<'_> = of_host("pods");
const NODES: ResourceKey<'_> = of_host("nodes");

const fn of_host(resource: &str) -> ResourceKey<'_> {
    ResourceKey::of_host("", resource)
}

fn limit(resource: &str, selector: &str) -> Limit {
    let resources = ResourceMatch { api_groups: vec![String::new()], resources: vec![resource.to_owned()] };
    Limit { relate_resources: vec![resources], selector: Selector::parse(selector).unwrap(), changed_at: None }
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

fn of(resource: ResourceKey<'_>) -> ReadOf {
    ReadOf::resource(resource)
}

/// Brings a policy into force, under which pods are read.
fn read(history: &History, policy: &Arc<Policy>) -> Arc<InForce> {
    let now = history.in_force(policy);
    now.read(of(PODS)).answered(PODS);
    now
}

/// Asks of all that nobody reads under, and is answered `version`.
fn clear(history: &History, now: &InForce, resource: ResourceKey<'_>, version: u64) {
    for unread in history.unread(now, resource) {
        unread.was_read_until(resource, version);
    }
}

#[test]
fn every_policy_with_other_limits_is_suspected_once() {
    let history = History::default();
    for (epoch, selector) in ["a=1", "a=2", "a=1", "a=3"].into_iter().enumerate() {
        read(&history, &policy(selector, epoch as u64));
    }
    let now = history.in_force(&policy("a=3", 4));
    assert_eq!(now.epoch, 4);
    assert_eq!(epochs(history.suspects(&now, PODS, 7).unwrap()), [1, 2]);
}

#[test]
fn a_version_newer_than_what_was_read_under_a_policy_clears_it() {
    let history = History::default();
    history.in_force(&policy("a=1", 1)).read(of(NODES)).answered(NODES);
    read(&history, &policy("a=1", 1));
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
    let reading = history.in_force(&policy("a=1", 1)).read(of(PODS));
    let now = history.in_force(&policy("a=2", 2));
    assert!(history.unread(&now, PODS).is_empty());
    // The answer comes after the change.
    reading.answered(PODS);
    assert!(history.unread(&now, PODS).is_empty());
    drop(reading);
    assert_eq!(history.unread(&now, PODS).len(), 1);
}

#[test]
fn a_reader_keeps_no_other_resource_uncleared() {
    let history = History::default();
    let stuck = history.in_force(&policy("a=1", 1)).read(of(NODES));
    stuck.answered(NODES);
    read(&history, &policy("a=1", 1));
    let now = history.in_force(&policy("a=2", 2));
    for resource in [PODS, NODES] {
        clear(&history, &now, resource, 10);
    }
    assert!(history.suspects(&now, PODS, 11).unwrap().is_empty());
    assert_eq!(epochs(history.suspects(&now, NODES, 11).unwrap()), [1]);
    drop(stuck);
    clear(&history, &now, NODES, 12);
    assert!(history.suspects(&now, NODES, 13).unwrap().is_empty());
}

#[test]
fn a_reader_under_a_forgotten_policy_keeps_no_other_uncleared() {
    let history = History::default();
    let stuck = history.in_force(&policy("a=0", 0)).read(of(NODES));
    read(&history, &policy("a=0", 0));
    let all: Vec<_> = (1..=40).map(|n| read(&history, &policy(&format!("a={n}"), n))).collect();
    let now = all.last().unwrap();
    // The answer comes after the policy was forgotten.
    stuck.answered(NODES);
    for resource in [PODS, NODES] {
        clear(&history, now, resource, 10);
    }
    assert!(history.suspects(now, PODS, 11).unwrap().is_empty());
    assert_eq!(history.suspects(now, NODES, 11).unwrap_err(), HistoryExceeded);
    drop(stuck);
    assert!(history.suspects(now, PODS, 11).unwrap().is_empty());
    assert_eq!(history.suspects(now, NODES, 11).unwrap_err(), HistoryExceeded);
    clear(&history, now, NODES, 12);
    assert!(history.suspects(now, NODES, 13).unwrap().is_empty());
}

#[test]
fn a_policy_that_comes_back_is_read_again() {
    let history = History::default();
    read(&history, &policy("a=1", 1));
    let other = read(&history, &policy("a=2", 2));
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
    let first = history.in_force(&policy("a=1", 0)).read(of(PODS));
    let all: Vec<_> = (1..100).map(|epoch| history.in_force(&policy("a=1", epoch))).collect();
    let now = all.last().unwrap();
    assert_eq!((now.epoch, first.policy().epoch), (99, 0));
    assert!(history.suspects(now, PODS, 7).unwrap().is_empty());
}

#[test]
fn a_forgotten_policy_concerns_the_resources_that_changed() {
    let history = History::default();
    let mut now = history.in_force(&of_pods("a=0", 0));
    for epoch in 1..=40 {
        let reading = now.read(of(PODS));
        now = history.in_force(&of_pods(&format!("a={epoch}"), epoch));
        reading.answered(PODS);
        drop(reading);
    }
    assert_eq!(history.suspects(&now, PODS, 7).unwrap_err(), HistoryExceeded);
    for unchanged in [NODES, of_host("secrets"), ResourceKey::of_host("apps", "deployments")] {
        assert!(history.suspects(&now, unchanged, 7).unwrap().is_empty(), "{unchanged:?}");
    }
    clear(&history, &now, PODS, 10);
    assert_eq!(history.suspects(&now, PODS, 10).unwrap_err(), HistoryExceeded);
    assert!(history.suspects(&now, PODS, 11).unwrap().is_empty());
    // A client that follows every change keeps it cleared.
    for epoch in 41..=80 {
        now.read(of(PODS)).answered(PODS);
        now = history.in_force(&of_pods(&format!("a={epoch}"), epoch));
        clear(&history, &now, PODS, epoch);
        assert!(history.suspects(&now, PODS, epoch + 1).unwrap().is_empty());
    }
}

#[test]
fn readers_under_a_forgotten_policy_keep_all_uncleared() {
    let history = History::default();
    let reading = history.in_force(&of_pods("a=0", 0)).read(of(PODS));
    let all: Vec<_> = (1..=40).map(|n| read(&history, &of_pods(&format!("a={n}"), n))).collect();
    let now = all.last().unwrap();
    clear(&history, now, PODS, 10);
    assert_eq!(history.suspects(now, PODS, 11).unwrap_err(), HistoryExceeded);
    reading.answered(PODS);
    drop(reading);
    assert_eq!(history.suspects(now, PODS, 11).unwrap_err(), HistoryExceeded);
    clear(&history, now, PODS, 12);
    assert!(history.suspects(now, PODS, 13).unwrap().is_empty());
}

#[test]
fn a_forgotten_lock_concerns_what_can_be_a_lock() {
    let history = History::default();
    let lock = |shard: &str| {
        let lock = ctrlmesh_common::policy::Lock { namespace: "ops".into(), name: "op".into(), shard: shard.into() };
        Arc::new(Policy { lock: Some(lock), ..Policy::default() })
    };
    let leases = ResourceKey::of_host("coordination.k8s.io", "leases");
    let all: Vec<_> = (0..=40).map(|n| read(&history, &lock(&format!("s{n}")))).collect();
    for policy in &all {
        policy.reads.answered(leases);
    }
    let now = all.last().unwrap();
    assert!(history.suspects(now, PODS, 7).unwrap().is_empty());
    assert_eq!(history.suspects(now, leases, 7).unwrap_err(), HistoryExceeded);
}

#[test]
fn a_policy_under_which_nobody_was_answered_is_not_remembered() {
    let history = History::default();
    history.in_force(&policy("a=1", 1));
    // It was asked for, and refused.
    drop(history.in_force(&policy("a=2", 2)).read(of(PODS)));
    let asking = history.in_force(&policy("a=3", 3)).read(of(NODES));
    let now = read(&history, &policy("a=4", 4));
    assert!(history.suspects(&now, PODS, 7).unwrap().is_empty());
    asking.answered(NODES);
    drop(asking);
    assert!(history.suspects(&now, PODS, 7).unwrap().is_empty());
    assert_eq!(epochs(history.suspects(&now, NODES, 7).unwrap()), [3]);
    assert_eq!(history.remembered().policies.len(), 2);
}

/// The history of a pod in the next process.
fn again(folder: &TempDir, uid: &str) -> Arc<History> {
    History::load(HistoryFile::of(folder.path(), Some(&"ns/op-0".parse().unwrap()), uid))
}

#[test]
fn a_pod_that_nobody_served_before_has_read_nothing() {
    let folder = TempDir::new().unwrap();
    let history = again(&folder, "u");
    history.in_force(&policy("a=1", 1));
    let now = history.in_force(&policy("a=2", 2));
    assert!(history.suspects(&now, PODS, 7).unwrap().is_empty());
}

#[test]
fn what_was_in_force_before_the_process_began_is_suspected() {
    let folder = TempDir::new().unwrap();
    let history = again(&folder, "u");
    read(&history, &policy("a=1", 1));
    read(&history, &policy("a=2", 2));
    drop(history);
    // The same is in force after the start, and then another.
    let history = again(&folder, "u");
    let now = history.in_force(&policy("a=2", 2));
    assert_eq!(epochs(history.suspects(&now, PODS, 7).unwrap()), [1]);
    let now = history.in_force(&policy("a=3", 3));
    assert_eq!(epochs(history.suspects(&now, NODES, 7).unwrap()), [1, 2]);
    // Another is in force at the start.
    let history = again(&folder, "u");
    let now = history.in_force(&policy("a=4", 4));
    assert_eq!(epochs(history.suspects(&now, PODS, 7).unwrap()), [1, 2, 3]);
    // It is another pod of the same name.
    let history = again(&folder, "other");
    let now = history.in_force(&policy("a=5", 5));
    assert!(history.suspects(&now, PODS, 7).unwrap().is_empty());
}

#[test]
fn the_next_process_knows_the_versions() {
    let folder = TempDir::new().unwrap();
    let history = again(&folder, "u");
    let mut now = read(&history, &of_pods("a=0", 0));
    for epoch in 1..=40 {
        now = read(&history, &of_pods(&format!("a={epoch}"), epoch));
    }
    history.was_read_until(&history.unread(&now, PODS), PODS, 10);
    let history = again(&folder, "u");
    let now = history.in_force(&now.policy);
    assert_eq!(history.suspects(&now, PODS, 10).unwrap_err(), HistoryExceeded);
    assert!(history.suspects(&now, PODS, 11).unwrap().is_empty());
    assert!(history.suspects(&now, NODES, 1).unwrap().is_empty());
}

#[test]
fn the_next_process_knows_versions_of_resources_without_readers() {
    let folder = TempDir::new().unwrap();
    let history = again(&folder, "u");
    let stuck = history.in_force(&policy("a=1", 1)).read(of(NODES));
    stuck.answered(NODES);
    read(&history, &policy("a=1", 1));
    let now = history.in_force(&policy("a=2", 2));
    history.was_read_until(&history.unread(&now, PODS), PODS, 10);
    let history = again(&folder, "u");
    let now = history.in_force(&policy("a=2", 2));
    assert!(history.suspects(&now, PODS, 11).unwrap().is_empty());
    assert_eq!(epochs(history.suspects(&now, NODES, 11).unwrap()), [1]);
}

#[test]
fn an_unreadable_history_concerns_everything() {
    let folder = TempDir::new().unwrap();
    read(&again(&folder, "u"), &policy("a=1", 1));
    let file = folder.path().join("histories/ns_op-0");
    let whole = std::fs::read(&file).unwrap();
    for at in [0, 5, whole.len() - 1] {
        std::fs::write(&file, &whole[..at]).unwrap();
        let history = again(&folder, "u");
        let now = history.in_force(&policy("a=1", 1));
        for resource in [PODS, NODES] {
            assert_eq!(history.suspects(&now, resource, 7).unwrap_err(), HistoryExceeded, "{at}");
        }
        clear(&history, &now, PODS, 10);
        assert!(history.suspects(&now, PODS, 11).unwrap().is_empty());
        assert_eq!(history.suspects(&now, NODES, 11).unwrap_err(), HistoryExceeded);
    }
}

#[test]
fn a_released_pod_may_have_read_everything() {
    let folder = TempDir::new().unwrap();
    let history = again(&folder, "u");
    history.in_force(&policy("a=1", 1));
    history.record_release();
    let history = again(&folder, "u");
    let now = history.in_force(&policy("a=1", 1));
    let suspects = history.suspects(&now, PODS, 7).unwrap();
    assert!(suspects.iter().all(|past| past.passes_everything()) && suspects.len() == 1);
}

#[test]
fn concurrent_writers_leave_whole_files_of_each_pod() {
    let folder = TempDir::new().unwrap();
    let writes = |pod: &str| {
        let kept = HistoryFile::of(folder.path(), Some(&format!("ns/{pod}").parse().unwrap()), pod);
        let policy = Policy { limits: vec![limit("pods", "a=1"); 100], ..Policy::default() };
        for _ in 0..200 {
            let policies = vec![StoredPolicy { policy: policy.clone(), until: Vec::new() }];
            kept.write(policies, None);
            let read = kept.read().expect("it is whole").expect("it is this pod's");
            assert_eq!(read.policies.len(), 1);
        }
    };
    std::thread::scope(|scope| {
        // Names that end as a file's extension would, and each pod in two processes of a node.
        for pod in ["a.b-0", "a.b-1", "a.b-0", "a.b-1"] {
            scope.spawn(move || writes(pod));
        }
    });
    assert_eq!(std::fs::read_dir(folder.path().join("histories")).unwrap().count(), 2);
}

#[test]
fn what_was_read_of_a_member_is_known_of_that_member_only() {
    let history = History::default();
    let seeing = |names: &[&str], epoch: u64| {
        let slot = |name: &&str| NamespaceHash::default().slot(name);
        let paths = vec!["/clusters/{cluster}".parse().unwrap()];
        let sees = Some(names.iter().map(slot).collect());
        let members = Some(Members { paths, sees, ..Members::default() });
        Arc::new(Policy { epoch, members, ..Policy::default() })
    };
    let pods_at = |path, name| ResourceKey { member: Some(MemberKey { path, name }), ..PODS };
    let pods_of = |name| pods_at("/clusters", name);
    let first = history.in_force(&seeing(&["m-1"], 1));
    for of in [PODS, pods_of("m-1"), pods_of("m-3")] {
        first.read(ReadOf::resource(of)).answered(of);
    }
    let now = history.in_force(&seeing(&["m-2"], 2));
    assert_eq!(epochs(history.suspects(&now, pods_of("m-1"), 7).unwrap()), [1]);
    // Of the host nothing changed, of another's nothing was seen, and of the third one nothing was read.
    for of in [PODS, pods_of("m-3"), pods_of("m-2")] {
        assert!(history.suspects(&now, of, 7).unwrap().is_empty(), "{of:?}");
    }
    clear(&history, &now, pods_of("m-1"), 10);
    assert!(history.suspects(&now, pods_of("m-1"), 11).unwrap().is_empty());
    assert_eq!(epochs(history.suspects(&now, pods_of("m-1"), 10).unwrap()), [1]);
    // Another one of the same name was not read.
    assert!(history.suspects(&now, pods_at("/workspaces", "m-1"), 7).unwrap().is_empty());
}
