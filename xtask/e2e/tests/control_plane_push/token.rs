//! Valid tokens, and invalid ones that look valid.

use std::fs;
use std::time::{Duration, SystemTime};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use ctrlmesh_testbed::ControlPlane;
use data_encoding::BASE64URL_NOPAD;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject as _;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A pod, as the API server knows it.
#[derive(Clone, Debug)]
pub(crate) struct TestPod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    account: String,
}

/// Makes a pod on a node; nothing runs it.
pub(crate) async fn pod(client: &Client, namespace: &str, name: &str, account: &str, node: &str) -> TestPod {
    make(client, (namespace, name), account, node, json!([])).await
}

/// Makes a pod of an operator that has a proxy inside, and is ready, as a share waits for that; nothing runs either.
pub(crate) async fn pod_with_proxy(client: &Client, namespace: &str, name: &str) -> TestPod {
    let proxy = json!([{"name": "ctrlmesh-proxy", "image": "none", "restartPolicy": "Always"}]);
    let pod = make(client, (namespace, name), "operator", "node-a", proxy).await;
    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    pods.patch_status(name, &PatchParams::default(), &Patch::Merge(ready)).await.unwrap();
    pod
}

async fn make(
    client: &Client,
    (namespace, name): (&str, &str),
    account: &str,
    node: &str,
    init_containers: Value,
) -> TestPod {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let made = serde_json::from_value(json!({"metadata": {"name": account}})).unwrap();
    // Another pod of the same account may have made it.
    let _made = accounts.create(&PostParams::default(), &made).await;
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let owner = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "op", "uid": "7d1", "controller": true,
    });
    let pod = json!({
        "metadata": {
            "name": name,
            "labels": {"ctrlmesh.kusionstack.io/enable-proxy": "true"},
            "annotations": {"ctrlmesh.kusionstack.io/injected": "true"},
            "ownerReferences": [owner],
        },
        "spec": {
            "serviceAccountName": account,
            "nodeName": node,
            "automountServiceAccountToken": false,
            "initContainers": init_containers,
            "containers": [{"name": "operator", "image": "none"}],
        },
    });
    let made = pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await;
    TestPod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: made.unwrap().uid().unwrap(),
        account: account.to_owned(),
    }
}

impl TestPod {
    /// A token that is bound to it.
    pub(crate) async fn token(&self, client: &Client, audience: &str) -> String {
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid});
        self.request(client, &json!({"audiences": [audience], "boundObjectRef": bound})).await
    }

    /// A token of its account that is bound to nothing.
    pub(crate) async fn unbound_token(&self, client: &Client, audience: &str) -> String {
        self.request(client, &json!({"audiences": [audience]})).await
    }

    async fn request(&self, client: &Client, spec: &Value) -> String {
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &self.namespace);
        let request: TokenRequest = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
        let parameters = PostParams::default();
        let made = accounts.create_token_request(&self.account, &parameters, &request).await;
        made.unwrap().status.unwrap().token.unwrap()
    }
}

/// A kubeconfig with a token.
pub(crate) fn kubeconfig(cluster: &ControlPlane, token: &str, folder: &TempDir) -> String {
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": cluster.url(), "certificate-authority": cluster.ca()}}],
        "users": [{"name": "u", "user": {"token": token}}],
    });
    let file = folder.path().join("kubeconfig");
    fs::write(&file, config.to_string()).unwrap();
    file.display().to_string()
}

/// The same token, signed by the API server's own key, as of another time.
pub(crate) fn shifted(plane: &ControlPlane, token: &str, by: Duration) -> String {
    let key = fs::read(plane.folder().join("pki/service-account.key")).unwrap();
    let key = PrivateKeyDer::from_pem_slice(&key).unwrap();
    let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, key.secret_der()).unwrap();
    let mut parts = token.split('.');
    let (head, claims) = (parts.next().unwrap(), parts.next().unwrap());
    let claims = BASE64URL_NOPAD.decode(claims.as_bytes()).unwrap();
    let mut claims: Value = serde_json::from_slice(&claims).unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    for (claim, at) in [("iat", now - 7200), ("nbf", now - 7200), ("exp", now + 600)] {
        claims[claim] = json!(at - by.as_secs());
    }
    let text = format!("{head}.{}", BASE64URL_NOPAD.encode(claims.to_string().as_bytes()));
    let signature = key.sign(&SystemRandom::new(), text.as_bytes()).unwrap();
    format!("{text}.{}", BASE64URL_NOPAD.encode(signature.as_ref()))
}
