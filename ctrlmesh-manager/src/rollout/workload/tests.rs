use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::json;

use super::*;

/// An API server with these objects by path, which notes what is written: method, path and body.
#[derive(Clone, Default)]
struct Server {
    objects: BTreeMap<String, Value>,
    written: Arc<Mutex<Vec<(Method, String, Value)>>>,
    /// The status of every answer to a write.
    refused: Option<u16>,
}

impl Server {
    fn with(mut self, plural: &str, name: &str, mut object: Value) -> Self {
        object["metadata"]["name"] = json!(name);
        self.objects.insert(format!("/apis/apps/v1/namespaces/ops/{plural}/{name}"), object);
        self
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move { server.answer(request).await }
        });
        Client::new(service, "default")
    }

    async fn answer(&self, request: Request<Body>) -> kube::Result<Response<Body>> {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let reply = |status: u16, value: &Value| {
            Ok(Response::builder().status(status).body(Body::from(value.to_string().into_bytes())).unwrap())
        };
        let failure = |code: u16, reason: &str| json!({"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": "", "status": "Failure"});
        if method != Method::GET {
            let body = request.into_body().collect_bytes().await?;
            self.written.lock().unwrap().push((method, path, serde_json::from_slice(&body).unwrap()));
            let code = self.refused.unwrap_or(200);
            let done = json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {}});
            return reply(code, &if code < 300 { done } else { failure(code, "Refused") });
        }
        self.objects.get(&path).map_or_else(|| reply(404, &failure(404, "NotFound")), |object| reply(200, object))
    }

    /// The only write.
    fn write(&self) -> (Method, String, Value) {
        let [write] = &self.written.lock().unwrap()[..] else { panic!("not one write") };
        write.clone()
    }

    fn writes(&self) -> usize {
        self.written.lock().unwrap().len()
    }
}

fn template(image: &str) -> Value {
    json!({"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "web", "image": image}]}})
}

fn owned(labels: Value) -> Value {
    let owner = json!({"apiVersion": "apps/v1", "kind": "X", "name": "web", "uid": "u", "controller": true});
    json!({"labels": labels, "ownerReferences": [owner]})
}

fn replica_set(hash: &str, image: &str) -> Value {
    let labels = json!({"app": "web", "pod-template-hash": hash});
    let mut hashed = template(image);
    hashed["metadata"]["labels"] = labels.clone();
    json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": owned(labels), "spec": {"template": hashed}})
}

fn revision(image: &str) -> Value {
    let mut replaced = template(image);
    replaced["$patch"] = json!("replace");
    let data = json!({"spec": {"template": replaced}});
    json!({"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": owned(json!({})), "data": data, "revision": 1})
}

fn workload(kind: &str, image: &str, status: Value) -> Value {
    let metadata = json!({"namespace": "ops", "uid": "u", "resourceVersion": "7", "generation": 3});
    json!({"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": {"template": template(image)}, "status": status})
}

/// With the template of image `b`, whose revision is `2`; before it was `a`.
fn deployment() -> Server {
    Server::default()
        .with("deployments", "web", workload("Deployment", "b", json!({})))
        .with("replicasets", "web-1", replica_set("1", "a"))
        .with("replicasets", "web-2", replica_set("2", "b"))
}

fn stateful_set(status: Value) -> Server {
    let server = Server::default().with("statefulsets", "web", workload("StatefulSet", "b", status));
    server.with("controllerrevisions", "web-1", revision("a"))
}

async fn rolled_back(server: &Server, from: &str, to: &str) -> Result<RollBack, RollBackError> {
    let is_set = server.objects.keys().any(|path| path.contains("statefulsets"));
    let name = "web".to_owned();
    let workload = if is_set { Workload::StatefulSet(name) } else { Workload::Deployment(name) };
    roll_back(&server.client(), "ops", &workload, from, to).await
}

fn put_back(plural: &str, image: &str) -> (Method, String, Value) {
    let mut replaced = template(image);
    replaced["$patch"] = json!("replace");
    let patch = json!({"metadata": {"uid": "u", "resourceVersion": "7"}, "spec": {"template": replaced}});
    (Method::PATCH, format!("/apis/apps/v1/namespaces/ops/{plural}/web"), patch)
}

#[tokio::test]
async fn a_deployment_gets_the_template_of_its_replica_set_back() {
    let server = deployment();
    assert_eq!(rolled_back(&server, "2", "1").await.unwrap(), RollBack::RolledBack);
    assert_eq!(server.write(), put_back("deployments", "a"));
}

#[tokio::test]
async fn a_stateful_set_gets_the_template_of_its_revision_back() {
    let server = stateful_set(json!({"observedGeneration": 3, "updateRevision": "web-2"}));
    assert_eq!(rolled_back(&server, "web-2", "web-1").await.unwrap(), RollBack::RolledBack);
    assert_eq!(server.write(), put_back("statefulsets", "a"));
}

#[tokio::test]
async fn a_workload_that_was_changed_since_stays_as_it_is() {
    // Of the new template there is no ReplicaSet yet.
    let changed = deployment().with("deployments", "web", workload("Deployment", "c", json!({})));
    let set = stateful_set(json!({"observedGeneration": 3, "updateRevision": "web-3"}));
    for (server, from, to) in [(deployment(), "3", "1"), (changed, "2", "1"), (set, "web-2", "web-1")] {
        assert_eq!(rolled_back(&server, from, to).await.unwrap(), RollBack::NotCurrent);
        assert_eq!(server.writes(), 0);
    }
}

#[tokio::test]
async fn a_missing_revision_is_named() {
    let set = stateful_set(json!({"observedGeneration": 3, "updateRevision": "web-2"}));
    for (server, from, to, expected) in [
        (deployment(), "2", "0", "Deployment \"web\": no ReplicaSet \"web-0\" of it is kept"),
        (set, "web-2", "web-0", "StatefulSet \"web\": no ControllerRevision \"web-0\" of it is kept"),
        (Server::default(), "2", "1", "Deployment \"web\" of namespace \"ops\" is not there"),
    ] {
        let error = rolled_back(&server, from, to).await.unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(server.writes(), 0);
    }
}

#[tokio::test]
async fn a_template_that_no_controller_saw_is_no_revision_yet() {
    let server = stateful_set(json!({"observedGeneration": 2, "updateRevision": "web-2"}));
    let error = rolled_back(&server, "web-2", "web-1").await.unwrap_err();
    assert!(matches!(error, RollBackError::NotObserved { generation: 3, .. }), "{error}");
    assert_eq!(server.writes(), 0);
}

#[tokio::test]
async fn a_conflict_is_an_error() {
    let server = Server { refused: Some(409), ..deployment() };
    let error = rolled_back(&server, "2", "1").await.unwrap_err();
    assert!(matches!(error, RollBackError::Write { .. }), "{error}");
}

#[tokio::test]
async fn exactly_the_stuck_pod_is_deleted() {
    let pod = PodName { namespace: "ops".to_owned(), name: "web-0".to_owned() };
    let server = Server { refused: Some(409), ..Server::default() };
    replace_stuck(&server.client(), &pod, "7d1").await.unwrap();
    let (method, path, body) = server.write();
    assert_eq!((method, path.as_str()), (Method::DELETE, "/api/v1/namespaces/ops/pods/web-0"));
    assert_eq!(body["preconditions"], json!({"uid": "7d1"}));
    assert_eq!(body.get("gracePeriodSeconds"), None);
    let server = Server { refused: Some(403), ..Server::default() };
    replace_stuck(&server.client(), &pod, "7d1").await.unwrap_err();
}
