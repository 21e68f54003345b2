use super::*;

#[test]
fn where_nothing_is_picked_from_the_ca_only_the_ca_is() {
    for (items, open) in [(Value::Null, false), (json!([]), false), (Value::Null, true)] {
        let map = json!({"name": "kube-root-ca.crt", "items": items});
        let mut spec = usual();
        spec["volumes"] =
            json!([{"name": "a", "projected": {"sources": [{"configMap": map}]}}, {"name": "b", "configMap": map}]);
        let found = injected(json!({annotation::FAIL_OPEN: open.to_string()}), spec);
        let key = if open { "fail-open-ca.crt" } else { "ca.crt" };
        let expected = json!({"name": "ctrlmesh-root-ca", "items": [{"key": key, "path": "ca.crt"}]});
        let volumes = &found["spec"]["volumes"];
        assert_eq!(volumes[0]["projected"]["sources"][0]["configMap"], expected);
        assert_eq!(volumes[1]["configMap"], expected);
    }
}

#[test]
fn the_real_ca_is_refused_unless_the_pod_may_fail_open() {
    let bundle =
        json!({"clusterTrustBundle": {"signerName": "kubernetes.io/kube-apiserver-serving", "path": "ca.crt"}});
    let secret = json!({"secret": {"secretName": "op-token"}});
    let map = json!({"configMap": {"name": "copy", "items": [{"key": "ca.crt", "path": "ca.crt"}]}});
    let account = "/var/run/secrets/kubernetes.io/serviceaccount";
    let cases = [
        (secret.clone(), account.to_owned(), "a Secret"),
        (secret.clone(), format!("{account}/"), "a Secret"),
        (secret.clone(), format!("{account}/ca.crt"), "a Secret"),
        (secret.clone(), "/run/secrets/kubernetes.io/serviceaccount".to_owned(), "a Secret"),
        (secret.clone(), "//run/./secrets/kubernetes.io/serviceaccount/ca.crt".to_owned(), "a Secret"),
        (json!({"projected": {"sources": [secret]}}), account.to_owned(), "a Secret"),
        (map.clone(), format!("{account}/ca.crt"), "another ConfigMap"),
        (json!({"projected": {"sources": [map]}}), account.to_owned(), "another ConfigMap"),
        (json!({"projected": {"sources": [bundle]}}), "/anywhere".to_owned(), "this ClusterTrustBundle"),
    ];
    for (mut volume, path, what) in cases {
        let mut spec = usual();
        volume["name"] = json!("v");
        spec["volumes"] = json!([volume]);
        spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": path}]);
        let message = refused(json!({}), spec.clone());
        assert!(message.starts_with("spec.volumes[\"v\"]"), "{path}: {message}");
        assert!(message.contains(what) && message.contains(annotation::FAIL_OPEN), "{message}");
        injected(json!({annotation::FAIL_OPEN: "true"}), spec);
    }
    let mut others = usual();
    others["volumes"].as_array_mut().unwrap().extend([
        json!({"name": "mine", "secret": {"secretName": "mine"}}),
        json!({"name": "other", "projected": {"sources": [{"clusterTrustBundle": {"signerName": "example.com/mine", "path": "x"}}]}}),
    ]);
    others["containers"][1]["volumeMounts"] = json!([{"name": "mine", "mountPath": format!("{account}-of-mine")}]);
    // As OpenShift makes the volume.
    let sources = others["volumes"][0]["projected"]["sources"].as_array_mut().unwrap();
    sources.push(json!({"configMap": {"name": "openshift-service-ca.crt", "items": [{"key": "service-ca.crt", "path": "service-ca.crt"}]}}));
    injected(json!({}), others);
}

#[test]
fn variables_with_the_ca_hold_the_meshs_or_are_refused() {
    let mut spec = usual();
    let from =
        |name: &str, key: &str| json!({"name": "CA", "valueFrom": {"configMapKeyRef": {"name": name, "key": key}}});
    spec["containers"][1]["env"] = json!([from("kube-root-ca.crt", "ca.crt")]);
    let env = |annotations: Value| injected(annotations, spec.clone())["spec"]["containers"][1]["env"].clone();
    assert_eq!(env(json!({})), json!([from("ctrlmesh-root-ca", "ca.crt")]));
    let open = json!({annotation::FAIL_OPEN: "true"});
    assert_eq!(env(open), json!([from("ctrlmesh-root-ca", "fail-open-ca.crt")]));
    for name in ["kube-root-ca.crt", "ctrlmesh-root-ca"] {
        spec["containers"][1]["envFrom"] = json!([{"configMapRef": {"name": name}}]);
        let message = refused(json!({}), spec.clone());
        assert!(message.starts_with("spec.containers[\"second\"].envFrom"), "{message}");
        assert!(message.contains(name), "{message}");
    }
}

#[test]
fn fail_open_without_a_ca_is_marked_by_a_volume() {
    let bare = json!({"containers": [{"name": "operator", "image": "op"}]});
    let open = json!({annotation::FAIL_OPEN: "true"});
    let found = injected(open.clone(), bare.clone());
    let map = json!({"name": "ctrlmesh-root-ca", "items": [{"key": "fail-open-ca.crt", "path": "ca.crt"}]});
    let projected = json!({"defaultMode": 420, "sources": [{"configMap": map}]});
    let volume = json!({"name": "ctrlmesh-fail-open", "projected": projected});
    assert_eq!(found["spec"]["volumes"], json!([volume]));
    assert_eq!(found["spec"]["containers"][0]["volumeMounts"], Value::Null);
    assert_eq!(injected(open, found["spec"].clone())["spec"], found["spec"], "asked again");
    let copied = injected(json!({}), found["spec"].clone());
    assert_eq!(copied["spec"]["volumes"], json!([]), "a copy that may not any more");
}
