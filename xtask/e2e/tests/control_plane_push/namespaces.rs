//! In which namespaces certificates of proxies are good.

use std::collections::BTreeMap;
use std::sync::Arc;

use ctrlmesh_common::names::root_ca;
use ctrlmesh_manager::ca::cluster_ca::ClusterCa;
use ctrlmesh_manager::ca::trust_bundle::TrustBundle;
use ctrlmesh_runtime::tls;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Config};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use crate::attacks::csr;
use crate::bed::{AUDIENCE, Bed, eventually, inside, policy};
use crate::token::TestPod;

const API_SERVER: &str = "kubernetes.default.svc";

/// Whether an operator that read this bundle takes who presents the chain for the API server.
fn believes(bundle: &str, chain: &[CertificateDer<'static>]) -> bool {
    let mut roots = RootCertStore::empty();
    for one in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(one.unwrap()).unwrap();
    }
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), tls::provider()).build().unwrap();
    let name = ServerName::try_from(API_SERVER).unwrap();
    verifier.verify_server_cert(&chain[0], &chain[1..], &name, &[], UnixTime::now()).is_ok()
}

async fn signed_for(bed: &Bed, pod: &TestPod) -> Vec<CertificateDer<'static>> {
    let token = pod.token(&bed.client, AUDIENCE).await;
    bed.connect(&token).await.unwrap().sign(&csr(&[API_SERVER])).await.unwrap()
}

/// What is published there. Managers of other tests publish theirs in all namespaces of this API server.
async fn published(bed: &Bed, namespace: &str) -> BTreeMap<String, String> {
    let maps: Api<ConfigMap> = Api::namespaced(bed.client.clone(), namespace);
    let ours = bed.ca_store.current().mesh.bundle_of(namespace).unwrap();
    eventually("ours to be published", async || {
        let cluster = ClusterCa::of(&Config::new("https://127.0.0.1".parse().unwrap()));
        let system = "ctrlmesh-system".to_owned();
        let bundle = TrustBundle::new(bed.client.clone(), bed.ca_store.clone(), cluster, system);
        bundle.in_namespace(namespace).await.ok()?;
        let data = maps.get(root_ca::MESH).await.ok()?.data?;
        (data[root_ca::KEY] == ours).then_some(data)
    })
    .await
}

#[tokio::test]
async fn a_pods_certificate_is_good_in_its_namespace_only() {
    let bed = Bed::new().await;
    let pod = bed.pod("op-0", "node-a").await;
    bed.publish(&[(&pod, "node-a", inside(policy(1, "a=1")))]);
    let of_pod = signed_for(&bed, &pod).await;
    let of_node = signed_for(&bed, &bed.node_pod("node-a").await).await;
    let other = bed.plane.namespace("push").await.unwrap();
    for (namespace, is_its_own) in [(&bed.namespace, true), (&other, false)] {
        let data = published(&bed, namespace).await;
        for key in [root_ca::KEY, root_ca::FAIL_OPEN_KEY] {
            assert_eq!(believes(&data[key], &of_pod), is_its_own, "{namespace}: {key}");
            assert!(believes(&data[key], &of_node), "{namespace}: {key}");
        }
    }
    assert!(!believes(&bed.ca_store.current().mesh.bundle(), &of_pod), "what proxies believe that call each other");
}
