use super::*;

#[test]
fn the_sidecar_starts_first_and_has_no_privilege() {
    let found = injected(json!({annotation::SIDECAR: "true"}), usual());
    let containers = found["spec"]["initContainers"].as_array().unwrap();
    assert_eq!(containers.iter().map(|one| &one["name"]).collect::<Vec<_>>(), ["ctrlmesh-proxy", "migrate"]);
    let proxy = &containers[0];
    assert_eq!((&proxy["restartPolicy"], &proxy["image"]), (&json!("Always"), &json!("ctrlmesh/proxy:1")));
    assert_eq!(proxy["startupProbe"]["httpGet"]["path"], "/readyz");
    assert_eq!(proxy["readinessProbe"]["httpGet"]["path"], "/readyz");
    assert_eq!(proxy["livenessProbe"]["httpGet"]["path"], "/livez");
    assert_eq!(proxy["imagePullPolicy"], "IfNotPresent");
    let security = &proxy["securityContext"];
    for (field, value) in [
        ("privileged", json!(false)),
        ("allowPrivilegeEscalation", json!(false)),
        ("readOnlyRootFilesystem", json!(true)),
        ("runAsNonRoot", json!(true)),
        ("capabilities", json!({"drop": ["ALL"]})),
        ("seccompProfile", json!({"type": "RuntimeDefault"})),
    ] {
        assert_eq!(security[field], value, "{field}");
    }
    let trusted = &found["spec"]["volumes"][1]["projected"]["sources"];
    assert_eq!(trusted[0]["serviceAccountToken"]["audience"], "ctrlmesh");
    assert_eq!(trusted[1]["configMap"]["name"], "kube-root-ca.crt", "it verifies the real API server");
    assert!(found["spec"]["containers"][0]["env"][0]["value"] == "elsewhere", "nothing is redirected");
}

#[test]
fn no_other_container_gets_at_the_sidecars_files() {
    let mut spec = usual();
    spec["shareProcessNamespace"] = json!(true);
    for annotations in [json!({annotation::SIDECAR: "true"}), json!({annotation::INTERCEPTION: "env"})] {
        let message = refused(annotations, spec.clone());
        assert!(message.starts_with("spec.shareProcessNamespace: "), "{message}");
    }
    assert_eq!(injected(json!({}), spec)["spec"]["shareProcessNamespace"], true, "the node's proxy is elsewhere");
    let found = injected(json!({annotation::SIDECAR: "true"}), usual());
    let user = &found["spec"]["initContainers"][0]["securityContext"]["runAsUser"];
    assert!(user.as_i64().is_some_and(|user| ![0, 65_532, 65_534].contains(&user)), "{user}");
}

#[test]
fn a_sidecar_learns_where_its_spans_go() {
    let with_sidecar = pod(json!({annotation::SIDECAR: "true"}), usual());
    let variables = |settings: &SidecarSettings| {
        let found = serde_json::to_value(inject(&with_sidecar, Some("op-1-normal"), settings).unwrap()).unwrap();
        let env = found["spec"]["initContainers"][0]["env"].as_array().unwrap().clone();
        let ours = env.into_iter().filter(|one| one["name"].as_str().unwrap().starts_with("OTEL_"));
        ours.collect::<Vec<_>>()
    };
    assert!(variables(&settings()).is_empty());
    let traces = Some(("http://collector.observability:4317".parse().unwrap(), "0.1".parse().unwrap()));
    let expected = [
        json!({"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector.observability:4317/"}),
        json!({"name": "OTEL_TRACES_SAMPLER_ARG", "value": "0.1"}),
    ];
    assert_eq!(variables(&SidecarSettings { traces, ..settings() }), expected);
}

#[test]
fn whoever_is_in_a_sidecars_container_can_follow_its_requests() {
    let found = injected(json!({annotation::SIDECAR: "true"}), usual());
    let proxy = &found["spec"]["initContainers"][0];
    let env = proxy["env"].as_array().unwrap();
    let socket = env.iter().find(|one| one["name"] == "CTRLMESH_PROXY_TRACE_SOCKET").unwrap();
    let folder = socket["value"].as_str().unwrap().strip_suffix("/trace").unwrap();
    let mounts = proxy["volumeMounts"].as_array().unwrap();
    assert!(mounts.iter().any(|mount| mount["mountPath"] == folder && mount["readOnly"] != true), "{mounts:?}");
}

#[test]
fn a_sidecar_has_its_processes_for_itself() {
    for field in ["shareProcessNamespace", "hostPID"] {
        let mut spec = usual();
        spec[field] = json!(true);
        let message = refused(json!({annotation::SIDECAR: "true"}), spec);
        assert!(message.starts_with(&format!("spec.{field}: ")), "{message}");
    }
}

#[test]
fn no_other_process_of_a_sidecars_container_serves() {
    let found = injected(json!({annotation::SIDECAR: "true"}), usual());
    let env = found["spec"]["initContainers"][0]["env"].as_array().unwrap();
    let first = json!({"name": "CTRLMESH_PROXY_FIRST_PROCESS_ONLY", "value": "true"});
    assert!(env.contains(&first), "{env:?}");
}

#[test]
fn annotations_give_resources_and_variables() {
    let found = injected(
        json!({
            annotation::SIDECAR: "true",
            annotation::PROXY_RESOURCE: r#"{"limits": {"memory": "1Gi"}}"#,
            annotation::ENV_INJECT: r#"[{"name": "second", "env": [{"key": "A", "value": "1"}]}]"#,
        }),
        usual(),
    );
    assert_eq!(found["spec"]["initContainers"][0]["resources"], json!({"limits": {"memory": "1Gi"}}));
    assert_eq!(found["spec"]["containers"][1]["env"], json!([{"name": "A", "value": "1"}]));
    let told = |found: &Value| {
        let env = found["spec"]["initContainers"][0]["env"].as_array().unwrap().clone();
        env.into_iter().find(|one| one["name"] == "CTRLMESH_PROXY_MEMORY_LIMIT")
    };
    let field = json!({"resource": "limits.memory", "divisor": "1"});
    assert_eq!(told(&found).unwrap()["valueFrom"]["resourceFieldRef"], field);
    let usual_ones = injected(json!({annotation::SIDECAR: "true"}), usual());
    assert_eq!(
        usual_ones["spec"]["initContainers"][0]["resources"],
        json!({"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "512Mi"}})
    );
    // Without a limit of its own it would be told all memory of the node.
    let unlimited = json!({annotation::SIDECAR: "true", annotation::PROXY_RESOURCE: "{}"});
    assert_eq!(told(&injected(unlimited, usual())), None);
}
