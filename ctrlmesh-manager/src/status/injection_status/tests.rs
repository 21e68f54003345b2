use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use jiff::Timestamp;

use super::*;
use crate::cluster::cache::Snapshot;
use crate::cluster::plan;
use crate::labels::ObjectCounts;
use crate::push::policy_store::Receipt;
use crate::rules::compile::PoliciesByPod;
use crate::rules::pod::PodName;

const POD: &str = "---
apiVersion: v1
kind: Pod
metadata: {name: a-0, namespace: ops, uid: u, annotations: {ctrlmesh.kusionstack.io/injected: 'true'}, labels: {app: a, ctrlmesh.kusionstack.io/enable-proxy: 'true'}}
spec: {containers: []}
status: {podIP: 10.0.0.7}
";

fn injection(spec: &str) -> String {
    format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: FaultInjection\nmetadata: {{name: storm, namespace: ops, generation: 2}}\nspec: {{selector: {{matchLabels: {{app: a}}}}, {spec}}}\n"
    )
}

/// The status, where the pods' proxies acknowledged their policies or refuse them.
fn status(text: &str, pods: &str, refused: Option<&str>) -> FaultInjectionStatus {
    let plan = plan::of(Snapshot::of_manifests(&format!("{text}{pods}")), &PoliciesByPod::new());
    let name = PodName { namespace: "ops".to_owned(), name: "a-0".to_owned() };
    let receipt = plan.sendable().get(&name).map(|policy| Receipt {
        uid: "u".to_owned(),
        node: None,
        by: Arc::from("proxy"),
        epoch: 1,
        digest: policy.digest(),
        refused: refused.map(str::to_owned),
        connected: true,
        lost: false,
        last_contact: SystemTime::UNIX_EPOCH,
        guards: Arc::default(),
        webhook: None,
    });
    let receipts = BTreeMap::from_iter(receipt.map(|receipt| (name, receipt)));
    let object: FaultInjection = serde_saphyr::from_str(text).unwrap();
    let read = Injection::from(&object);
    let cached = CachedInjection { object: Arc::new(object), read };
    let (objects, now) = (ObjectCounts::default(), Timestamp::UNIX_EPOCH);
    let observed = Observed { plan: &plan, receipts: &receipts, objects: &objects, new_leader: false, now };
    FaultInjection::compute(&cached, observed)
}

fn reasons(status: &FaultInjectionStatus) -> Vec<&str> {
    status.conditions.iter().map(|one| one.reason.as_str()).collect()
}

#[test]
fn conditions_say_whether_every_proxy_does_the_faults() {
    let storm = injection("httpFault: [{abort: {httpStatus: 500}}]");
    let programmed = status(&storm, POD, None);
    assert_eq!(reasons(&programmed), ["Valid", "Acknowledged"]);
    assert_eq!(programmed.observed_generation, Some(2));
    assert_eq!(programmed.target_status[0].config_hash, programmed.current_spec_hash);
    assert_eq!(reasons(&status(&storm, "", None)), ["Valid", "NoPods"]);
    let refused = status(&storm, POD, Some("faults: unknown field"));
    assert_eq!(reasons(&refused), ["Valid", "PolicyRefused"]);
    assert!(refused.conditions[1].message.contains("pod a-0"), "{refused:?}");
    assert!(refused.target_status[0].message.as_deref().unwrap().contains("unknown field"));
}

#[test]
fn faults_of_other_servers_say_where_they_do_not_hold_as_written() {
    let with =
        |http: &str| format!("httpFault: [{{name: a, abort: {{httpStatus: 503}}, match: {{httpMatch: [{http}]}}}}]");
    let elsewhere = |http: &str| injection(&with(http));
    let inside = POD.replace("containers: []", "containers: [], initContainers: [{name: ctrlmesh-proxy}]");
    let hosts = elsewhere("{host: {exact: a}, ports: [443]}");
    assert_eq!(reasons(&status(&hosts, POD, None)), ["Valid", "Acknowledged"]);
    let outside = status(&hosts, &inside, None);
    assert_eq!(reasons(&outside), ["Valid", "NotIntercepted"]);
    let message = &outside.conditions[1].message;
    assert!(
        message.starts_with("faults of requests to other servers hold in pod a-0 for a forward proxy only: "),
        "{message}"
    );
    let paths = status(&elsewhere("{path: {exact: /a}, ports: [443]}"), POD, None);
    assert_eq!(reasons(&paths), ["Valid", "Acknowledged", "MatchedByHost"]);
    assert_eq!(paths.conditions[2].type_, "PathNotVisible");
    let of_api = elsewhere("{path: {exact: /a}}");
    assert_eq!(reasons(&status(&of_api, &inside, None)), ["Valid", "Acknowledged"]);
}

#[test]
fn what_is_off_or_invalid_says_so() {
    let off = injection("disabled: true, httpFault: [{abort: {httpStatus: 500}}]");
    assert_eq!(reasons(&status(&off, POD, None)), ["Disabled", "Disabled"]);
    let invalid = injection("httpFault: [{delay: {fixedDelay: soon}}]");
    let invalid = status(&invalid, POD, None);
    assert_eq!(reasons(&invalid), ["Invalid", "Invalid"]);
    assert!(invalid.conditions[0].message.contains("spec.httpFault[0].delay.fixedDelay"), "{invalid:?}");
}
