//! Checks that managers run, that one of them leads, and by which labels they go.

use ctrlmesh_common::api::ManagerState;
use ctrlmesh_common::names::MANAGER_STATE;
use ctrlmesh_manager::install::rbac;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::super::finding::{Finding, Group};
use super::super::pages;
use super::super::pods::{is_ready, why_not_ready};
use super::super::snapshot::{Installed, Snapshot};
use crate::text::{duration, line};

/// How long the lease of the leader may be overdue: clocks differ.
const OVERDUE_SECONDS: i64 = 5;

pub(super) fn check(snapshot: &Snapshot, installed: &Installed) -> Vec<Finding> {
    let group = Group::Installation;
    let pods = installed.managers.as_deref().unwrap_or_default();
    let now = snapshot.server.date.unwrap_or(snapshot.server.answered);
    let mut findings =
        group.of("managers", &installed.deployment, |deployment| vec![replicas(deployment.as_ref(), pods)]);
    findings.extend(group.of("leader", &installed.lease, |lease| vec![leader(lease.as_ref(), installed, now)]));
    findings.extend(group.of("labels", &installed.manager_state, |state| vec![labels(state.as_ref())]));
    findings
}

fn replicas(deployment: Option<&Deployment>, pods: &[Pod]) -> Finding {
    let (group, namespace) = (Group::Installation, rbac::NAMESPACE);
    let Some(deployment) = deployment else {
        let advice = format!("install ctrlmesh, `kubectl apply -k deploy/`: {}", pages::INSTALL);
        return group.failed("managers", format!("there is no Deployment ctrlmesh-manager in {namespace}"), advice);
    };
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let available = deployment.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0);
    let mut found = format!("{available} of {wanted} available");
    if available >= wanted && wanted > 0 {
        return group.ok("managers", found);
    }
    if let Some(pod) = pods.iter().find(|pod| !is_ready(pod)) {
        found = format!("{found}; pod {} is not ready: {}", pod.name_any(), why_not_ready(pod));
    }
    let advice = format!("look at their pods: `kubectl -n {namespace} describe pods`: {}", pages::TROUBLESHOOTING);
    if available == 0 { group.failed("managers", found, advice) } else { group.warning("managers", found, advice) }
}

/// `now` is by the API server's clock.
fn leader(lease: Option<&Lease>, installed: &Installed, now: Timestamp) -> Finding {
    let group = Group::Installation;
    let logs = format!("look at the managers' logs: `kubectl -n {} logs deployment/ctrlmesh-manager`", rbac::NAMESPACE);
    let spec = lease.and_then(|lease| lease.spec.as_ref());
    let Some(holder) = spec.and_then(|spec| spec.holder_identity.as_deref()).filter(|holder| !holder.is_empty()) else {
        return group.failed("leader", "no manager holds the Lease, so nothing is written", logs);
    };
    let name = replica(holder);
    let renewed = spec.and_then(|spec| spec.renew_time.as_ref()).map(|time| time.0);
    let lasts = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or_default();
    let age = renewed.map_or(i64::MAX, |renewed| now.duration_since(renewed).as_secs());
    if age > i64::from(lasts) + OVERDUE_SECONDS {
        let age = renewed.map_or_else(|| "never".to_owned(), |_| format!("{} ago", duration(age.unsigned_abs())));
        return group.failed("leader", format!("{name} led, and renewed its Lease last {age}"), logs);
    }
    let state = installed.manager_state.as_ref().ok().and_then(|state| state.as_ref()?.status.as_ref());
    let leaders: Vec<&str> = state
        .iter()
        .flat_map(|status| &status.endpoints)
        .filter(|one| one.leader)
        .map(|one| one.name.as_str())
        .collect();
    if leaders.len() > 1 || leaders.first().is_some_and(|leader| *leader != name) {
        let found = format!("{name} holds the Lease, and ManagerState {MANAGER_STATE} names {}", leaders.join(", "));
        let advice = format!("check again in a minute, as another may just have taken over; then {logs}");
        return group.warning("leader", found, advice);
    }
    group.ok("leader", format!("{name} leads"))
}

/// The pod of a holder: a random number follows its name.
fn replica(holder: &str) -> &str {
    holder.rsplit_once('_').map_or(holder, |(name, _)| name)
}

fn labels(state: Option<&ManagerState>) -> Finding {
    let group = Group::Installation;
    let Some(status) = state.and_then(|state| state.status.as_ref()) else {
        let found = format!("ManagerState {MANAGER_STATE} has no status: no manager has written it yet");
        return group.warning("labels", found, "check again in a minute; a manager that leads writes it");
    };
    match status.conditions.iter().find(|one| one.type_ == "Relabelled" && one.status != "True") {
        Some(one) => {
            let advice = format!("wait until ManagerState {MANAGER_STATE} is Relabelled: {}", pages::CHANGE_LABELS);
            group.warning("labels", format!("{}: {}", one.reason, line(&one.message)), advice)
        }
        None => group.ok("labels", "objects have the labels that the managers go by"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::finding::State;
    use super::super::super::snapshot::samples;
    use super::*;
    use crate::cluster::answer::Unanswered;

    fn states(installed: &Installed) -> Vec<State> {
        check(&samples::snapshot(), installed).iter().map(|one| one.state).collect()
    }

    #[test]
    fn managers_with_one_leader_are_good() {
        let findings = check(&samples::snapshot(), &samples::installed());
        assert!(findings.iter().all(|one| one.state == State::Ok), "{findings:?}");
        assert_eq!(findings[1].message, "manager-a leads");
    }

    #[test]
    fn without_managers_nothing_is_led() {
        let mut installed = samples::installed();
        (installed.deployment, installed.lease, installed.manager_state) = (Ok(None), Ok(None), Ok(None));
        assert_eq!(states(&installed), [State::Failed, State::Failed, State::Warning]);
    }

    #[test]
    fn a_replica_that_is_not_available_says_why() {
        let mut installed = samples::installed();
        let pod = json!({"metadata": {"name": "manager-b"}, "status": {"conditions": [
            {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}]}});
        installed.managers = Ok(vec![serde_json::from_value(pod).unwrap()]);
        let status = installed.deployment.as_mut().unwrap().as_mut().unwrap().status.as_mut().unwrap();
        status.available_replicas = Some(1);
        let finding = check(&samples::snapshot(), &installed).remove(0);
        let expected = "1 of 2 available; pod manager-b is not ready: 0/1 nodes are available";
        assert_eq!((finding.state, finding.message.as_str()), (State::Warning, expected));
    }

    #[test]
    fn a_lease_that_is_overdue_or_of_another_leader_is_seen() {
        let mut installed = samples::installed();
        let lease = installed.lease.as_mut().unwrap().as_mut().unwrap().spec.as_mut().unwrap();
        lease.holder_identity = Some("manager-b_00ff".to_owned());
        assert_eq!(states(&installed)[1], State::Warning);
        let lease = installed.lease.as_mut().unwrap().as_mut().unwrap().spec.as_mut().unwrap();
        lease.renew_time.as_mut().unwrap().0 = samples::now() - jiff::SignedDuration::from_secs(60);
        let finding = check(&samples::snapshot(), &installed).remove(1);
        let expected = "manager-b led, and renewed its Lease last 1m ago";
        assert_eq!((finding.state, finding.message.as_str()), (State::Failed, expected));
    }

    #[test]
    fn a_change_of_labels_is_warned_of_and_a_missing_right_skips() {
        let mut installed = samples::installed();
        let status = installed.manager_state.as_mut().unwrap().as_mut().unwrap().status.as_mut().unwrap();
        let condition = json!({"type": "Relabelled", "status": "False", "reason": "Labelling", "message": "5 left",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        status.conditions = vec![serde_json::from_value(condition).unwrap()];
        installed.lease = Err(Unanswered::Forbidden { right: "get leases".to_owned() });
        assert_eq!(states(&installed), [State::Ok, State::Skipped, State::Warning]);
    }
}
