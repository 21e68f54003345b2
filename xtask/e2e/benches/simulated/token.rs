//! Service-account tokens that are signed here, with the API server's own key: asking for thousands takes long.

use std::fs;
use std::time::SystemTime;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use ctrlmesh_testbed::ControlPlane;
use data_encoding::BASE64URL_NOPAD;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt as _};
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject as _;
use serde_json::{Value, json};

/// How long a token is valid, in seconds: longer than any benchmark takes.
const VALID_FOR: u64 = 24 * 3600;

/// A name and a UID.
pub(crate) type Named<'a> = (&'a str, &'a str);

/// Signs the tokens of one service account.
pub(crate) struct Signer {
    key: EcdsaKeyPair,
    /// The first part of each token, as the API server writes it.
    head: String,
    namespace: String,
    account: String,
    account_uid: String,
}

impl Signer {
    /// That of an account that is there.
    pub(crate) async fn of(plane: &ControlPlane, client: &Client, namespace: &str, account: &str) -> Self {
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
        let account_uid = accounts.get(account).await.unwrap().uid().unwrap();
        let request = json!({"metadata": {}, "spec": {"audiences": ["ctrlmesh"]}});
        let request = serde_json::from_value(request).unwrap();
        let sample = accounts.create_token_request(account, &PostParams::default(), &request).await.unwrap();
        let sample = sample.status.unwrap().token.unwrap();
        let key = fs::read(plane.folder().join("pki/service-account.key")).unwrap();
        let key = PrivateKeyDer::from_pem_slice(&key).unwrap();
        Self {
            key: EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, key.secret_der()).unwrap(),
            head: sample.split('.').next().unwrap().to_owned(),
            namespace: namespace.to_owned(),
            account: account.to_owned(),
            account_uid,
        }
    }

    /// A token for the manager, bound to a pod, and to its node where one is named.
    pub(crate) fn token(&self, pod: Named<'_>, node: Option<Named<'_>>) -> String {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let named = |(name, uid): Named<'_>| json!({"name": name, "uid": uid});
        let mut bound: Value = json!({
            "namespace": self.namespace,
            "serviceaccount": named((&self.account, &self.account_uid)),
            "pod": named(pod),
        });
        if let Some(node) = node {
            bound["node"] = named(node);
        }
        let claims = json!({
            "aud": ["ctrlmesh"],
            "exp": now + VALID_FOR,
            "iat": now,
            "nbf": now,
            "iss": "https://kubernetes.default.svc",
            "sub": format!("system:serviceaccount:{}:{}", self.namespace, self.account),
            "kubernetes.io": bound,
        });
        let text = format!("{}.{}", self.head, BASE64URL_NOPAD.encode(claims.to_string().as_bytes()));
        let signature = self.key.sign(&SystemRandom::new(), text.as_bytes()).unwrap();
        format!("{text}.{}", BASE64URL_NOPAD.encode(signature.as_ref()))
    }
}
