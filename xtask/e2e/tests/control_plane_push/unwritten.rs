//! A leader that may not write the Secret of the authorities gives up its Lease.

use std::time::Duration;

use ctrlmesh_common::names::CA_SECRET;
use ctrlmesh_manager::drain::Drain;
use ctrlmesh_manager::leader::lease::campaign;
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::json;
use tempfile::TempDir;

use crate::bed::{candidate, eventually};
use crate::full::{SYSTEM, world};
use crate::process::Replica;
use crate::token;

/// Who may not write the Secret.
const ACCOUNT: &str = "restricted";

/// A kubeconfig of an account that may do everything, but for what admission refuses.
pub(crate) async fn restricted(cluster: &ControlPlane, client: &Client, folder: &TempDir) -> String {
    let pod = token::pod(client, SYSTEM, "restricted-0", ACCOUNT, "node-a").await;
    let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
    let binding = json!({
        "metadata": {"name": ACCOUNT},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": SYSTEM}],
    });
    let binding = serde_json::from_value(binding).unwrap();
    bindings.create(&PostParams::default(), &binding).await.unwrap();
    let token = pod.token(client, "https://kubernetes.default.svc").await;
    token::kubeconfig(cluster, &token, folder)
}

/// Has the API server refuse the Secret from that account.
pub(crate) async fn refuse(client: &Client) {
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(client.clone());
    let rule =
        json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["secrets"], "operations": ["CREATE", "UPDATE"]});
    let account = format!("system:serviceaccount:{SYSTEM}:{ACCOUNT}");
    let policy = json!({
        "metadata": {"name": ACCOUNT},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{
                "expression": format!("request.userInfo.username != '{account}' || object.metadata.name != '{CA_SECRET}'"),
                "message": "not from this account",
            }],
        },
    });
    let policy = serde_json::from_value(policy).unwrap();
    policies.create(&PostParams::default(), &policy).await.unwrap();
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(client.clone());
    let binding =
        json!({"metadata": {"name": ACCOUNT}, "spec": {"policyName": ACCOUNT, "validationActions": ["Deny"]}});
    let binding = serde_json::from_value(binding).unwrap();
    bindings.create(&PostParams::default(), &binding).await.unwrap();
}

/// Has the API server take it again.
pub(crate) async fn let_again(client: &Client) {
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(client.clone());
    bindings.delete(ACCOUNT, &DeleteParams::default()).await.unwrap();
}

/// Waits until the API server refuses the Secret from the account of this kubeconfig.
pub(crate) async fn until_refused(kubeconfig: &str) {
    let config = Kubeconfig::read_from(kubeconfig).unwrap();
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(config, &options).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(Client::try_from(config).unwrap(), "default");
    let secret = serde_json::from_value(json!({"metadata": {"name": CA_SECRET}})).unwrap();
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    eventually("it to be refused", async || secrets.create(&dry_run, &secret).await.err().map(drop)).await;
}

#[tokio::test]
async fn a_leader_that_cannot_write_the_cas_steps_down() {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    let kubeconfig = restricted(&cluster, &client, &folder).await;
    let first = Replica::start(&cluster, SYSTEM, &["--kubeconfig", &kubeconfig]).await;
    first.until_ready().await;
    eventually("the first to lead", async || first.leads().await.then_some(())).await;
    let second = Replica::start(&cluster, SYSTEM, &[]).await;
    second.until_ready().await;
    refuse(&client).await;
    until_refused(&kubeconfig).await;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM);
    let before = secrets.get(CA_SECRET).await.unwrap();
    secrets.delete(CA_SECRET, &DeleteParams::default()).await.unwrap();

    let after = eventually("the Secret to be there again", async || secrets.get_opt(CA_SECRET).await.unwrap()).await;
    assert_ne!(after.uid(), before.uid());
    assert_eq!(after.data, before.data, "whom everybody believes");
    eventually("the second to lead, and not the first", async || {
        (second.leads().await && !first.leads().await).then_some(())
    })
    .await;
    assert!(first.metric("ctrlmesh_manager_ca_write_failures_total").await >= Some(3.0));
    assert_eq!(second.metric("ctrlmesh_manager_ca_write_failures_total").await, Some(0.0));
    let events: Api<Event> = Api::namespaced(client.clone(), SYSTEM);
    let said = eventually("an event", async || {
        let list = events.list(&ListParams::default()).await.unwrap();
        list.into_iter().find(|event| event.reason.as_deref() == Some("NotWritten"))
    })
    .await;
    assert!(said.note.unwrap_or_default().contains("not from this account"));
}

#[tokio::test]
async fn a_released_lease_returns_if_nobody_else_takes_it() {
    let plane = ControlPlane::shared();
    let client = plane.client().await.unwrap();
    let namespace = plane.namespace("given-up").await.unwrap();
    let (drain, others) = (Drain::default(), Drain::default());
    let one = campaign(client.clone(), &namespace, candidate("one", "127.0.0.1:1"), &drain);
    eventually("one to lead", async || one.is_held().then_some(())).await;
    let other = campaign(client.clone(), &namespace, candidate("other", "127.0.0.1:2"), &others);
    // Whoever does not hold it gives nothing up.
    other.step_down();
    one.step_down();
    eventually("the other to lead", async || other.is_held().then_some(())).await;
    assert!(!one.is_held());
    eventually("one to know", async || one.other().filter(|at| &**at == "127.0.0.1:2")).await;
    others.finish(Duration::from_secs(5)).await;
    eventually("one to lead again", async || one.is_held().then_some(())).await;
    one.step_down();
    eventually("it to be nobody's", async || (!one.is_held()).then_some(())).await;
    eventually("one to have it back", async || {
        assert_eq!(one.other(), None, "nobody holds it, whoever did before");
        one.is_held().then_some(())
    })
    .await;
    drain.finish(Duration::from_secs(5)).await;
}
