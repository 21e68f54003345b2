//! An API server that all tests share, a namespace for each, and proxies before it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;

use bytes::Bytes;
use ctrlmesh_testbed::ControlPlane;
use http::{Request, StatusCode, Version};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::harness::client::{Answer, Client};
use crate::harness::pki::Pki;
use crate::harness::proxy::Proxy;
use crate::harness::until;

/// The group of the custom resource.
pub(crate) const WIDGETS: &str = "proxy.test";

/// How often the policy changes under a client; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const CHANGES: usize = 30;

/// The objects that the writer writes.
pub(crate) const OBJECTS: usize = 30;

/// The object that every policy lets be seen: of it a client must see each version.
pub(crate) const ALWAYS: &str = "always";

/// Its slot.
const ALWAYS_SLOT: usize = 9;

/// How often the policy changes under a client.
pub(crate) fn changes() -> usize {
    if ctrlmesh_testbed::is_full() { CHANGES * 10 } else { CHANGES }
}

/// An API server, and what is needed to ask it in a test's own namespace.
pub(crate) struct Bed {
    pub(crate) plane: &'static ControlPlane,
    pub(crate) pki: Pki,
    pub(crate) namespace: String,
    pub(crate) token: String,
    /// Its administrator's: dialling anew for each request costs more than the request.
    admin: kube::Client,
}

impl Bed {
    pub(crate) async fn new() -> Self {
        let plane = ControlPlane::shared();
        let namespace = plane.namespace("proxy").await.unwrap();
        let audience = "https://kubernetes.default.svc";
        let token = plane.pod_token(&namespace, "operator-0", &[audience]).await.unwrap().token;
        let pki = Pki::new();
        fs::copy(plane.ca(), pki.path("real.crt")).unwrap();
        let admin = plane.client().await.unwrap();
        let bed = Self { plane, pki, namespace, token, admin };
        let binding = json!({
            "metadata": {"name": bed.namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": "operator-0", "namespace": bed.namespace}],
        });
        bed.admin("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await;
        bed
    }

    /// Asks the API server itself; nothing where it refuses.
    pub(crate) async fn admin(&self, method: &str, target: &str, body: &Value) -> Option<Value> {
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = Request::builder().method(method).uri(target).header("content-type", kind).body(body).unwrap();
        self.admin.request(request).await.ok()
    }

    pub(crate) fn config_maps(&self) -> String {
        format!("/api/v1/namespaces/{}/configmaps", self.namespace)
    }

    pub(crate) async fn create(&self, name: &str, slot: usize) {
        let body = json!({"metadata": {"name": name, "labels": {"slot": slot.to_string()}}});
        self.admin("POST", &self.config_maps(), &body).await;
    }

    /// Makes widgets known, and returns where this namespace's are.
    pub(crate) async fn widgets(&self) -> String {
        let definition = json!({
            "metadata": {"name": format!("widgets.{WIDGETS}")},
            "spec": {
                "group": WIDGETS, "scope": "Namespaced",
                "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
                "versions": [{
                    "name": "v1", "served": true, "storage": true,
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
                    "additionalPrinterColumns": [{"name": "Slot", "type": "string", "jsonPath": ".spec.slot"}],
                }],
            },
        });
        let kind = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        // Another test may have done it already.
        self.admin("POST", kind, &definition).await;
        let target = format!("/apis/{WIDGETS}/v1/namespaces/{}/widgets", self.namespace);
        until("the custom resource to be served", || async {
            self.admin("GET", &target, &Value::Null).await.is_some()
        })
        .await;
        target
    }

    /// Asks the API server itself, byte for byte as the operator would.
    pub(crate) async fn direct(&self, version: Version, target: &str, accept: &str) -> Answer {
        let pki = Pki::new();
        fs::copy(self.plane.ca(), pki.path("mesh.crt")).unwrap();
        self.ask(&pki, self.upstream(), version, target, accept).await
    }

    /// Asks through a proxy.
    pub(crate) async fn by(&self, proxy: &Proxy, version: Version, target: &str, accept: &str) -> Answer {
        self.ask(&self.pki, proxy.address, version, target, accept).await
    }

    async fn ask(&self, pki: &Pki, address: SocketAddr, version: Version, target: &str, accept: &str) -> Answer {
        Client::connect(pki, address, version).await.ask(self.get(target, accept)).await
    }

    /// The operator's request.
    pub(crate) fn get(&self, target: &str, accept: &str) -> Request<Full<Bytes>> {
        let token = format!("Bearer {}", self.token);
        let request = Request::get(target).header("authorization", token).header("accept", accept);
        request.body(Full::default()).unwrap()
    }

    pub(crate) fn upstream(&self) -> SocketAddr {
        self.plane.url().strip_prefix("https://").unwrap().parse().unwrap()
    }

    /// Name and version of what the API server has.
    pub(crate) async fn truth(&self, selector: &str) -> BTreeMap<String, String> {
        let selector = selector.replace(' ', "%20").replace(',', "%2C");
        let target = format!("{}?labelSelector={selector}", self.config_maps());
        let list = self.admin("GET", &target, &Value::Null).await.unwrap();
        let text = |item: &Value, field: &str| item["metadata"][field].as_str().unwrap().to_owned();
        let items = list["items"].as_array().unwrap();
        items.iter().map(|item| (text(item, "name"), text(item, "resourceVersion"))).collect()
    }

    /// A proxy that lets only what `selector` matches be seen.
    pub(crate) fn proxy(&self, name: &str, selector: &str) -> Proxy {
        write_policy(&self.pki, name, selector);
        Proxy::start(&self.pki, self.upstream(), &["--policy", self.pki.path(name).to_str().unwrap()])
    }

    pub(crate) async fn through(&self, proxy: &Proxy, version: Version, target: &str) -> (StatusCode, Value) {
        let answer = self.by(proxy, version, target, "application/json").await;
        (answer.status, serde_json::from_slice(&answer.body).unwrap_or_default())
    }
}

/// Lets only what `selector` matches be seen of config maps and widgets.
pub(crate) fn write_policy(pki: &Pki, name: &str, selector: &str) {
    write_policy_with(pki, name, selector, &json!({}));
}

/// The same, with faults, in this epoch.
pub(crate) fn write_faulty(pki: &Pki, name: &str, selector: &str, epoch: u64, faults: &Value) {
    write_policy_with(pki, name, selector, &json!({"epoch": epoch, "faults": faults}));
}

/// The same, with these fields beside.
pub(crate) fn write_policy_with(pki: &Pki, name: &str, selector: &str, fields: &Value) {
    let mut policy = json!({"epoch": 0, "limits": [{
        "relateResources": [
            {"apiGroups": [""], "resources": ["configmaps"]},
            {"apiGroups": [WIDGETS], "resources": ["widgets"]},
        ],
        "selector": selector,
    }]});
    for (field, value) in fields.as_object().unwrap() {
        policy[field] = value.clone();
    }
    let next = pki.path("next");
    fs::write(&next, policy.to_string()).unwrap();
    fs::rename(next, pki.path(name)).unwrap();
}

pub(crate) fn names(list: &Value) -> BTreeSet<String> {
    let items = list["items"].as_array().into_iter().flatten();
    items.map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}

/// What the proxy lets be seen after so many changes: never the same twice in a row.
pub(crate) fn selector_after(change: usize) -> String {
    let slots = [change % 8, (change * 3 + 1) % 8, (change * 5 + 2) % 8, ALWAYS_SLOT];
    format!("slot in ({})", slots.map(|slot| slot.to_string()).join(","))
}

/// What a client watches while the policy changes.
pub(crate) async fn create_objects(bed: &Bed) {
    for number in 0..OBJECTS {
        bed.create(&format!("c{number}"), number % 8).await;
    }
    bed.create(ALWAYS, ALWAYS_SLOT).await;
}

/// Changes, relabels, deletes and creates, differently each time; and changes the object that is always seen, whose
/// version is returned.
pub(crate) async fn write(bed: &Bed, step: usize) -> u64 {
    let name = format!("c{}", step * 7 % OBJECTS);
    let target = format!("{}/{name}", bed.config_maps());
    match step % 5 {
        0 => drop(bed.admin("DELETE", &target, &Value::Null).await),
        1 | 2 => bed.create(&name, step % 8).await,
        3 => drop(bed.admin("PATCH", &target, &json!({"data": {"step": step.to_string()}})).await),
        _ => {
            let labels = json!({"metadata": {"labels": {"slot": (step / 3 % 8).to_string()}}});
            drop(bed.admin("PATCH", &target, &labels).await);
        }
    }
    let always = format!("{}/{ALWAYS}", bed.config_maps());
    let data = json!({"data": {"step": step.to_string()}});
    let written = bed.admin("PATCH", &always, &data).await.unwrap();
    written["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
}
