//! The authorities in the Secret are rotated while proxies are connected.

use std::fs;
use std::time::Duration;

use ctrlmesh_manager::ca::rotation::{AuthorityKind, Rotation};
use ctrlmesh_testbed::{ControlPlane, Options};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::api::events::v1::Event;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tempfile::TempDir;
use tokio::time;

use crate::bed::{AUDIENCE, eventually};
use crate::follow::operator;
use crate::full::{OPERATOR, SYSTEM, TEAMS, divide, enrolled, seen, world};
use crate::process::{ProxySettings, Replica, Sidecar};
use crate::replicas::presented;
use crate::token::TestPod;

/// How long an authority lives: at half of it the next is made, and signs at three quarters.
const LIFE: &str = "120s";

/// Within which the next one signs.
const SIGNS: Duration = Duration::from_mins(3);

/// Puts what is believed where proxies read it, as a kubelet does, for as long as the runtime is there.
fn mount(client: &Client, settings: &ProxySettings) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), OPERATOR);
    let folder = settings.folder.clone();
    tokio::spawn(async move {
        loop {
            let map = maps.get_opt("ctrlmesh-root-ca").await.ok().flatten();
            for (key, file) in [("manager-ca.crt", "manager.crt"), ("ca.crt", "mesh.crt")] {
                if let Some(text) = map.as_ref().and_then(|map| map.data.as_ref()?.get(key)) {
                    // Exchanged as a whole: it is read at any time.
                    fs::write(folder.join("new"), text).unwrap();
                    fs::rename(folder.join("new"), folder.join(file)).unwrap();
                }
            }
            time::sleep(Duration::from_millis(500)).await;
        }
    });
}

/// The certificates that sign now.
async fn signing(client: &Client) -> Option<[Vec<u8>; 2]> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM);
    let mut data = secrets.get("ctrlmesh-ca").await.ok()?.data?;
    Some([data.remove("mesh.crt")?.0, data.remove("manager.crt")?.0])
}

/// What pods of the operator believe where nobody but the one that signs now is trusted.
async fn former(client: &Client) -> String {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM);
    let data = secrets.get("ctrlmesh-ca").await.unwrap().data.unwrap();
    let mesh = Rotation::read(AuthorityKind::Mesh, &data).unwrap();
    Rotation { next: Vec::new(), previous: Vec::new(), ..mesh }.bundle_of(OPERATOR).unwrap()
}

/// Waits until clients that begin now see each object through exactly one of the proxies.
async fn until_served(client: &Client, settings: &ProxySettings, pods: &[TestPod; 2], sidecars: &[Sidecar; 2]) {
    eventually("new clients to be served", async || {
        let one = operator(client, settings, &pods[0], &sidecars[0]).await;
        let two = operator(client, settings, &pods[1], &sidecars[1]).await;
        let [one, two] = [seen(&one).await?, seen(&two).await?];
        (one.is_disjoint(&two) && one.union(&two).count() == TEAMS.len()).then_some(())
    })
    .await;
}

/// Has the API server know the manager's webhooks; it asks about nothing.
async fn configure(client: &Client, replica: &Replica) {
    let configuration = json!({
        "metadata": {"name": "ctrlmesh", "labels": {"app.kubernetes.io/part-of": "ctrlmesh"}},
        "webhooks": [{"name": "validate.ctrlmesh.kusionstack.io", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "clientConfig": {"url": format!("https://{}/validate", replica.webhooks)},
            "rules": [{"apiGroups": ["none.example.com"], "apiVersions": ["v1"], "resources": ["none"], "operations": ["CREATE"]}]}],
    });
    let configuration = serde_json::from_value(configuration).unwrap();
    let all: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    all.create(&PostParams::default(), &configuration).await.unwrap();
}

/// Its certificates, and what the API server is told to believe.
async fn the_running_manager_is_of_the_new_one(client: &Client, replica: &Replica) {
    for address in [replica.grpc, replica.webhooks] {
        eventually("a certificate of the new authority", async || {
            let [_, authority] = signing(client).await?;
            presented(address, std::str::from_utf8(&authority).unwrap()).await
        })
        .await;
    }
    let all: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    eventually("the API server to be told of it", async || {
        let [_, authority] = signing(client).await?;
        let hooks = all.get("ctrlmesh").await.ok()?.webhooks?;
        let bundle = String::from_utf8(hooks[0].client_config.ca_bundle.clone()?.0).unwrap();
        bundle.contains(std::str::from_utf8(&authority).unwrap().trim()).then_some(())
    })
    .await;
}

/// What operators that begin now read once, as soon as people were told that there is a next authority.
async fn told_in_time(client: &Client) -> String {
    let events: Api<Event> = Api::namespaced(client.clone(), SYSTEM);
    eventually("people to be told", async || {
        let told = events.list(&ListParams::default()).await.ok()?;
        let follows = |one: &&Event| one.reason.as_deref() == Some("AuthorityFollows");
        let note = told.items.iter().find(follows)?.note.clone()?;
        note.contains("have to be restarted").then_some(())
    })
    .await;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), OPERATOR);
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM);
    eventually("the next one to be believed", async || {
        let next = secrets.get("ctrlmesh-ca").await.ok()?.data?.remove("mesh-next.crt")?;
        let next = String::from_utf8(next.0).unwrap();
        let bundle = maps.get_opt("ctrlmesh-root-ca").await.ok()??.data?.remove("ca.crt")?;
        (!next.trim().is_empty() && bundle.contains(next.trim())).then_some(bundle)
    })
    .await
}

/// Waits until another authority signs than `before`.
async fn another_signs(client: &Client, before: &[Vec<u8>; 2]) -> [Vec<u8>; 2] {
    let others = async {
        loop {
            let now = signing(client).await;
            let all_differ = |now: &[Vec<u8>; 2]| now.iter().zip(before).all(|(a, b)| a != b);
            if let Some(now) = now.filter(all_differ) {
                break now;
            }
            time::sleep(Duration::from_millis(200)).await;
        }
    };
    time::timeout(SIGNS, others).await.expect("others to sign")
}

/// Who read the bundle when people were told believes, after the exchange, a proxy that begins then. On a machine so
/// slow that yet another one signs meanwhile, it is tried with that.
async fn who_read_it_in_time_believes_what_is_signed_then(client: &Client, settings: &ProxySettings, pod: &TestPod) {
    for _ in 0..5 {
        let (before, former) = (signing(client).await.unwrap(), former(client).await);
        let told = told_in_time(client).await;
        another_signs(client, &before).await;
        // What is kept is presented: it is to have one signed.
        for path in fs::read_dir(settings.state(pod)).unwrap().map(|entry| entry.unwrap().path()) {
            if path.extension().is_some_and(|extension| extension == "pem") {
                fs::remove_file(path).unwrap();
            }
        }
        let sidecar = Sidecar::start_again(settings, pod).await;
        let [signs, _] = signing(client).await.unwrap();
        if told.contains(std::str::from_utf8(&signs).unwrap().trim()) {
            assert!(presented(sidecar.address, &told).await.is_some(), "it was told in time");
            assert!(presented(sidecar.address, &former).await.is_none(), "the former has signed it");
            return;
        }
    }
    panic!("an authority lives too short for this machine");
}

#[tokio::test]
async fn authorities_are_exchanged_and_nobody_is_cut_off() {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    let more = ["--ca-validity", LIFE];
    let mut replica = Replica::start(&cluster, SYSTEM, &more).await;
    replica.until_ready().await;
    let first = signing(&client).await.unwrap();
    configure(&client, &replica).await;
    divide(&client, 2, None).await;
    let (settings, pods) = enrolled(&cluster, &client, &replica, &folder).await;
    mount(&client, &settings);
    let start = async |pod: &TestPod| Sidecar::start(&settings, pod, &pod.token(&client, AUDIENCE).await).await;
    let sidecars = [start(&pods[0]).await, start(&pods[1]).await];
    until_served(&client, &settings, &pods, &sidecars).await;
    who_read_it_in_time_believes_what_is_signed_then(&client, &settings, &pods[0]).await;
    another_signs(&client, &first).await;
    until_served(&client, &settings, &pods, &sidecars).await;
    the_running_manager_is_of_the_new_one(&client, &replica).await;
    // Who comes back meets a certificate of the new one.
    replica.program().kill();
    let address = replica.grpc.to_string();
    let more = [&more[..], &["--listen-grpc", &address]].concat();
    let _again = Replica::start(&cluster, SYSTEM, &more).await;
    for sidecar in &sidecars {
        eventually("the proxy to be back", async || {
            (sidecar.metric("ctrlmesh_proxy_manager_connected").await > 0.0).then_some(())
        })
        .await;
    }
    divide(&client, 1, Some(json!({"replicas": 1, "inNamespaces": ["team-3"]}))).await;
    until_served(&client, &settings, &pods, &sidecars).await;
}
