//! Checks what `kubectl apply -k deploy/` installs.

use std::fs;
use std::path::Path;

use ctrlmesh_common::names::label;
use serde_json::{Value, json};

use crate::install::rbac::{ACCOUNT, BACKGROUND, NAMESPACE};

/// What a node's proxy needs.
const CAPABILITIES: [&str; 4] = ["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE", "KILL"];

/// All objects of a kustomization, nested ones included.
fn named_in(folder: &Path) -> Vec<Value> {
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    let kustomization: Value = serde_saphyr::from_str(&read(&folder.join("kustomization.yaml"))).unwrap();
    let names = kustomization["resources"].as_array().unwrap().iter();
    let paths = names.map(|name| folder.join(name.as_str().unwrap()));
    let objects = paths
        .map(|path| if path.is_dir() { named_in(&path) } else { serde_saphyr::from_multiple(&read(&path)).unwrap() });
    objects.flatten().collect()
}

fn object(kind: &str, name: &str) -> Value {
    let all = named_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy"));
    let mut found = all.into_iter().filter(|one| one["kind"] == kind && one["metadata"]["name"] == name);
    let object = found.next().unwrap_or_else(|| panic!("no {kind} {name}"));
    assert!(found.next().is_none(), "two of {kind} {name}");
    object
}

fn manager() -> Value {
    object("Deployment", "ctrlmesh-manager")
}

fn proxy() -> Value {
    object("DaemonSet", "ctrlmesh-node")
}

/// The only container of a workload.
fn container(workload: &Value) -> &Value {
    let pod = &workload["spec"]["template"]["spec"];
    assert!(pod["initContainers"].is_null(), "{pod}");
    let [one] = &pod["containers"].as_array().unwrap()[..] else { panic!("{pod}") };
    one
}

#[test]
fn there_are_two_managers_on_two_nodes_and_one_of_them_stays() {
    let manager = manager();
    assert_eq!(manager["spec"]["replicas"], 2);
    let ours = json!({"matchLabels": {"app.kubernetes.io/name": "ctrlmesh-manager"}});
    assert_eq!(manager["spec"]["selector"], ours);
    let apart = &manager["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        [0]["podAffinityTerm"];
    assert_eq!(*apart, json!({"topologyKey": "kubernetes.io/hostname", "labelSelector": ours}));
    let budget = object("PodDisruptionBudget", "ctrlmesh-manager");
    assert_eq!(budget["metadata"]["namespace"], NAMESPACE);
    assert_eq!((&budget["spec"]["minAvailable"], &budget["spec"]["selector"]), (&json!(1), &ours));
}

#[test]
fn the_manager_is_nobody_and_writes_nowhere() {
    let manager = manager();
    let pod = &manager["spec"]["template"]["spec"];
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    for shared in ["hostNetwork", "hostPID", "hostIPC"] {
        assert!(pod[shared].is_null(), "{shared}");
    }
    let expected = json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"]}});
    assert_eq!(container(&manager)["securityContext"], expected);
    let volumes = pod["volumes"].as_array().unwrap();
    assert!(volumes.iter().all(|volume| volume["projected"].is_object()), "{volumes:?}");
}

#[test]
fn a_nodes_proxy_has_capabilities_and_is_not_privileged() {
    let proxy = proxy();
    let pod = &proxy["spec"]["template"]["spec"];
    assert_eq!((&pod["hostNetwork"], &pod["hostPID"]), (&json!(true), &json!(true)));
    let may = &container(&proxy)["securityContext"];
    assert!(may["privileged"].is_null(), "{may}");
    assert_eq!(may["capabilities"], json!({"drop": ["ALL"], "add": CAPABILITIES}));
    assert_eq!(may["readOnlyRootFilesystem"], true);
    assert_eq!(may["allowPrivilegeEscalation"], false);
    assert_eq!(may["seccompProfile"]["type"], "RuntimeDefault");
    let mounts = container(&proxy)["volumeMounts"].as_array().unwrap();
    let cgroup = mounts.iter().find(|mount| mount["mountPath"] == "/sys/fs/cgroup").unwrap();
    assert_eq!(cgroup["readOnly"], true);
}

#[test]
fn every_node_has_a_proxy_also_during_an_upgrade() {
    let proxy = proxy();
    let pod = &proxy["spec"]["template"]["spec"];
    assert_eq!(pod["priorityClassName"], "system-node-critical");
    assert_eq!(pod["tolerations"], json!([{"operator": "Exists"}]));
    assert_eq!(pod["nodeSelector"], json!({"kubernetes.io/os": "linux"}));
    // With `maxUnavailable: 1` a node would be without a proxy for a while.
    let one = json!({"maxSurge": 1, "maxUnavailable": 0});
    let strategy = json!({"type": "RollingUpdate", "rollingUpdate": one});
    assert_eq!(proxy["spec"]["updateStrategy"], strategy);
}

#[test]
fn a_quota_allows_critical_pods_and_limits_nothing() {
    let quota = object("ResourceQuota", "ctrlmesh-critical");
    assert_eq!(quota["metadata"]["namespace"], NAMESPACE);
    assert_eq!(quota["spec"]["hard"], json!({"pods": "1G"}));
    let classes = [proxy(), manager()].map(|one| one["spec"]["template"]["spec"]["priorityClassName"].clone());
    let scope = json!({"scopeName": "PriorityClass", "operator": "In", "values": classes});
    assert_eq!(quota["spec"]["scopeSelector"], json!({"matchExpressions": [scope]}));
}

#[test]
fn no_webhook_covers_what_the_cluster_or_we_need_to_start() {
    let name = "kubernetes.io/metadata.name";
    let others = json!({"matchExpressions": [
        {"key": name, "operator": "NotIn", "values": ["kube-system", NAMESPACE]}]});
    for kind in ["ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"] {
        let configuration = object(kind, "ctrlmesh");
        for webhook in configuration["webhooks"].as_array().unwrap() {
            assert_eq!(webhook["namespaceSelector"], others, "{kind}");
            let asked = &webhook["rules"][0]["apiGroups"];
            let enrolled = json!({"matchLabels": {label::ENABLE_PROXY: "true"}});
            // Objects of other groups concern a webhook only if they are enrolled.
            let are_ours = *asked == json!([ctrlmesh_common::names::GROUP]);
            assert!(are_ours || webhook["objectSelector"] == enrolled, "{webhook}");
        }
    }
}

#[test]
fn labels_are_repaired_by_an_account_of_low_priority() {
    let level = object("PriorityLevelConfiguration", "ctrlmesh-repair");
    assert_eq!(level["spec"]["type"], "Limited");
    assert_eq!(level["spec"]["limited"]["limitResponse"]["type"], "Queue");
    let everything = json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"],
        "clusterScope": true, "namespaces": ["*"]}]);
    let accounts = [("ctrlmesh-repair", BACKGROUND), ("ctrlmesh-manager", ACCOUNT)];
    for (name, account) in accounts {
        object("ServiceAccount", account);
        let schema = object("FlowSchema", name);
        let [rule] = &schema["spec"]["rules"].as_array().unwrap()[..] else { panic!("{schema}") };
        let subject = json!({"name": account, "namespace": NAMESPACE});
        assert_eq!(rule["subjects"], json!([{"kind": "ServiceAccount", "serviceAccount": subject}]));
        assert_eq!(rule["resourceRules"], everything);
        let level = &schema["spec"]["priorityLevelConfiguration"]["name"];
        assert_eq!(level == "ctrlmesh-repair", account == BACKGROUND, "{name} goes to {level}");
    }
    let manager = manager();
    assert_eq!(manager["spec"]["template"]["spec"]["serviceAccountName"], ACCOUNT);
    let told = json!(format!("--background-account={BACKGROUND}"));
    assert!(container(&manager)["args"].as_array().unwrap().contains(&told));
}
