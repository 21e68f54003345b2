//! What nodes can do for a pod: another kernel, nodes that are preferred, and what containers may send.

use serde_json::{Value, json};

use super::super::{CONTAINER, Refusal};
use super::{annotation, injected, pod, settings, usual};
use k8s_openapi::api::core::v1::Pod;

#[test]
fn nodes_that_can_serve_a_pod_are_preferred() {
    let ours = json!({"weight": 100, "preference": {"matchExpressions": [
        {"key": "ctrlmesh.kusionstack.io/ebpf", "operator": "In", "values": ["true"]},
    ]}});
    let theirs = json!({"weight": 1, "preference": {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}});
    let terms = |pod: &Value| {
        let affinity = pod["spec"]["affinity"]["nodeAffinity"].clone();
        affinity["preferredDuringSchedulingIgnoredDuringExecution"].clone()
    };
    let mut spec = usual();
    assert_eq!(terms(&injected(json!({}), spec.clone())), json!([ours]));
    assert_eq!(terms(&injected(json!({annotation::SIDECAR: "true"}), spec.clone())), json!([ours]));
    spec["affinity"] = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [theirs]}});
    let once = injected(json!({}), spec.clone());
    assert_eq!(terms(&once), json!([theirs, ours]));
    assert_eq!(terms(&injected(json!({}), once["spec"].clone())), json!([theirs, ours]), "asked again");
    let env = injected(json!({annotation::INTERCEPTION: "env"}), spec);
    assert_eq!(terms(&env), json!([theirs]), "any node will do");
}

#[test]
fn containers_have_net_raw_only_where_they_ask_for_it() {
    let of = |security: Value| {
        let mut spec = usual();
        spec["containers"][0]["securityContext"] = security;
        let pod = injected(json!({}), spec);
        assert_eq!(pod["spec"]["initContainers"][0]["securityContext"]["capabilities"]["drop"], json!(["NET_RAW"]));
        pod["spec"]["containers"][0]["securityContext"].clone()
    };
    let dropped = json!({"capabilities": {"drop": ["NET_RAW"]}});
    assert_eq!(of(json!(null)), dropped);
    assert_eq!(of(dropped.clone()), dropped, "asked again");
    let both = json!({"runAsUser": 1, "capabilities": {"add": ["NET_BIND_SERVICE"], "drop": ["MKNOD", "NET_RAW"]}});
    let mut asked = both.clone();
    asked["capabilities"]["drop"] = json!(["MKNOD"]);
    assert_eq!(of(asked), both);
    for kept in [
        json!({"capabilities": {"add": ["NET_RAW"]}}),
        json!({"capabilities": {"add": ["CAP_NET_RAW"]}}),
        json!({"capabilities": {"drop": ["ALL"]}}),
        json!({"privileged": true}),
    ] {
        assert_eq!(of(kept.clone()), kept);
    }
}

#[test]
fn a_pod_with_another_kernel_is_not_left_to_that_of_the_node() {
    let of = |class: &str, interception: Option<&str>, handler: Option<&str>| {
        let mut spec = usual();
        spec["runtimeClassName"] = json!(class);
        let annotations = interception.map_or(json!({}), |value| json!({annotation::INTERCEPTION: value}));
        super::super::inject(&pod(annotations, spec), None, &settings(), handler)
    };
    let by = |pod: Result<Pod, Refusal>| {
        let spec = pod.unwrap().spec.unwrap();
        let sidecars = spec.init_containers.iter().flatten().filter(|one| one.name == CONTAINER).count();
        let host = spec.containers[1].env.iter().flatten().any(|one| one.name == "KUBERNETES_SERVICE_HOST");
        (sidecars, host)
    };
    for (class, handler) in [("sandbox", "runsc"), ("gvisor", "gvisor"), ("kata-qemu", "kata-qemu"), ("vm", "Kata")] {
        for wanted in [None, Some("auto"), Some("env")] {
            assert_eq!(by(of(class, wanted, Some(handler))), (1, true), "{class} {wanted:?}");
        }
        let refused = of(class, Some("ebpf"), Some(handler)).unwrap_err().to_string();
        assert!(refused.starts_with("spec.runtimeClassName: ") && refused.contains(class), "{refused}");
    }
    assert_eq!(by(of("gvisor", None, None)), (1, true), "a class that is not known yet");
    for (class, handler) in [("nvidia", "nvidia"), ("gvisor", "runc"), ("crun", "crun")] {
        for wanted in [None, Some("auto"), Some("ebpf")] {
            assert_eq!(by(of(class, wanted, Some(handler))), (0, false), "{class} {wanted:?}");
        }
    }
}
