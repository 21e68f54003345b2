//! Pods, and tokens that are bound to them.

use std::fs;
use std::time::SystemTime;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use ctrlmesh_common::names::{annotation, label};
use ctrlmesh_testbed::ControlPlane;
use data_encoding::BASE64URL_NOPAD;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject as _;
use serde_json::json;

/// How many are made at once.
const AT_ONCE: usize = 16;

/// A pod and its token.
#[derive(Clone, Debug)]
pub(crate) struct OnePod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) token: String,
}

/// Makes a pod for each of `apps`, labelled so, all of one account. Their tokens are signed here, with the API server's
/// own key: asking for ten thousand is not what is measured.
pub(crate) async fn create(plane: &ControlPlane, namespace: &str, apps: Vec<String>) -> Vec<OnePod> {
    let client = plane.client().await.unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let account = serde_json::from_value(json!({"metadata": {"name": "operator"}})).unwrap();
    let account = accounts.create(&PostParams::default(), &account).await.unwrap();
    let request = json!({"metadata": {}, "spec": {"audiences": ["ctrlmesh"]}});
    let request = serde_json::from_value(request).unwrap();
    let parameters = PostParams::default();
    let sample = accounts.create_token_request("operator", &parameters, &request).await.unwrap();
    let sample = sample.status.unwrap().token.unwrap();
    let head = sample.split('.').next().unwrap().to_owned();
    let key = fs::read(plane.folder().join("pki/service-account.key")).unwrap();
    let key = PrivateKeyDer::from_pem_slice(&key).unwrap();
    let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, key.secret_der()).unwrap();
    let pods: Api<Pod> = Api::namespaced(client, namespace);
    let made = stream::iter(apps.into_iter().enumerate()).map(|(number, app)| {
        let pods = pods.clone();
        async move {
            let pod = json!({
                "metadata": {
                    "name": format!("operator-{number}"),
                    "labels": {"app": app, label::ENABLE_PROXY: "true"},
                    "annotations": {annotation::INJECTED: "true"},
                },
                "spec": {
                    "serviceAccountName": "operator",
                    // With the cluster's CA in it, it would count as one that was admitted past the manager.
                    "automountServiceAccountToken": false,
                    "containers": [{"name": "operator", "image": "none"}],
                },
            });
            let pod = serde_json::from_value(pod).unwrap();
            pods.create(&PostParams::default(), &pod).await.unwrap()
        }
    });
    let made: Vec<Pod> = made.buffer_unordered(AT_ONCE).collect().await;
    let account_uid = account.uid().unwrap();
    let token = |pod: &Pod| token(&key, &head, namespace, &account_uid, pod);
    made.iter()
        .map(|pod| OnePod {
            namespace: namespace.to_owned(),
            name: pod.name_any(),
            uid: pod.uid().unwrap(),
            token: token(pod),
        })
        .collect()
}

fn token(key: &EcdsaKeyPair, head: &str, namespace: &str, account: &str, pod: &Pod) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let claims = json!({
        "aud": ["ctrlmesh"],
        "exp": now + 3600,
        "iat": now,
        "nbf": now,
        "iss": "https://kubernetes.default.svc",
        "sub": format!("system:serviceaccount:{namespace}:operator"),
        "kubernetes.io": {
            "namespace": namespace,
            "serviceaccount": {"name": "operator", "uid": account},
            "pod": {"name": pod.name_any(), "uid": pod.uid().unwrap()},
        },
    });
    let text = format!("{head}.{}", BASE64URL_NOPAD.encode(claims.to_string().as_bytes()));
    let signature = key.sign(&SystemRandom::new(), text.as_bytes()).unwrap();
    format!("{text}.{}", BASE64URL_NOPAD.encode(signature.as_ref()))
}
