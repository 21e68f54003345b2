//! Several managers at once.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_manager::drain::Drain;
use ctrlmesh_manager::leader::lease::{self, Candidate};
use ctrlmesh_manager::readiness::Readiness;
use ctrlmesh_manager::tls;
use ctrlmesh_testbed::ControlPlane;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use crate::bed::{candidate, eventually, soon};
use crate::process::Replica;

/// How often the leader is killed; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const KILLS: usize = 2;

/// Within which another is to lead, where all are killed: a Lease lasts 8 s. Where fewer are, nobody measures.
const SUCCEEDED: Duration = Duration::from_secs(15);

async fn namespace() -> (&'static ControlPlane, Client, String) {
    let plane = ControlPlane::shared();
    (plane, plane.client().await.unwrap(), plane.namespace("replicas").await.unwrap())
}

/// A client that believes `bundle`.
pub(crate) fn believing(bundle: &str) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    for one in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(one.unwrap()).unwrap();
    }
    ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth()
}

/// The certificate that it presents to who believes `bundle`.
pub(crate) async fn presented(address: SocketAddr, bundle: &str) -> Option<CertificateDer<'static>> {
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = TlsConnector::from(Arc::new(believing(bundle))).connect(name, stream).await.ok()?;
    stream.get_ref().1.peer_certificates().map(|chain| chain[0].clone().into_owned())
}

pub(crate) async fn bundle(client: &Client, namespace: &str, key: &str) -> Option<String> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    maps.get_opt("ctrlmesh-root-ca").await.unwrap()?.data?.remove(key)
}

/// The one that leads, when exactly one does.
pub(crate) async fn leader(replicas: &[Replica]) -> Option<usize> {
    let mut leaders = Vec::new();
    for (at, replica) in replicas.iter().enumerate() {
        if replica.leads().await {
            leaders.push(at);
        }
    }
    match leaders[..] {
        [one] => Some(one),
        // They are asked one after the other: the lease may have passed on in between.
        [one, _, ..] if replicas[one].leads().await => panic!("{leaders:?} lead at once"),
        _ => None,
    }
}

#[tokio::test]
async fn managers_that_start_together_make_one_authority() {
    let (plane, client, namespace) = namespace().await;
    let starts = (0..4).map(|_| Replica::start(plane, &namespace, &[]));
    let replicas = futures::future::join_all(starts).await;
    for replica in &replicas {
        replica.until_ready().await;
    }
    // Managers of other tests tell every namespace, this one too, of authorities of their own.
    let certificates = eventually("all to be signed by one authority", async || {
        let manager_ca = bundle(&client, &namespace, "manager-ca.crt").await?;
        assert_eq!(manager_ca.matches("BEGIN").count(), 1);
        let mut certificates = BTreeSet::new();
        for replica in &replicas {
            for address in [replica.grpc, replica.webhooks] {
                certificates.insert(presented(address, &manager_ca).await?.to_vec());
            }
        }
        Some(certificates)
    })
    .await;
    assert_eq!(certificates.len(), 4, "each has its own key");
    let mesh = eventually("both authorities to be told", async || {
        let mesh = bundle(&client, &namespace, "ca.crt").await?;
        let both = bundle(&client, &namespace, "fail-open-ca.crt").await?;
        (both.starts_with(&mesh) && both.matches("BEGIN").count() == 2).then_some(mesh)
    })
    .await;
    assert!(presented(replicas[0].grpc, &mesh).await.is_none(), "the mesh's does not vouch for it");
}

#[tokio::test]
async fn a_leader_that_is_killed_has_a_successor_again_and_again() {
    let (plane, _, namespace) = namespace().await;
    let starts = (0..3).map(|_| Replica::start(plane, &namespace, &[]));
    let mut replicas = futures::future::join_all(starts).await;
    for replica in &replicas {
        replica.until_ready().await;
    }
    let full = ctrlmesh_testbed::is_full();
    for _ in 0..if full { KILLS * 10 } else { KILLS } {
        let first = eventually("a leader", async || leader(&replicas).await).await;
        let mut killed = replicas.remove(first);
        killed.program().kill();
        let killed = Instant::now();
        eventually("another to lead", async || leader(&replicas).await).await;
        let took = killed.elapsed();
        eprintln!("another leads after {took:?}");
        assert!(!full || took < SUCCEEDED, "another leads after {took:?} only");
        let next = Replica::start(plane, &namespace, &[]).await;
        next.until_ready().await;
        replicas.push(next);
    }
}

#[tokio::test]
async fn who_has_not_seen_everything_does_not_lead() {
    let (_, client, namespace) = namespace().await;
    let (unfit, first, second) = (Readiness::default(), Drain::default(), Drain::default());
    let caches = unfit.block("caches");
    let waiting = Candidate { readiness: unfit, ..candidate("waiting", "127.0.0.1:1") };
    let mut waiting = lease::campaign(client.clone(), &namespace, waiting, &first);
    let fit = candidate("fit", "127.0.0.1:2");
    let mut fit = lease::campaign(client, &namespace, fit, &second);
    soon("the fit one to lead", fit.acquired()).await;
    assert!(!waiting.is_held());
    eventually("the other to know it", async || waiting.other()).await;
    assert!(second.finish(Duration::from_secs(10)).await);
    drop(caches);
    soon("the other to lead", waiting.acquired()).await;
}

#[tokio::test]
async fn a_leader_that_is_asked_to_stop_gives_its_lease_back() {
    let (plane, client, namespace) = namespace().await;
    let replica = Replica::start(plane, &namespace, &[]).await;
    replica.until_ready().await;
    eventually("it to lead", async || replica.leads().await.then_some(())).await;
    let leases: Api<Lease> = Api::namespaced(client, &namespace);
    let holder = async || {
        let lease = leases.get("ctrlmesh-manager").await.unwrap();
        lease.spec.and_then(|spec| spec.holder_identity)
    };
    assert!(holder().await.is_some());
    assert!(replica.terminated().await.success());
    assert_eq!(holder().await, None);
}

#[tokio::test]
async fn only_our_webhook_configurations_get_the_ca_bundle() {
    let (plane, client, namespace) = namespace().await;
    let configurations: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let names = [format!("{namespace}-ours"), format!("{namespace}-other")];
    for (name, part_of) in names.iter().zip(["ctrlmesh", "something"]) {
        let made = json!({
            "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": part_of}},
            "webhooks": [{
                "name": "a.ctrlmesh.kusionstack.io",
                "clientConfig": {"url": "https://127.0.0.1:1/validate"},
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "failurePolicy": "Ignore",
                // Nothing is ever asked.
                "rules": [],
            }],
        });
        let made = serde_json::from_value(made).unwrap();
        configurations.create(&PostParams::default(), &made).await.unwrap();
    }
    let ca = async |name: &str| {
        let mut hooks = configurations.get(name).await.unwrap().webhooks.unwrap();
        hooks.remove(0).client_config.ca_bundle.map(|bundle| String::from_utf8(bundle.0).unwrap())
    };
    let _replica = Replica::start(plane, &namespace, &[]).await;
    eventually("ours to believe", async || {
        let told = bundle(&client, &namespace, "manager-ca.crt").await?;
        (ca(&names[0]).await? == told).then_some(())
    })
    .await;
    assert_eq!(ca(&names[1]).await, None);
    for name in &names {
        configurations.delete(name, &DeleteParams::default()).await.unwrap();
    }
}

#[tokio::test]
async fn a_new_api_server_name_is_trusted_before_it_is_signed_for() {
    let (plane, client, namespace) = namespace().await;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
    let data = async |key: &str| {
        let bytes = secrets.get("ctrlmesh-ca").await.unwrap().data.unwrap().remove(key)?;
        Some(String::from_utf8(bytes.0).unwrap())
    };
    let replica = Replica::start(plane, &namespace, &[]).await;
    replica.until_ready().await;
    let current = data("mesh.crt").await.unwrap();
    assert!(replica.terminated().await.success());
    let more = ["--api-server-name", "api.example.com"];
    let _replica = Replica::start(plane, &namespace, &more).await;
    let next = eventually("the next one", async || data("mesh-next.crt").await).await;
    assert_eq!(data("mesh.crt").await.unwrap(), current, "it signs as before");
    eventually("both to be believed", async || {
        let told = bundle(&client, &namespace, "ca.crt").await?;
        (told.contains(current.trim()) && told.contains(next.trim())).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_secret_that_holds_something_else_is_not_overwritten() {
    let (plane, client, namespace) = namespace().await;
    let secrets: Api<Secret> = Api::namespaced(client, &namespace);
    let theirs = json!({"metadata": {"name": "ctrlmesh-ca"}, "stringData": {"mesh.key": "theirs"}});
    let theirs = serde_json::from_value(theirs).unwrap();
    secrets.create(&PostParams::default(), &theirs).await.unwrap();
    let before = secrets.get("ctrlmesh-ca").await.unwrap();
    let mut replica = Replica::start(plane, &namespace, &[]).await;
    soon("it to say so", replica.program().until_ended("remove it to have it made anew")).await;
    assert_eq!(secrets.get("ctrlmesh-ca").await.unwrap().metadata.resource_version, before.metadata.resource_version);
}
