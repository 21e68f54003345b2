use std::future;
use std::sync::Mutex;

use http::{Method, Request, Response};
use kube::client::Body;
use tokio::sync::watch;

use super::*;
use crate::cluster::cache::Snapshot;
use crate::cluster::plan;
use crate::drain::Drain;
use crate::rules::shared::Shared;

/// A root of two shards with `pods` without labels, and a standalone shard of team `selector`.
fn planned(selector: &str, pods: usize) -> Plan {
    let owner = "ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: op, uid: a, controller: true}]";
    let pod = |number| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: op-{number}, namespace: ops, uid: u{number}, annotations: {{ctrlmesh.kusionstack.io/injected: 'true'}}, \
             labels: {{ctrlmesh.kusionstack.io/enable-proxy: 'true'}}, {owner}}}\n---\n"
        )
    };
    let root = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: op, namespace: ops, uid: '1'}\n\
        spec: {root: {prefix: r, targetStatefulSet: op, auto: {shardingSize: 2, everyShardReplicas: 200}}}\n---\n";
    let other = format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: other, namespace: ops, uid: '2'}}\n\
         spec: {{selector: {{matchLabels: {{app: other}}}}, limits: [{{selector: {{matchLabels: {{team: {selector}}}}}}}]}}\n---\n"
    );
    let pods: String = (0..pods).map(pod).collect();
    let snapshot = Snapshot::of_manifests(&(root.to_owned() + &other + &pods));
    plan::of(snapshot, &BTreeMap::new())
}

/// Runs a writer for `plan` and the plans that follow, until the drain is dropped.
fn written_by(client: Client, may_write: bool, plan: Plan) -> (watch::Sender<Option<Arc<Plan>>>, Drain) {
    let control = ClusterWriter {
        client: client.clone(),
        recorder: EventRecorder::new(client, "test".into()),
        contacts: Arc::default,
        labels: |_: &[Shared<ShardingConfig>]| (None, LabelCoverages::default()),
        fences: watch::Sender::default().subscribe(),
        rollouts: watch::Sender::default().subscribe(),
        ownerships: watch::Sender::default().subscribe(),
        may_write: move || may_write,
    };
    let (plans, newest) = watch::channel(Some(Arc::new(plan)));
    let drain = Drain::default();
    drain.spawn(control.run(newest));
    (plans, drain)
}

#[tokio::test(start_paused = true)]
async fn a_division_is_written_while_hundreds_of_labels_hang() {
    let (sender, mut written) = mpsc::unbounded_channel::<String>();
    let hung = Arc::new(Mutex::new(0));
    let count = Arc::clone(&hung);
    let service = tower::service_fn(move |request: Request<Body>| {
        let (sender, count) = (sender.clone(), Arc::clone(&count));
        async move {
            let path = request.uri().path().to_owned();
            if request.method() == Method::PATCH && path.contains("/pods/") {
                *count.lock().unwrap() += 1;
                return future::pending::<kube::Result<_>>().await;
            }
            if request.method() == Method::PUT && path.ends_with("/status") {
                let body = request.into_body().collect_bytes().await?;
                sender.send(path).unwrap();
                return Ok(Response::new(Body::from(body)));
            }
            let missing = r#"{"kind":"Status","apiVersion":"v1","code":404,"reason":"NotFound","message":"none","status":"Failure"}"#;
            Ok(Response::builder().status(404).body(Body::from(missing.as_bytes().to_vec())).unwrap())
        }
    });
    let client = Client::new(service, "default");
    let (plans, _drain) = written_by(client, true, planned("a", 400));
    let status_of_other = "/apis/ctrlmesh.kusionstack.io/v1alpha1/namespaces/ops/shardingconfigs/other/status";
    while written.recv().await.as_deref() != Some(status_of_other) {}
    plans.send_replace(Some(Arc::new(planned("b", 400))));
    while written.recv().await.as_deref() != Some(status_of_other) {}
    let hung = *hung.lock().unwrap();
    assert!((1..100).contains(&hung), "{hung} of 400 were tried");
}

#[tokio::test(start_paused = true)]
async fn who_does_not_lead_writes_nothing() {
    let (asked, mut requests) = mpsc::unbounded_channel();
    let service = tower::service_fn(move |request: Request<Body>| {
        asked.send(request.uri().path().to_owned()).unwrap();
        future::pending::<kube::Result<Response<Body>>>()
    });
    let client = Client::new(service, "default");
    let (plans, _drain) = written_by(client, false, planned("a", 3));
    for selector in ["b", "c"] {
        time::sleep(Duration::from_mins(1)).await;
        plans.send_replace(Some(Arc::new(planned(selector, 3))));
    }
    time::sleep(Duration::from_mins(1)).await;
    let asked = requests.try_recv();
    assert!(asked.is_err(), "{asked:?}");
}
