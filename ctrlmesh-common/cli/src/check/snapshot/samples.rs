//! A cluster in which everything is as it should be.

use ctrlmesh_common::api;
use jiff::SignedDuration;
use kube::ResourceExt as _;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::expected;
use super::*;
use crate::version::image::OWN;

pub(in super::super) fn now() -> Timestamp {
    "2026-06-01T12:00:00Z".parse().unwrap()
}

fn of<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A node that is ready.
pub(in super::super) fn node(name: &str, system: &str, kernel: &str, architecture: &str, runtime: &str) -> Node {
    of(json!({"metadata": {"name": name, "labels": {"kubernetes.io/os": system}}, "status": {
        "conditions": [{"type": "Ready", "status": "True"}],
        "runtimeHandlers": [{"name": ""}, {"name": "runc"}],
        "nodeInfo": {"architecture": architecture, "bootID": "", "containerRuntimeVersion": runtime,
            "kernelVersion": kernel, "kubeProxyVersion": "", "kubeletVersion": "v1.36.0", "machineID": "",
            "operatingSystem": system, "osImage": "", "systemUUID": ""}}}))
}

pub(in super::super) fn snapshot() -> Snapshot {
    let policies = ["validatingadmissionpolicies", "mutatingadmissionpolicies"].map(str::to_owned);
    let lease = json!({"metadata": {"name": "node-1"}, "spec": {"renewTime": "2026-06-01T11:59:55.000000Z"}});
    Snapshot {
        server: Server {
            url: "https://cluster.example.com".to_owned(),
            version: "v1.36.1".to_owned(),
            asked: now(),
            answered: now() + SignedDuration::from_millis(20),
            date: Some(now()),
        },
        admission: Ok(policies.into()),
        nodes: Ok(vec![node("node-1", "linux", "6.12.1", "amd64", "containerd://2.1.0")]),
        node_leases: Ok(vec![of(lease)]),
        rights: Vec::new(),
    }
}

pub(in super::super) fn installed() -> Installed {
    let pod = |name: &str, container: &str| {
        of(json!({"metadata": {"namespace": "ctrlmesh-system", "name": name},
            "spec": {"nodeName": "node-1", "containers": [{"name": container, "image": format!("i:{OWN}")}]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}))
    };
    let lease = json!({"metadata": {}, "spec": {"holderIdentity": "manager-a_00ff", "leaseDurationSeconds": 8,
        "renewTime": "2026-06-01T11:59:59.000000Z"}});
    let endpoint = json!({"name": "manager-a", "podIP": "10.0.0.1", "leader": true});
    let state = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ManagerState",
        "metadata": {"name": "ctrlmesh-manager"}, "status": {"endpoints": [endpoint]}});
    Installed {
        definitions: definitions(),
        deployment: Ok(of(json!({"metadata": {}, "spec": {"replicas": 2, "selector": {}, "template": {}},
            "status": {"availableReplicas": 2}}))),
        managers: Ok(vec![pod("manager-a", "manager")]),
        lease: Ok(of(lease)),
        manager_state: Ok(of(state)),
        daemon_set: Ok(of(json!({"metadata": {}, "spec": {"selector": {}, "template": {"spec": {"containers": [],
            "nodeSelector": {"kubernetes.io/os": "linux"}}}}, "status": {"currentNumberScheduled": 1,
            "desiredNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": 1}}))),
        node_proxies: Ok(vec![pod("ctrlmesh-node-a", "proxy")]),
        webhooks: webhooks(),
        roles: expected::rights().into_iter().map(|one| Ok(Some(one))).collect(),
        configs: Ok(Vec::new()),
        enrolled: Ok(Vec::new()),
        trust_bundle: Ok(None),
    }
}

fn definitions() -> BTreeMap<String, Answer<Option<CustomResourceDefinition>>> {
    let status = json!({"conditions": [{"type": "Established", "status": "True"}]});
    let established = |mut one: CustomResourceDefinition| {
        one.status = Some(of(status.clone()));
        (one.name_any(), Ok(Some(one)))
    };
    api::definitions().into_iter().map(established).collect()
}

fn webhooks() -> Webhooks {
    let hook = json!({"name": "hook", "admissionReviewVersions": ["v1"], "sideEffects": "None",
        "clientConfig": {"caBundle": "Y2E="}});
    let configuration = json!({"metadata": {"name": "ctrlmesh"}, "webhooks": [hook]});
    let endpoints = json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": true}}]);
    let pod = json!({"metadata": {"annotations": {"ctrlmesh.kusionstack.io/injected": "true"}}});
    Webhooks {
        validating: Ok(of(configuration.clone())),
        mutating: Ok(of(configuration.clone())),
        labelling: Ok(of(configuration)),
        slices: Ok(vec![of(json!({"metadata": {}, "addressType": "IPv4", "endpoints": endpoints}))]),
        namespace: "ops".to_owned(),
        valid: DryRun::Admitted { object: of(json!({"metadata": {}})) },
        invalid: DryRun::Denied {
            webhook: "validate.ctrlmesh.kusionstack.io".to_owned(),
            message: "spec.trafficInterceptRules[0].contents[0]: no".to_owned(),
        },
        pod: DryRun::Admitted { object: of(pod) },
    }
}
