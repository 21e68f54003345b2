use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::rules::pod::Member;

mod nodes;
mod sidecar;
mod trust;

fn settings() -> SidecarSettings {
    SidecarSettings {
        image: "ctrlmesh/proxy:1".to_owned(),
        pull_policy: "IfNotPresent".to_owned(),
        manager: "m.ns.svc:8071".to_owned(),
        traces: None,
    }
}

fn pod(annotations: Value, spec: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "op-0", "labels": {"app": "op"}, "annotations": annotations},
        "spec": spec,
    }))
    .unwrap()
}

/// As the API server's own admission leaves it: with the token's volume, mounted.
fn usual() -> Value {
    json!({
        "containers": [{"name": "operator", "image": "op", "env": [{"name": "KUBERNETES_SERVICE_HOST", "value": "elsewhere"}],
            "volumeMounts": [{"name": "kube-api-access-x", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]},
            {"name": "second", "image": "op"}],
        "initContainers": [{"name": "migrate", "image": "op"}],
        "volumes": [{"name": "kube-api-access-x", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
        ]}}],
    })
}

/// A pod without a `RuntimeClass`.
fn inject(pod: &Pod, shard: Option<&str>, settings: &SidecarSettings) -> Result<Pod, Refusal> {
    super::inject(pod, shard, settings, None)
}

fn injected(annotations: Value, spec: Value) -> Value {
    serde_json::to_value(inject(&pod(annotations, spec), Some("op-1-normal"), &settings()).unwrap()).unwrap()
}

fn refused(annotations: Value, spec: Value) -> String {
    inject(&pod(annotations, spec), Some("op-1-normal"), &settings()).unwrap_err().to_string()
}

/// What every pod gets that the node's kernel leads to its proxy: a preference for nodes, and no `NET_RAW`.
fn beside_the_ca(spec: &mut Value) {
    let says_so = json!({"key": label::EBPF, "operator": "In", "values": ["true"]});
    let preference = json!({"weight": 100, "preference": {"matchExpressions": [says_so]}});
    spec["affinity"] = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}});
    for kind in ["initContainers", "containers"] {
        for container in spec.get_mut(kind).and_then(Value::as_array_mut).into_iter().flatten() {
            container["securityContext"] = json!({"capabilities": {"drop": ["NET_RAW"]}});
        }
    }
}

#[test]
fn in_mode_ebpf_only_the_ca_is_changed_and_what_says_so() {
    let mut expected = serde_json::to_value(pod(json!({}), usual())).unwrap();
    expected["metadata"]["labels"][label::SHARDING_CONFIG_INJECTED] = json!("op-1-normal");
    expected["metadata"]["annotations"] = json!({annotation::INJECTED: "true"});
    let map = &mut expected["spec"]["volumes"][0]["projected"]["sources"][1]["configMap"];
    map["name"] = json!("ctrlmesh-root-ca");
    beside_the_ca(&mut expected["spec"]);
    assert_eq!(injected(json!({}), usual()), expected);
    let open = injected(json!({annotation::FAIL_OPEN: "true"}), usual());
    let map = &open["spec"]["volumes"][0]["projected"]["sources"][1]["configMap"];
    assert_eq!(map["items"], json!([{"key": "fail-open-ca.crt", "path": "ca.crt"}]));
}

#[test]
fn a_pod_without_a_shard_believes_the_mesh_all_the_same() {
    let bare = inject(&pod(json!({}), usual()), None, &settings()).unwrap();
    let labels = bare.metadata.labels.as_ref().unwrap();
    assert!(!labels.contains_key(label::SHARDING_CONFIG_INJECTED));
    let sharded = inject(&bare, Some("op-1-normal"), &settings()).unwrap();
    assert_eq!(serde_json::to_value(sharded).unwrap(), injected(json!({}), usual()));
}

#[test]
fn the_readiness_gate_stands_once_beside_the_pods_own() {
    let mut spec = usual();
    spec["readinessGates"] = json!([{"conditionType": "example.com/feature"}]);
    let mut gated = pod(json!({}), spec);
    for _ in 0..2 {
        add_readiness_gate(&mut gated);
        let found = serde_json::to_value(&gated).unwrap()["spec"]["readinessGates"].take();
        let ours = json!({"conditionType": "ctrlmesh.kusionstack.io/promoted"});
        assert_eq!(found, json!([{"conditionType": "example.com/feature"}, ours]));
    }
}

#[test]
fn a_pod_without_a_token_gets_none() {
    let spec = json!({"automountServiceAccountToken": false, "containers": [{"name": "operator", "image": "op"}]});
    let found = injected(json!({}), spec.clone());
    let mut expected = serde_json::to_value(pod(json!({}), spec)).unwrap()["spec"].take();
    beside_the_ca(&mut expected);
    assert_eq!(found["spec"], expected);
}

#[test]
fn in_mode_env_every_container_but_the_proxy_dials_the_sidecar() {
    let found = injected(json!({annotation::INTERCEPTION: "env"}), usual());
    let spec = &found["spec"];
    for container in [&spec["containers"][0], &spec["containers"][1], &spec["initContainers"][1]] {
        let expected = json!([{"name": "KUBERNETES_SERVICE_HOST", "value": "127.0.0.1"}, {"name": "KUBERNETES_SERVICE_PORT", "value": "5443"}]);
        assert_eq!(container["env"], expected, "{}", container["name"]);
    }
    let proxy = serde_json::to_string(&spec["initContainers"][0]).unwrap();
    assert!(!proxy.contains("KUBERNETES_SERVICE"), "the proxy finds the real one");
    assert!(proxy.contains("127.0.0.1:5443,127.0.0.1:443"));
    assert_eq!(spec["hostAliases"][0]["ip"], "127.0.0.1");
    assert_eq!(spec["hostAliases"][0]["hostnames"][0], "kubernetes.default.svc");
    assert_eq!(spec["securityContext"]["sysctls"][0]["value"], "0");
}

#[test]
fn in_mode_kubeconfig_every_container_is_given_one() {
    let found = injected(json!({annotation::INTERCEPTION: "kubeconfig"}), usual());
    let container = &found["spec"]["containers"][1];
    assert_eq!(container["args"], Value::Null, "its image's would count no more");
    assert_eq!(container["env"][0]["name"], "KUBECONFIG");
    assert_eq!(found["spec"]["initContainers"][1]["args"], Value::Null);
    let text = found["metadata"]["annotations"][annotation::KUBECONFIG].as_str().unwrap();
    let read: Value = serde_saphyr::from_str(text).unwrap();
    assert_eq!(read["clusters"][0]["cluster"]["server"], "https://127.0.0.1:5443");
    let mut quiet = pod(json!({annotation::INTERCEPTION: "kubeconfig"}), usual());
    let labels = quiet.metadata.labels.as_mut().unwrap();
    labels.insert(label::DISABLE_FAKE_KUBECONFIG_ARG.to_owned(), "true".to_owned());
    labels.insert(label::DISABLE_FAKE_KUBECONFIG_ENV.to_owned(), "true".to_owned());
    let found = inject(&quiet, Some("s"), &settings()).unwrap().spec.unwrap();
    assert!(found.containers[1].args.is_none() && found.containers[1].env.is_none());
}

#[test]
fn a_kubeconfig_argument_is_replaced_in_one_word_or_two() {
    let ours = "--kubeconfig=/etc/kubernetes/kubeconfig/kubeconfig";
    for (before, after) in [
        (vec!["-v=2"], vec!["-v=2", ours]),
        (vec!["--kubeconfig=/x", "-v=2"], vec!["-v=2", ours]),
        (vec!["--kubeconfig", "/x", "-v=2"], vec!["-v=2", ours]),
        (vec!["-kubeconfig", "/x"], vec![ours]),
        (vec!["-kubeconfig=/x", "--kubeconfigs=a"], vec!["--kubeconfigs=a", ours]),
        (vec!["run", "--kubeconfig"], vec!["run", ours]),
    ] {
        let mut spec = usual();
        spec["containers"][0]["args"] = json!(before);
        let found = injected(json!({annotation::INTERCEPTION: "kubeconfig"}), spec);
        assert_eq!(found["spec"]["containers"][0]["args"], json!(after), "{before:?}");
    }
}

#[test]
fn a_kubeconfig_is_replaced_in_commands_and_init_containers() {
    let ours = "--kubeconfig=/etc/kubernetes/kubeconfig/kubeconfig";
    let mut spec = usual();
    spec["containers"][0]["command"] = json!(["/manager", "--kubeconfig", "/x", "-v=2"]);
    spec["containers"][1]["command"] = json!(["/other", "-v=2"]);
    spec["initContainers"][0]["args"] = json!(["migrate", "--kubeconfig=/x"]);
    let found = injected(json!({annotation::INTERCEPTION: "kubeconfig"}), spec);
    let spec = &found["spec"];
    assert_eq!(spec["containers"][0]["command"], json!(["/manager", "-v=2", ours]));
    assert_eq!(spec["containers"][1]["command"], json!(["/other", "-v=2"]));
    assert_eq!(spec["initContainers"][1]["args"], json!(["migrate", ours]));
}

#[test]
fn names_of_the_proxy_are_refused_and_its_own_recognized() {
    for name in ["ctrlmesh-proxy", "ctrlmesh-state", "ctrlmesh-kubeconfig", "ctrlmesh-fail-open"] {
        let mut spec = usual();
        let volume = json!({"name": name, "emptyDir": {}});
        spec["volumes"].as_array_mut().unwrap().push(volume);
        let message = refused(json!({}), spec);
        assert!(message.starts_with("spec.volumes") && message.contains(name), "{message}");
    }
    let mut spec = usual();
    spec["initContainers"][0]["name"] = json!("ctrlmesh-proxy");
    let message = refused(json!({annotation::SIDECAR: "true"}), spec);
    assert!(message.starts_with("spec.initContainers"), "{message}");
    for mode in ["env", "kubeconfig"] {
        let once = inject(&pod(json!({annotation::INTERCEPTION: mode}), usual()), Some("s"), &settings());
        let other = SidecarSettings { image: "ctrlmesh/proxy:2".to_owned(), ..settings() };
        let again = inject(&once.unwrap(), Some("s"), &other).unwrap().spec.unwrap();
        let init = again.init_containers.unwrap();
        assert_eq!((init.len(), init[0].image.as_deref()), (2, Some("ctrlmesh/proxy:2")));
    }
}

/// One that looks as the proxy's does stays out of the mesh: nothing dials through it.
#[test]
fn a_container_like_the_proxys_is_refused_where_none_is_wanted() {
    let with_sidecar = injected(json!({annotation::SIDECAR: "true"}), usual());
    let mut forged = with_sidecar["spec"].clone();
    forged["initContainers"][0]["image"] = json!("past-the-mesh");
    let message = refused(json!({}), forged.clone());
    assert!(message.starts_with("spec.initContainers"), "{message}");
    let replaced = injected(json!({annotation::SIDECAR: "true"}), forged);
    assert_eq!(replaced["spec"], with_sidecar["spec"], "where one is wanted, it is replaced");
}

#[test]
fn no_other_container_mounts_the_proxys_volumes() {
    let with_sidecar = injected(json!({annotation::SIDECAR: "true"}), usual());
    for (name, field) in
        [("ctrlmesh-proxy", "containers"), ("ctrlmesh-state", "containers"), ("ctrlmesh-proxy", "initContainers")]
    {
        let mut spec = with_sidecar["spec"].clone();
        let containers = spec[field].as_array_mut().unwrap();
        let last = containers.last_mut().unwrap();
        last["volumeMounts"] = json!([{"name": name, "mountPath": "/mine"}]);
        let container = last["name"].clone();
        let message = refused(json!({annotation::SIDECAR: "true"}), spec);
        assert!(message.contains(&container.to_string()) && message.contains(name), "{message}");
        assert!(message.contains("volumeMounts"), "{message}");
    }
}

#[test]
fn a_kubeconfig_without_its_files_is_refused() {
    let kubeconfig = json!({annotation::INTERCEPTION: "kubeconfig"});
    let mut without = usual();
    without["automountServiceAccountToken"] = json!(false);
    without["volumes"] = Value::Null;
    without["containers"][0]["volumeMounts"] = Value::Null;
    let message = refused(kubeconfig.clone(), without.clone());
    assert!(message.starts_with("spec.automountServiceAccountToken"), "{message}");
    injected(json!({annotation::INTERCEPTION: "env"}), without.clone());
    // Its own, where Kubernetes has it.
    without["containers"][0]["volumeMounts"] =
        json!([{"name": "mine", "mountPath": "/run/secrets/kubernetes.io/serviceaccount/"}]);
    injected(kubeconfig, without);
}

#[test]
fn pods_that_could_not_work_are_refused() {
    let windows = json!({"os": {"name": "windows"}, "containers": [{"name": "a", "image": "a"}]});
    assert!(refused(json!({}), windows).starts_with("spec.os"));
    let selected =
        json!({"nodeSelector": {"kubernetes.io/os": "windows"}, "containers": [{"name": "a", "image": "a"}]});
    assert!(refused(json!({}), selected).starts_with("spec.os"));
    let ports = |value: &str| {
        let mut spec = usual();
        spec["securityContext"] = json!({"sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": value}]});
        spec
    };
    let env = json!({annotation::INTERCEPTION: "env"});
    for high in ["444", "1024", "x"] {
        let message = refused(env.clone(), ports(high));
        assert!(message.contains("sysctls") && message.contains("443"), "{message}");
        injected(json!({annotation::INTERCEPTION: "kubeconfig"}), ports(high));
    }
    let low = injected(env, ports("443"));
    assert_eq!(low["spec"]["securityContext"], ports("443")["securityContext"], "its own");
}

#[test]
fn impossible_requests_are_refused_by_field() {
    let host = json!({"hostNetwork": true, "containers": [{"name": "operator", "image": "op"}]});
    assert!(refused(json!({}), host).starts_with("spec.hostNetwork"));
    let mode = refused(json!({annotation::INTERCEPTION: "iptables"}), usual());
    assert!(mode.contains("\"iptables\" is none of auto, ebpf, env, kubeconfig"), "{mode}");
    let resources = refused(json!({annotation::PROXY_RESOURCE: "{"}), usual());
    assert!(resources.contains("proxy-resource"), "{resources}");
    let nobody = r#"[{"name": "third", "env": []}]"#;
    assert!(refused(json!({annotation::ENV_INJECT: nobody}), usual()).contains("\"third\""));
    let taken = json!({"containers": [{"name": "ctrlmesh-proxy", "image": "op"}]});
    assert!(refused(json!({}), taken).contains("rename"));
}

fn any_pod() -> impl Strategy<Value = Pod> {
    let container = |name: &'static str| {
        (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(move |(host, config, args)| {
            let account = json!({"name": "kube-api-access-x", "mountPath": super::trust::SERVICE_ACCOUNT});
            let mut container = json!({"name": name, "image": "op", "volumeMounts": [account]});
            if host {
                container["env"] =
                    json!([{"name": "A", "value": "$(B)"}, {"name": "KUBERNETES_SERVICE_HOST", "value": "x"}]);
            }
            if config {
                container["volumeMounts"] =
                    json!([account, {"name": "mine", "mountPath": "/etc/kubernetes/kubeconfig"}]);
            }
            if args {
                container["args"] = json!(["--kubeconfig=/mine", "-v=2"]);
            }
            container
        })
    };
    let interception = prop::sample::select(vec!["ebpf", "env", "kubeconfig", ""]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (container("operator"), container("second"), container("migrate"), interception, flags).prop_map(
        |(one, two, init, interception, (sidecar, open, token, alias))| {
            let mut annotations = json!({});
            if !interception.is_empty() {
                annotations[annotation::INTERCEPTION] = json!(interception);
            }
            annotations[annotation::SIDECAR] = json!(sidecar.to_string());
            annotations[annotation::FAIL_OPEN] = json!(open.to_string());
            let mut spec = usual();
            spec["containers"] = json!([one, two]);
            spec["initContainers"] = json!([init]);
            if !token {
                spec["volumes"] = Value::Null;
            }
            if alias {
                spec["hostAliases"] = json!([{"ip": "10.0.0.1", "hostnames": ["kubernetes", "mine"]}, {"ip": "10.0.0.2", "hostnames": ["kubernetes.default.svc"]}]);
            }
            pod(annotations, spec)
        },
    )
}

proptest! {
    #[test]
    fn injecting_again_changes_nothing(pod in any_pod()) {
        let once = inject(&pod, Some("s"), &settings()).unwrap();
        prop_assert_eq!(inject(&once, Some("s"), &settings()).unwrap(), once);
    }

    #[test]
    fn fail_open_is_read_from_the_spec_not_the_annotation(pod in any_pod()) {
        let asked = |pod: &Pod| pod.metadata.annotations.as_ref().unwrap()[annotation::FAIL_OPEN].clone();
        let open = asked(&pod) == "true";
        let mut admitted = inject(&pod, Some("s"), &settings()).unwrap();
        admitted.metadata.uid = Some("u".to_owned());
        let annotations = admitted.metadata.annotations.as_mut().unwrap();
        annotations.insert(annotation::FAIL_OPEN.to_owned(), (!open).to_string());
        prop_assert_eq!(Member::from(&admitted).fail_open, open);
    }

    #[test]
    fn the_pods_own_fields_are_kept(pod in any_pod()) {
        let after = inject(&pod, Some("s"), &settings()).unwrap();
        let (before, after) = (pod.spec.unwrap(), after.spec.unwrap());
        prop_assert_eq!(before.containers.len(), after.containers.len());
        for (before, after) in before.containers.iter().zip(&after.containers) {
            for variable in before.env.iter().flatten().filter(|one| !one.name.starts_with("KUBERNETES_SERVICE")) {
                prop_assert!(after.env.as_ref().unwrap().contains(variable));
            }
            for argument in before.args.iter().flatten().filter(|one| !one.starts_with("--kubeconfig=")) {
                prop_assert!(after.args.as_ref().unwrap().contains(argument));
            }
        }
        for volume in before.volumes.iter().flatten() {
            prop_assert!(after.volumes.as_ref().unwrap().iter().any(|one| one.name == volume.name));
        }
        for name in before.host_aliases.iter().flatten().flat_map(|alias| alias.hostnames.iter().flatten()) {
            let found = after.host_aliases.iter().flatten().flat_map(|alias| alias.hostnames.iter().flatten()).any(|one| one == name);
            prop_assert!(found, "{}", name);
        }
    }
}
