//! The managers' roles grant exactly what the managers request, by the audit log.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use ctrlmesh_common::api::{CircuitBreaker, FaultInjection, ShardingConfig};
use ctrlmesh_common::names::{CA_SECRET, resource_list, root_ca};
use ctrlmesh_manager::install::rbac::{ACCOUNT, BACKGROUND, NAMESPACE, ROLES, Scope};
use ctrlmesh_manager::labels::POLICY;
use ctrlmesh_manager::ownership::fence_names::object_name;
use ctrlmesh_testbed::audit_log::{AuditEvent, User};
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingAdmissionPolicy, MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tempfile::TempDir;

use crate::audit::{PROGRAM, requests};
use crate::bed::{AUDIENCE, PATIENCE, eventually};
use crate::full::{OPERATOR, ROOT, SYSTEM, divide_fenced, world};
use crate::process::Replica;
use crate::token::{self, TestPod};

pub(crate) mod installed;
mod rollout;

/// What is granted and not asked for here: by whom, of what, how.
const NOT_ASKED: [(&str, &str, &str); 4] = [
    // The API server looks itself whether whoever writes a fence has this right.
    (ACCOUNT, "configmaps", "get"),
    // Only where the plugin OwnerReferencesPermissionEnforcement is on.
    (ACCOUNT, "shardingconfigs/finalizers", "update"),
    // Where the same is told again.
    (ACCOUNT, "events", "patch"),
    (BACKGROUND, "events", "patch"),
];

/// Something that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Ask {
    account: &'static str,
    namespace: String,
    group: String,
    /// With the subresource.
    resource: String,
    /// Of which object; empty where it was none, or any.
    name: String,
    verb: String,
}

type Requests = BTreeSet<Ask>;

/// What is granted and was not asked for: by whom, of what, how, and of which object.
type UnusedRights = BTreeSet<(&'static str, &'static str, &'static str, &'static str)>;

/// What the managers have asked for, and what of that they were refused.
fn asked(cluster: &ControlPlane) -> (Requests, BTreeSet<String>) {
    let (mut asked, mut refused) = (Requests::new(), BTreeSet::new());
    for event in AuditEvent::read(&cluster.audit_log(), PROGRAM).unwrap() {
        let is = |user: &User, account: &str| user.username == format!("system:serviceaccount:{NAMESPACE}:{account}");
        if !event.user_agent.starts_with(PROGRAM) || !is(&event.user, ACCOUNT) {
            continue;
        }
        let account = if is(&event.impersonated_user, BACKGROUND) { BACKGROUND } else { ACCOUNT };
        if event.is_forbidden() {
            refused.insert(format!("{account}: {} {}", event.verb, event.uri));
        }
        let ask = Ask {
            account,
            resource: event.object.with_subresource(),
            namespace: event.object.namespace,
            group: event.object.api_group,
            name: event.object.name,
            verb: event.verb,
        };
        // What is applied and is not there is created.
        if ask.verb == "patch" && event.response_status.code == 201 {
            asked.insert(Ask { verb: "create".to_owned(), ..ask.clone() });
        }
        asked.insert(ask);
        if account == BACKGROUND {
            asked.insert(Ask {
                account: ACCOUNT,
                namespace: NAMESPACE.to_owned(),
                group: String::new(),
                resource: "serviceaccounts".to_owned(),
                name: BACKGROUND.to_owned(),
                verb: "impersonate".to_owned(),
            });
        }
    }
    (asked, refused)
}

/// What is granted and was not asked for: of what is granted by name each name, of all else more than one.
fn not_asked(asked: &Requests) -> UnusedRights {
    let mut left = UnusedRights::new();
    for role in &ROLES {
        for (right, resource) in role.rules.iter().flat_map(|right| right.resources.iter().map(move |one| (right, one)))
        {
            for verb in right.verbs {
                let here = |namespace: &str| match role.scope {
                    Scope::Cluster => true,
                    Scope::Namespace(scope) => namespace == scope,
                };
                let of_it = asked.iter().filter(|ask| {
                    (ask.account, ask.group.as_str(), ask.resource.as_str(), ask.verb.as_str())
                        == (role.account, right.group, *resource, *verb)
                        && here(&ask.namespace)
                });
                let names: BTreeSet<&str> = of_it.map(|ask| ask.name.as_str()).collect();
                let all = match *verb {
                    // The name is in no URL.
                    "create" => !names.is_empty(),
                    // Of one object only, they could be granted by its name.
                    "list" | "watch" => names.contains(""),
                    _ => names.len() > 1,
                };
                let missing = right.names.iter().copied().filter(|name| !names.contains(name));
                let any = (right.names.is_empty() && !all).then_some("more than one");
                left.extend(missing.chain(any).map(|name| (role.account, *resource, *verb, name)));
            }
        }
    }
    left
}

/// Two managers that may do what the table says, and the first's arguments.
async fn managers(cluster: &ControlPlane, client: &Client, folder: &TempDir) -> ([Replica; 2], Vec<String>) {
    let pods: [TestPod; 2] = [
        token::pod(client, SYSTEM, "ctrlmesh-manager-0", ACCOUNT, "node-a").await,
        token::pod(client, SYSTEM, "ctrlmesh-manager-1", ACCOUNT, "node-a").await,
    ];
    let api = pods[0].token(client, "https://kubernetes.default.svc").await;
    let kubeconfig = token::kubeconfig(cluster, &api, folder);
    let mut all = Vec::new();
    for pod in &pods {
        let file = folder.path().join(&pod.name);
        fs::write(&file, pod.token(client, AUDIENCE).await).unwrap();
        let told = [
            "--kubeconfig",
            &kubeconfig,
            "--background-account",
            BACKGROUND,
            "--webhook-host",
            "127.0.0.1",
            "--token",
            &file.display().to_string(),
        ]
        .map(str::to_owned);
        all.push(told.to_vec());
    }
    let start = async |told: &[String]| {
        let told: Vec<&str> = told.iter().map(String::as_str).collect();
        let replica = Replica::start(cluster, SYSTEM, &told).await;
        replica.until_ready().await;
        replica
    };
    let replicas = [start(&all[0]).await, start(&all[1]).await];
    (replicas, all.remove(0))
}

/// Has the managers do everything that they do.
async fn everything(cluster: &ControlPlane, client: &Client, folder: &TempDir) -> [Replica; 2] {
    let ([mut first, second], mut told) = managers(cluster, client, folder).await;
    let shards: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    // The proxies of its pods say nothing, so a fenced one would wait for them.
    divide_fenced(client, "Off", 3, None).await;
    eventually("three shards", async || shards.get("op-3-normal").await.ok()).await;
    for name in ["op-0", "op-1"] {
        token::pod(client, OPERATOR, name, "operator", "node-a").await;
    }
    let believed: Api<ConfigMap> = Api::namespaced(client.clone(), OPERATOR);
    eventually("an authority", async || believed.get(root_ca::MESH).await.ok()).await;
    let wrong = Patch::Merge(json!({"data": {root_ca::KEY: "nobody"}}));
    believed.patch(root_ca::MESH, &PatchParams::default(), &wrong).await.unwrap();
    divide_fenced(client, "Off", 1, None).await;
    for name in ["op-2-normal", "op-3-normal"] {
        eventually("one shard", async || shards.get_opt(name).await.unwrap().is_none().then_some(())).await;
    }
    let policies: Api<MutatingAdmissionPolicy> = Api::all(client.clone());
    eventually("what labels at once", async || policies.get(POLICY).await.ok()).await;
    fences(client).await;
    breakers_and_faults(client).await;
    rollout::rollouts(client, folder).await;
    // The API server is reached by another name: the authorities are exchanged.
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM);
    let before = secrets.get(CA_SECRET).await.unwrap().resource_version();
    first.program().kill();
    told.extend(["--api-server-name".to_owned(), "api.example.com".to_owned()]);
    let told: Vec<&str> = told.iter().map(String::as_str).collect();
    let first = Replica::start(cluster, SYSTEM, &told).await;
    assert!(second.terminated().await.success());
    eventually("another authority", async || {
        let now = secrets.get(CA_SECRET).await.unwrap().resource_version();
        (now != before).then_some(())
    })
    .await;
    let second = Replica::start(cluster, SYSTEM, &told).await;
    exchanged(cluster, client).await;
    // Of what is listed and not served people hear.
    list(client, "groupVersionKinds: {v1: [ConfigMap, Nothing]}").await;
    eventually("what is not served to be told", async || {
        // The log is long.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let told = |ask: &Ask| ask.account == BACKGROUND && ask.resource == "events";
        asked(cluster).0.iter().any(told).then_some(())
    })
    .await;
    // Nothing is listed any more, and no root names anything: nothing labels at once.
    list(client, "").await;
    shards.delete(ROOT, &DeleteParams::default()).await.unwrap();
    [first, second]
}

/// Has the managers write, restore and remove two fences.
async fn fences(client: &Client) {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(client.clone());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(client.clone());
    for name in ["fenced-a", "fenced-b"] {
        let kinds = json!([{"apiGroups": ["example.com"], "resources": [name]}]);
        let root = json!({"metadata": {"name": name}, "spec": {"root": {
            "prefix": name, "targetStatefulSet": name, "fence": "Server",
            "auto": {"shardingSize": 1, "everyShardReplicas": 1}, "resourceSelector": [{"relateResources": kinds}],
        }}});
        roots.create(&PostParams::default(), &serde_json::from_value(root).unwrap()).await.unwrap();
        let policy = object_name(OPERATOR, name);
        let table = async |epoch: u64| {
            let table = json!({"epoch": epoch, "podUids": {"1": format!("{name}-1-normal")}});
            let status = Patch::Merge(json!({"status": {"ownership": table}}));
            roots.patch_status(name, &PatchParams::default(), &status).await.unwrap();
        };
        let tables: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM);
        eventually("a fence with its table", async || {
            // The managers may write the status at the same moment.
            table(1).await;
            bindings.get_opt(&policy).await.unwrap()?;
            tables.get_opt(&policy).await.unwrap()
        })
        .await;
        eventually("the next table", async || {
            table(1000).await;
            let data = tables.get_opt(&policy).await.unwrap()?.data?;
            (data["epoch"].parse::<u64>().unwrap() >= 1000).then_some(())
        })
        .await;
        let weak = Patch::Merge(json!({"spec": {"failurePolicy": "Ignore"}}));
        policies.patch(&policy, &PatchParams::default(), &weak).await.unwrap();
        let weak = Patch::Merge(json!({"spec": {"validationActions": ["Warn"]}}));
        bindings.patch(&policy, &PatchParams::default(), &weak).await.unwrap();
        eventually("the fence as it was", async || {
            let spec = policies.get(&policy).await.ok()?.spec?;
            let binding = bindings.get(&policy).await.ok()?.spec;
            (spec.failure_policy.as_deref() == Some("Fail") && binding.validation_actions == ["Deny"]).then_some(())
        })
        .await;
        roots.delete(name, &DeleteParams::default()).await.unwrap();
        eventually("no fence", async || policies.get_opt(&policy).await.unwrap().is_none().then_some(())).await;
    }
}

/// Has the managers write the status of two breakers and of two injections.
async fn breakers_and_faults(client: &Client) {
    let breakers: Api<CircuitBreaker> = Api::namespaced(client.clone(), OPERATOR);
    for name in ["breaker-a", "breaker-b"] {
        let all = json!({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"], "namespaces": ["*"]});
        let rule = json!({"name": "all", "triggerPolicy": "ForceClosed", "resourceRules": [all]});
        let spec = json!({"selector": {"matchLabels": {"app": "none"}}, "rateLimitings": [rule]});
        let breaker = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
        breakers.create(&PostParams::default(), &breaker).await.unwrap();
        eventually("its status", async || breakers.get(name).await.ok()?.status).await;
    }
    let injections: Api<FaultInjection> = Api::namespaced(client.clone(), OPERATOR);
    for name in ["faults-a", "faults-b"] {
        let spec = json!({"selector": {"matchLabels": {"app": "none"}}, "disabled": true});
        let injection = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
        injections.create(&PostParams::default(), &injection).await.unwrap();
        eventually("its status", async || injections.get(name).await.ok()?.status).await;
    }
}

/// Has the managers label these kinds.
async fn list(client: &Client, kinds: &str) {
    let lists: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM);
    let said = Patch::Merge(json!({"data": {resource_list::KEY: kinds}}));
    lists.patch(resource_list::NAME, &PatchParams::default(), &said).await.unwrap();
}

/// Has those who exchange authorities tell the API server again whom to believe where it asks for labels. Those who
/// keep what labels at once do that, too, and may come first.
async fn exchanged(cluster: &ControlPlane, client: &Client) {
    let webhooks: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let wrong = Some(ByteString(fs::read(cluster.ca()).unwrap()));
    let is_told = || {
        let resource = "mutatingwebhookconfigurations";
        requests(cluster)
            .iter()
            .any(|one| (one.verb.as_str(), one.resource.as_str(), one.name.as_str()) == ("update", resource, POLICY))
    };
    eventually("the right authority to be believed again", async || {
        if is_told() {
            return Some(());
        }
        let mut one = webhooks.get(POLICY).await.ok()?;
        let believed = &mut one.webhooks.as_mut()?[0].client_config.ca_bundle;
        if *believed != wrong {
            believed.clone_from(&wrong);
            // The managers may write it at the same moment.
            webhooks.replace(POLICY, &PostParams::default(), &one).await.ok();
        }
        // The log is long.
        tokio::time::sleep(Duration::from_millis(500)).await;
        None
    })
    .await;
}

#[tokio::test]
async fn the_managers_have_all_rights_that_they_use_and_no_others() {
    let options = Options { audit: true, ..Options::default() };
    let cluster = ControlPlane::start(&options).unwrap();
    let client = cluster.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    installed::grant(&client).await;
    installed::registered(&client).await;
    let _managers = everything(&cluster, &client, &folder).await;
    let mut left = BTreeSet::new();
    let all = tokio::time::timeout(PATIENCE, async {
        loop {
            left = not_asked(&asked(&cluster).0);
            // What is rarely asked for may have been asked for this time.
            left.retain(|(account, resource, verb, _)| !NOT_ASKED.contains(&(account, resource, verb)));
            if left.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    });
    let all = all.await;
    assert_eq!(asked(&cluster).1, BTreeSet::new(), "asked for, and refused");
    assert!(all.is_ok(), "granted, and never asked for: {left:?}");
}
