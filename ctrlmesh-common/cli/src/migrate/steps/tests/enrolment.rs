//! Which workloads are enrolled, and how.

use super::*;

#[test]
fn enrolling_takes_the_template_and_leaves_it_reversible() {
    let mut snapshot = snapshot();
    let (iptables, sync) = ("ctrlmesh.kusionstack.io/enable-iptables", "ctrlmesh.kusionstack.io/env-sync");
    snapshot.workloads = vec![workload(json!({label::ENABLE_PROXY: "true", iptables: "true"}), json!({sync: "A=1"}))];
    let planned = plan(Step::Enrol, &snapshot);
    let metadata = |change: &Change| match &change.action {
        Action::Merge(patch) => patch["spec"]["template"]["metadata"].clone(),
        other => panic!("{other:?}"),
    };
    let taken = metadata(&planned.changes[0].change);
    assert_eq!(taken["labels"], json!({label::ENABLE_PROXY: "true", iptables: null}));
    assert_eq!(taken["annotations"][sync], Value::Null);
    let left = metadata(planned.changes[0].inverse.as_ref().unwrap());
    assert_eq!(left["labels"], json!({label::ENABLE_PROXY: null}), "without a proxy, until the predecessor is back");
    let restored = metadata(&planned.undone_last[0]);
    assert_eq!(restored["labels"], json!({label::ENABLE_PROXY: "true", iptables: "true"}));
    assert_eq!(restored["annotations"][sync], "A=1");
}

#[test]
fn a_workload_whose_enrolment_was_undone_is_enrolled_again() {
    let mut snapshot = snapshot();
    let all = plan(Step::Enrol, &snapshot);
    let Some(Change { action: Action::Merge(left), .. }) = &all.changes[0].inverse else { panic!("{all:?}") };
    let template = &left["spec"]["template"]["metadata"];
    let label = template["labels"].get(label::ENABLE_PROXY).filter(|value| !value.is_null());
    assert_eq!(label, None, "pods come without a proxy");
    snapshot.workloads = vec![workload(json!({}), template["annotations"].clone())];
    let again = plan(Step::Enrol, &snapshot);
    assert_eq!(again.changes[0].change, all.changes[0].change);
    let waited_for: Vec<String> =
        crate::migrate::wait::enrolled(&snapshot).into_iter().map(|one| one.workload.name).collect();
    assert_eq!(waited_for, ["op"]);
}

#[test]
fn a_workload_without_the_label_stays_as_it_is() {
    let mut snapshot = snapshot();
    snapshot.workloads = vec![workload(json!({"app": "op"}), json!({}))];
    let planned = plan(Step::Enrol, &snapshot);
    assert!(planned.changes.is_empty() && planned.notes[0].contains("stays as it is"), "{planned:?}");
}

#[test]
fn an_operator_of_members_is_not_enrolled_before_its_root_names_them() {
    let mut snapshot = snapshot();
    let variable = json!({"name": "Mesh-Pre-Url-Added", "value": "/apis/*/v1/clusterextensions/*/proxy"});
    snapshot.workloads[0].data["spec"]["template"]["spec"] = json!({"containers": [{"name": "op", "env": [variable]}]});
    let planned = plan(Step::Enrol, &snapshot);
    let said = r#"Say `clusters: [{path: "/apis/*/v1/clusterextensions/{cluster}/proxy"}]`"#;
    assert!(planned.changes.is_empty() && planned.problems[0].contains(said), "{planned:?}");
    let named = crate::migrate::leftovers::leftovers(&snapshot);
    assert!(named.iter().any(|one| one.what == "Mesh-Pre-Url-Added" && one.of == ["StatefulSet ops/op"]), "{named:?}");
    let paths = json!([{"path": "/apis/*/v1/clusterextensions/{cluster}/proxy"}]);
    snapshot.rules[0].data["spec"]["root"]["clusters"] = paths;
    assert_eq!(plan(Step::Enrol, &snapshot).problems.len(), 1, "members that are not divided");
    snapshot.rules[0].data["spec"]["root"]["unit"] = json!("Cluster");
    let planned = plan(Step::Enrol, &snapshot);
    assert!(planned.problems.is_empty() && planned.changes.len() == 1, "{planned:?}");
}

#[test]
fn a_partition_is_named_and_its_pods_are_not_waited_for() {
    let mut snapshot = snapshot();
    let is_whole = |snapshot: &Snapshot| crate::migrate::wait::enrolled(snapshot)[0].is_whole;
    assert!(is_whole(&snapshot) && plan(Step::Enrol, &snapshot).notes.is_empty());
    let spec = &mut snapshot.workloads[0].data["spec"];
    (spec["replicas"], spec["updateStrategy"]) = (json!(3), json!({"rollingUpdate": {"partition": 2}}));
    let planned = plan(Step::Enrol, &snapshot);
    assert!(planned.notes[0].contains("keeps 2 of its pods") && planned.changes.len() == 1, "{planned:?}");
    assert!(!is_whole(&snapshot));
}
