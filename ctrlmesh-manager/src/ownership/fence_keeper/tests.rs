use std::convert::Infallible;

use http::{Request, Response};
use kube::client::Body;
use serde_json::json;

use super::*;
use crate::cluster::cache::Snapshot;
use crate::cluster::plan;
use crate::drain::Drain;
use crate::ownership::fence_state::FenceState;
use crate::rules::shard::Labelling;

const ROOT: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: op, namespace: ops}\nspec:\n  \
    root: {prefix: op, targetStatefulSet: op, fence: Server, auto: {shardingSize: 2, everyShardReplicas: 1}}\n";

/// An API server that serves these kinds of `admissionregistration.k8s.io/v1`, and nothing else.
fn serving(kinds: &'static [&str]) -> Client {
    let resource = |kind: &&str| {
        let plural = format!("{}s", kind.to_lowercase());
        json!({"name": plural, "singularName": "", "namespaced": false, "kind": kind, "verbs": ["list"]})
    };
    let resources: Vec<_> = kinds.iter().map(resource).collect();
    let list = json!({"kind": "APIResourceList", "apiVersion": "v1", "resources": resources,
        "groupVersion": "admissionregistration.k8s.io/v1"});
    let service = tower::service_fn(move |request: Request<Body>| {
        let is_discovery = request.uri().path() == "/apis/admissionregistration.k8s.io/v1";
        let missing = json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": ""});
        let (code, body) = if is_discovery { (200, &list) } else { (404, &missing) };
        let answer = Response::builder().status(code).body(Body::from(body.to_string().into_bytes()));
        async move { Ok::<_, Infallible>(answer.unwrap()) }
    });
    Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn a_server_without_such_policies_is_said_to_have_none() {
    let client = serving(&["ValidatingWebhookConfiguration"]);
    let drain = Drain::default();
    let cache = Cache::start(&client, "ctrlmesh-system", Labelling::default(), &drain);
    let planned = plan::of(Snapshot::of_manifests(ROOT), &BTreeMap::new());
    let (_sender, plans) = watch::channel(Some(Arc::new(planned)));
    let (states, mut known) = watch::channel(Arc::default());
    let namespace = "ctrlmesh-system".to_owned();
    let keeper = FenceKeeper { client, namespace, cache, plans, dial: |_| None, may_write: || true, states };
    let unsupported = FenceState::Open(Unfenced::Unsupported);
    tokio::select! {
        () = keeper.lead() => unreachable!(),
        found = known.wait_for(|states| states.get("ops/op") == Some(&unsupported)) => assert!(found.is_ok()),
    }
}
