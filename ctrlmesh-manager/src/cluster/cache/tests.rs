use ctrlmesh_common::api::{ManagerStateSpec, ManagerStateStatus};
use futures::FutureExt as _;
use serde_json::json;

use super::*;

fn state(labels: Option<LabelsStatus>) -> ManagerState {
    let mut state = ManagerState::new(MANAGER_STATE, ManagerStateSpec::default());
    state.status = Some(ManagerStateStatus { labels, ..ManagerStateStatus::default() });
    state
}

#[test]
fn the_written_labels_stay_in_force_whatever_happens_to_them() {
    let by = |key: &str| Labelling { hash_key: key.to_owned(), ..Labelling::default() };
    let cache = Cache::new(by("flag"));
    let take = |event| cache.take(event, |state| &mut state.schemes, read_labels);
    let in_force = || cache.scheme().map(|scheme| scheme.in_force.hash_key.clone());
    take(Event::Init);
    assert_eq!(in_force(), None, "no state was listed yet");
    let written = Scheme::settled(by("written")).written();
    take(Event::InitApply(state(Some(written.clone()))));
    assert_eq!(in_force(), None);
    take(Event::InitDone);
    assert_eq!((in_force().as_deref(), cache.is_scheme_written()), (Some("written"), true));
    let mut wrong = written;
    wrong.in_force.hash = "md5".to_owned();
    for event in [Event::Apply(state(Some(wrong))), Event::Apply(state(None)), Event::Delete(state(None))] {
        take(event);
        assert_eq!((in_force().as_deref(), cache.is_scheme_written()), (Some("written"), false));
    }
    assert_eq!(cache.scheme_written().now_or_never(), None);
    take(Event::Apply(state(Some(Scheme::settled(by("later")).written()))));
    assert_eq!(in_force().as_deref(), Some("later"));
    assert_eq!(cache.scheme_written().now_or_never(), Some(()));
}

#[test]
fn a_late_report_of_another_watch_takes_nothing_back() {
    let cache = Cache::new(Labelling::default());
    cache.report_synced(false);
    assert_eq!(cache.synced().now_or_never(), None);
    // Another watch found the cache incomplete before that, and reports only now.
    cache.report_synced(true);
    cache.report_synced(false);
    assert_eq!(cache.synced().now_or_never(), Some(()));
}

#[test]
fn without_written_labels_the_default_is_in_force() {
    let by_flag = Labelling { hash_key: "flag".to_owned(), ..Labelling::default() };
    let cache = Cache::new(by_flag.clone());
    for event in [Event::Init, Event::InitApply(state(None)), Event::InitDone] {
        cache.take(event, |state| &mut state.schemes, read_labels);
    }
    assert_eq!(cache.scheme().as_deref(), Some(&Scheme::settled(by_flag)));
}

#[test]
fn a_snapshot_has_the_obstacles_and_deadlines_of_workloads() {
    let cache = Cache::new(Labelling::default());
    let told = |name: &str, unavailable: i32| {
        let template = json!({"metadata": {"labels": {"ctrlmesh.kusionstack.io/enable-proxy": "true"}}});
        let rolling = json!({"rollingUpdate": {"maxUnavailable": unavailable}});
        let mut spec = json!({"replicas": 4, "selector": {}, "template": template, "strategy": rolling});
        spec["progressDeadlineSeconds"] = json!(600 + unavailable);
        let object = json!({"metadata": {"namespace": "ops", "name": name}, "spec": spec});
        Event::Apply(serde_json::from_value::<Deployment>(object).unwrap())
    };
    let read = |one: Deployment| (full_name(&one.metadata), DeploymentInfo::from(&one));
    cache.take(told("good", 0), |state| &mut state.deployments, read);
    cache.take(told("bad", 2), |state| &mut state.deployments, read);
    let snapshot = cache.snapshot();
    assert_eq!(snapshot.deployment_obstacles.keys().collect::<Vec<_>>(), ["ops/bad"]);
    assert_eq!(snapshot.deployment_accounts.len(), 2);
    assert_eq!(snapshot.progress_deadlines, [("ops/bad".to_owned(), 602), ("ops/good".to_owned(), 600)].into());
    assert!(snapshot.set_obstacles.is_empty());
}

#[test]
fn the_pods_of_a_namespace_are_found_beside_one_that_begins_with_its_name() {
    for (short, long) in [(3, 1), (1, 3)] {
        let cache = Cache::new(Labelling::default());
        let read = |pod: Pod| (full_name(&pod.metadata), Shared::from(Member::from(&pod)));
        for (namespace, count) in [("prod", short), ("prod-eu", long)] {
            for number in 0..count {
                let pod = json!({"metadata": {"namespace": namespace, "name": format!("op-{number}")}});
                cache.take(Event::Apply(serde_json::from_value(pod).unwrap()), |state| &mut state.members, read);
            }
        }
        let found = ["prod", "prod-eu", "pro"].map(|namespace| cache.snapshot().members_in(namespace).len());
        assert_eq!(found, [short, long, 0]);
    }
}
