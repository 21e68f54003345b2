use super::*;

fn member(name: &str, owner: Option<(&str, &str)>, labels: &[(&str, &str)]) -> Member {
    Member {
        name: PodName { namespace: "ns".to_owned(), name: name.to_owned() },
        labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        owner: owner.map(|(kind, name)| Owner { kind: kind.to_owned(), name: name.to_owned() }),
        ..Member::default()
    }
}

#[test]
fn the_ordinal_is_that_of_the_named_statefulset_only() {
    let op = |name| member(name, Some((STATEFUL_SET, "op")), &[]);
    assert_eq!(op("op-0").ordinal_in("op"), Some(0));
    assert_eq!(op("op-12").ordinal_in("op"), Some(12));
    for other in ["op", "op-", "op-01", "op-a", "op-1-2", "opx-1", "op--1", "op-+1"] {
        assert_eq!(op(other).ordinal_in("op"), None, "{other}");
    }
    assert_eq!(op("op-1-2").ordinal_in("op-1"), None, "of another StatefulSet");
    assert_eq!(member("op-3", None, &[]).ordinal_in("op"), None, "of nobody");
    let label = [(label::STATEFULSET_POD_NAME, "op-3")];
    assert_eq!(member("op-3", None, &label).ordinal_in("op"), Some(3), "as it says itself");
    let set = Some((REPLICA_SET, "op"));
    assert_eq!(member("op-3", set, &label).ordinal_in("op"), None, "whoever made it decides");
}

#[test]
fn the_revision_is_that_of_the_named_deployment_only() {
    let hash = [(label::POD_TEMPLATE_HASH, "5c9")];
    let pod = member("op-5c9-x", Some((REPLICA_SET, "op-5c9")), &hash);
    assert_eq!(pod.revision_in("op"), Some("5c9"));
    assert_eq!(pod.revision_in("op-5c9"), None);
    assert_eq!(member("op-5c9-x", None, &hash).revision_in("op"), None);
}

#[test]
fn a_pod_labelled_after_admission_is_not_enrolled() {
    let volume = |map: &str| {
        let sources = serde_json::json!([{"configMap": {"name": map, "items": [{"key": "ca.crt", "path": "ca.crt"}]}}]);
        serde_json::json!([{"name": "kube-api-access-x", "projected": {"sources": sources}}])
    };
    let read = |uid: Option<&str>, injected: bool, volumes: serde_json::Value| {
        let annotations = injected.then(|| serde_json::json!({annotation::INJECTED: "true"}));
        let pod = serde_json::json!({
            "metadata": {"name": "p", "namespace": "ops", "uid": uid, "labels": {label::ENABLE_PROXY: "true"}, "annotations": annotations},
            "spec": {"containers": [], "volumes": volumes},
        });
        serde_json::from_value::<v1::Pod>(pod).unwrap()
    };
    let is = |pod: &v1::Pod| Member::from(pod).enrolled();
    let none = serde_json::Value::Null;
    assert!(!is(&read(Some("u"), false, volume(root_ca::CLUSTER))), "labelled afterwards");
    assert!(!is(&read(Some("u"), false, none.clone())), "labelled afterwards, without a token");
    assert!(!is(&read(Some("u"), true, volume(root_ca::CLUSTER))), "annotated afterwards, too");
    assert!(is(&read(Some("u"), true, volume(root_ca::MESH))), "admitted");
    assert!(is(&read(Some("u"), false, volume(root_ca::MESH))), "somebody took the annotation");
    assert!(is(&read(Some("u"), true, none.clone())), "admitted, without a token");
    assert!(is(&read(None, false, volume(root_ca::CLUSTER))), "will be admitted");
    let mut host = read(Some("u"), true, none.clone());
    host.spec.as_mut().unwrap().host_network = Some(true);
    assert!(!is(&host), "its node's network");
    let mut system = read(Some("u"), true, none);
    system.metadata.namespace = Some(KUBE_SYSTEM.to_owned());
    assert!(!is(&system));
}

#[test]
fn the_redirection_follows_from_the_injected_proxy() {
    let read = |containers: &str| {
        let pod = format!(
            r#"{{"metadata": {{"name": "p", "annotations": {{"{}": "env"}}}}, "spec": {{"containers": [], "initContainers": [{containers}]}}}}"#,
            annotation::INTERCEPTION
        );
        Member::from(&serde_json::from_str::<v1::Pod>(&pod).unwrap()).redirect
    };
    assert_eq!(read(""), Redirect::Node, "an annotation alone puts no proxy into a pod");
    assert_eq!(read(r#"{"name": "ctrlmesh-proxy", "args": ["sidecar"]}"#), Redirect::Nowhere);
    let redirected = r#"{"name": "ctrlmesh-proxy", "args": ["sidecar", "--redirected=15001"]}"#;
    assert_eq!(read(redirected), Redirect::Sidecar);
}

#[test]
fn deletion_was_requested_a_grace_period_before_its_deadline() {
    let text = serde_json::json!({
        "metadata": {"name": "p", "creationTimestamp": "2026-01-01T00:00:10Z",
            "deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 30},
        "status": {"phase": "Running"},
    });
    let pod = Member::from(&serde_json::from_value::<v1::Pod>(text).unwrap());
    assert_eq!(pod.deleted_at.unwrap() - pod.created_at.unwrap(), 20);
    assert!(pod.terminating && !pod.ended);
    let failed = serde_json::json!({"metadata": {"name": "p"}, "status": {"phase": "Failed"}});
    let failed = Member::from(&serde_json::from_value::<v1::Pod>(failed).unwrap());
    assert!(failed.terminating && failed.ended && failed.deleted_at.is_none());
}

#[test]
fn the_proxys_container_is_known_once_it_was_started() {
    let read = |statuses: &str| {
        let pod = format!(r#"{{"metadata": {{}}, "status": {{"initContainerStatuses": [{statuses}]}}}}"#);
        Member::from(&serde_json::from_str::<v1::Pod>(&pod).unwrap()).container
    };
    let other = r#"{"name": "migrate", "containerID": "containerd://a", "image": "", "imageID": "", "ready": true, "restartCount": 0}"#;
    let waiting = other.replace("migrate", "ctrlmesh-proxy").replace("containerd://a", "");
    let started = waiting.replace(r#""containerID": """#, r#""containerID": "containerd://b""#);
    assert_eq!(read(other), None);
    assert_eq!(read(&waiting), None);
    assert_eq!(read(&format!("{other}, {started}")).as_deref(), Some("b"));
}

#[test]
fn a_pod_asks_for_a_forward_proxy_whenever_it_likes() {
    let read = |annotations: serde_json::Value| {
        let meta = serde_json::json!({"name": "p", "namespace": "ops", "uid": "u", "annotations": annotations});
        let pod = serde_json::json!({"metadata": meta, "spec": {"containers": []}});
        Member::from(&serde_json::from_value::<v1::Pod>(pod).unwrap()).forward_proxy
    };
    assert!(read(serde_json::json!({annotation::FORWARD_PROXY: "true"})));
    for other in [serde_json::json!({annotation::FORWARD_PROXY: "yes"}), serde_json::json!({})] {
        assert!(!read(other));
    }
}

#[test]
fn whether_a_pod_fails_open_follows_from_what_was_injected() {
    let read = |uid: Option<&str>, requested: bool, spec: serde_json::Value| {
        let annotations = requested.then(|| serde_json::json!({annotation::FAIL_OPEN: "true"}));
        let pod = serde_json::json!({
            "metadata": {"name": "p", "namespace": "ops", "uid": uid, "annotations": annotations}, "spec": spec,
        });
        Member::from(&serde_json::from_value::<v1::Pod>(pod).unwrap()).fail_open
    };
    let volume = |name: &str, key: &str| {
        let map = serde_json::json!({"name": root_ca::MESH, "items": [{"key": key, "path": "ca.crt"}]});
        let projected = serde_json::json!({"sources": [{"configMap": map}]});
        [
            serde_json::json!({"containers": [], "volumes": [{"name": name, "projected": projected}]}),
            serde_json::json!({"containers": [], "volumes": [{"name": name, "configMap": map}]}),
        ]
    };
    for closed in volume("kube-api-access-x", root_ca::KEY) {
        assert!(!read(Some("u"), true, closed), "annotated afterwards");
    }
    for open in volume("kube-api-access-x", root_ca::FAIL_OPEN_KEY) {
        assert!(read(Some("u"), false, open), "somebody took the annotation");
    }
    for proxys in volume(sidecar::VOLUME, root_ca::FAIL_OPEN_KEY) {
        assert!(!read(Some("u"), true, proxys), "the proxy's own");
    }
    let key = serde_json::json!({"name": root_ca::MESH, "key": root_ca::FAIL_OPEN_KEY});
    let env = serde_json::json!([{"name": "CA", "valueFrom": {"configMapKeyRef": key}}]);
    let variable = serde_json::json!({"containers": [{"name": "op", "env": env}]});
    assert!(read(Some("u"), false, variable));
    let bare = serde_json::json!({"containers": []});
    assert!(!read(Some("u"), true, bare.clone()), "it was admitted without");
    assert!(read(None, true, bare.clone()) && !read(None, false, bare), "will be admitted");
}
