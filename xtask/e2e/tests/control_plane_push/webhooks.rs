//! The webhooks, called by the API server.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ctrlmesh_manager::admission::webhook::{Handler, ReviewMemory, Route, Webhook, WebhookMetrics};
use ctrlmesh_manager::ca::authority::{Authority, Names};
use ctrlmesh_manager::drain::Drain;
use ctrlmesh_manager::listen::{Limits, Listener};
use ctrlmesh_manager::metrics::{PREFIX, Refusals};
use ctrlmesh_manager::tls::{self, Presented};
use ctrlmesh_testbed::ControlPlane;
use futures::FutureExt as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kube::core::admission::AdmissionResponse;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use rustls::sign::CertifiedKey;
use rustls_pki_types::PrivatePkcs8KeyDer;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::bed::eventually;

/// Refuses what is called so, and answers nothing, or too late, where the name asks for it.
fn handler() -> Handler {
    Arc::new(|request| {
        async move {
            match request.name.as_str() {
                "refused" => AdmissionResponse::from(&request).deny("not this one"),
                "late" => std::future::pending().await,
                "panic" => panic!("as the test wants it"),
                _ => AdmissionResponse::from(&request),
            }
        }
        .boxed()
    })
}

/// Serves webhooks; where, and who vouches for it (PEM).
async fn served(registry: &mut Registry, drain: &Drain) -> (SocketAddr, String) {
    let (names, now) = (Names::of(["127.0.0.1"]), SystemTime::now());
    let authority = Authority::generate("test", &names, Duration::from_hours(1), now).unwrap();
    let leaf = authority.issue(&names, now).unwrap();
    let key = PrivatePkcs8KeyDer::from(leaf.key).into();
    let key = CertifiedKey::from_der(leaf.chain, key, &tls::provider()).unwrap();
    let server = tls::server(Arc::new(Presented::new(key)), &[tls::ALPN_HTTP2]).unwrap();
    let route = Route { path: "/test", deadline: Duration::from_millis(500), handler: handler() };
    let webhook = Arc::new(Webhook {
        routes: BTreeMap::from([(route.path, route)]),
        metrics: WebhookMetrics::register(registry),
        drain: drain.clone(),
        memory: ReviewMemory::default(),
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = Limits { connections: 10, unproven: 10, unproven_of_one: 10 };
    let listen = Listener::new(limits, Refusals::register(registry));
    let serve = move |stream, admission| webhook.clone().serve(stream, admission);
    let acceptor = TlsAcceptor::from(Arc::new(server));
    drain.spawn(listen.run(listener, acceptor, drain.clone(), serve));
    (address, authority.pem().to_owned())
}

/// Asks `address` about `ConfigMaps` of `namespace`.
fn configuration(namespace: &str, address: SocketAddr, ca: &str) -> ValidatingWebhookConfiguration {
    let configuration = json!({
        "metadata": {"name": namespace},
        "webhooks": [{
            "name": "test.ctrlmesh.kusionstack.io",
            "clientConfig": {
                "url": format!("https://{address}/test"),
                "caBundle": ByteString(ca.as_bytes().to_vec()),
            },
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "failurePolicy": "Fail",
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "rules": [{
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["configmaps"],
            }],
        }],
    });
    serde_json::from_value(configuration).unwrap()
}

#[tokio::test]
async fn an_error_fails_only_the_review_that_it_belongs_to() {
    let plane = ControlPlane::shared();
    let client = plane.client().await.unwrap();
    let namespace = plane.namespace("webhooks").await.unwrap();
    let (mut registry, drain) = (Registry::with_prefix(PREFIX), Drain::default());
    let (address, ca) = served(&mut registry, &drain).await;
    let configurations: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let configuration = configuration(&namespace, address, &ca);
    configurations.create(&PostParams::default(), &configuration).await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let create = async |name: &str| {
        let map = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        match maps.create(&dry_run, &map).await {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    };
    // A configuration takes a moment to work.
    eventually("a refusal", async || create("refused").await.contains("not this one").then_some(())).await;
    assert_eq!(create("fine").await, "");
    assert!(create("late").await.contains("no answer within"));
    assert!(create("panic").await.contains("cannot be given"));
    assert_eq!(create("fine").await, "", "it still answers");
    configurations.delete(&namespace, &DeleteParams::default()).await.unwrap();
    let mut page = String::new();
    text::encode(&mut page, &registry).unwrap();
    assert!(page.contains("path=\"/test\",outcome=\"failed\"} 2"), "{page}");
    drain.finish(Duration::ZERO).await;
}
