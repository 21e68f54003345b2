//! Through the proxy to a real API server.
#![allow(clippy::large_futures, clippy::float_cmp, reason = "one per test, and never moved")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]
#![allow(clippy::disallowed_methods, reason = "tests are not drained")]

mod harness;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use ctrlmesh_testbed::ControlPlane;
use harness::client::Client;
use harness::pki::Pki;
use harness::proxy::Proxy;
use harness::{soon, until};
use http::{Request, StatusCode, Version};
use http_body_util::Full;
use serde_json::{Value, json};

/// How often the policy changes under the informer; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const CHANGES: usize = 30;

/// The objects that the writer writes.
const OBJECTS: usize = 30;

/// An API server, and what is needed to ask it in a test's own namespace.
struct Bed {
    plane: &'static ControlPlane,
    pki: Pki,
    namespace: String,
    token: String,
}

impl Bed {
    async fn new() -> Self {
        let plane = ControlPlane::shared();
        let namespace = plane.namespace("proxy").await.unwrap();
        let audience = "https://kubernetes.default.svc";
        let token = plane.pod_token(&namespace, "operator-0", &[audience]).await.unwrap().token;
        let pki = Pki::new();
        fs::copy(plane.ca(), pki.path("real.crt")).unwrap();
        let bed = Self { plane, pki, namespace, token };
        let binding = json!({
            "metadata": {"name": bed.namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": "operator-0", "namespace": bed.namespace}],
        });
        bed.admin("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await;
        bed
    }

    /// Asks the API server itself; nothing where it refuses.
    async fn admin(&self, method: &str, target: &str, body: &Value) -> Option<Value> {
        let kind =
            if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = Request::builder()
            .method(method)
            .uri(target)
            .header("content-type", kind)
            .body(body)
            .unwrap();
        self.plane.client().await.unwrap().request(request).await.ok()
    }

    fn config_maps(&self) -> String {
        format!("/api/v1/namespaces/{}/configmaps", self.namespace)
    }

    async fn create(&self, name: &str, slot: usize) {
        let body = json!({"metadata": {"name": name, "labels": {"slot": slot.to_string()}}});
        self.admin("POST", &self.config_maps(), &body).await;
    }

    /// Name and version of what the API server has.
    async fn truth(&self, selector: &str) -> BTreeMap<String, String> {
        let selector = selector.replace(' ', "%20").replace(',', "%2C");
        let target = format!("{}?labelSelector={selector}", self.config_maps());
        let list = self.admin("GET", &target, &Value::Null).await.unwrap();
        let text = |item: &Value, field: &str| item["metadata"][field].as_str().unwrap().to_owned();
        let items = list["items"].as_array().unwrap();
        items.iter().map(|item| (text(item, "name"), text(item, "resourceVersion"))).collect()
    }

    /// A proxy that lets only what `selector` matches be seen.
    fn proxy(&self, name: &str, selector: &str) -> Proxy {
        write_policy(&self.pki, name, selector);
        let upstream = self.plane.url().strip_prefix("https://").unwrap().parse().unwrap();
        Proxy::start(&self.pki, upstream, &["--policy", self.pki.path(name).to_str().unwrap()])
    }

    async fn through(&self, proxy: &Proxy, version: Version, target: &str) -> (StatusCode, Value) {
        let request = Request::get(target)
            .header("authorization", format!("Bearer {}", self.token))
            .header("accept", "application/json")
            .body(Full::default())
            .unwrap();
        let answer = Client::connect(&self.pki, proxy.address, version).await.ask(request).await;
        (answer.status, serde_json::from_slice(&answer.body).unwrap_or_default())
    }
}

fn write_policy(pki: &Pki, name: &str, selector: &str) {
    let policy = json!({"limits": [{
        "relateResources": [{"apiGroups": [""], "resources": ["configmaps"]}],
        "selector": selector,
    }]});
    let next = pki.path("next");
    fs::write(&next, policy.to_string()).unwrap();
    fs::rename(next, pki.path(name)).unwrap();
}

fn names(list: &Value) -> BTreeSet<String> {
    let items = list["items"].as_array().into_iter().flatten();
    items.map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn two_proxies_with_complementary_selectors_show_disjoint_and_complete_sets() {
    let bed = Bed::new().await;
    for number in 0..10 {
        bed.create(&format!("c{number}"), number % 4).await;
    }
    let (one, two) = (bed.proxy("one", "slot in (0,1)"), bed.proxy("two", "slot notin (0,1)"));
    let all: BTreeSet<String> = bed.truth("").await.into_keys().collect();
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let (_, first) = bed.through(&one, version, &bed.config_maps()).await;
        let (_, second) = bed.through(&two, version, &bed.config_maps()).await;
        let (first, second) = (names(&first), names(&second));
        assert!(first.is_disjoint(&second) && !first.is_empty() && !second.is_empty());
        assert_eq!(&first | &second, all);
    }
}

#[tokio::test]
async fn no_spelling_of_a_list_shows_a_foreign_object() {
    let bed = Bed::new().await;
    for number in 0..8 {
        bed.create(&format!("c{number}"), number % 2).await;
    }
    let proxy = bed.proxy("policy", "slot=0");
    let mine = bed.truth("slot=0").await;
    let maps = bed.config_maps();
    let namespace = &bed.namespace;
    let attempts = [
        format!("{maps}?labelSelector=slot%3D1"),
        format!("{maps}?labelSelector=slot%3D1&labelSelector=slot%3D0"),
        format!("{maps}?labelSelector=&labelSelector=slot%3D1"),
        format!("{maps}?%6CabelSelector=slot%3D1"),
        format!("{maps}?labelSelector=slot%3D0%2Cslot%3D1"),
        format!("{maps}?fieldSelector=metadata.namespace%3D{namespace}"),
        format!("{maps}?resourceVersion=0&resourceVersionMatch=NotOlderThan"),
        format!("{maps}?limit=1"),
        format!("{maps}?;labelSelector=slot%3D1"),
        format!("{maps}?labelSelector=slot%3D1%zz"),
        format!("{maps}/?labelSelector=slot%3D1"),
        format!("/api/v1/namespaces/{namespace}//configmaps"),
        format!("/api//v1/namespaces/{namespace}/configmaps"),
        format!("/api/v1/namespaces/{namespace}/./configmaps"),
        format!("/api/v1/namespaces/{namespace}%2Fconfigmaps"),
        format!("/api/v1/x/../namespaces/{namespace}/configmaps"),
        format!("/api/v1/namespaces/{namespace}/configmap%73"),
        format!("/api/v1/configmaps?fieldSelector=metadata.namespace%3D{namespace}"),
    ];
    for version in [Version::HTTP_11, Version::HTTP_2] {
        for attempt in &attempts {
            let (status, list) = bed.through(&proxy, version, attempt).await;
            let foreign: Vec<_> = names(&list)
                .into_iter()
                .filter(|name| name.starts_with('c') && !mine.contains_key(name))
                .collect();
            assert!(foreign.is_empty(), "{attempt}: {status}, {foreign:?}");
        }
    }
}

/// The watched client-go informer of `xtask/control-plane/informer`.
struct Informer {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Informer {
    fn start(bed: &Bed, proxy: &Proxy, more: &[&str]) -> Self {
        let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../xtask/control-plane");
        let program = bed.pki.path("informer");
        let go = Command::new("go")
            .args(["build", "-o"])
            .arg(&program)
            .arg("./informer")
            .current_dir(module)
            .status();
        assert!(go.unwrap().success());
        let mut child = Command::new(program)
            .args(["-server", &format!("https://{}", proxy.address), "-namespace", &bed.namespace])
            .args(["-token", &bed.token])
            .arg("-ca")
            .arg(bed.pki.path("mesh.crt"))
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut informer = Self { child, lines };
        assert_eq!(informer.line()["synced"], true);
        informer
    }

    fn state(&mut self) -> Value {
        self.child.stdin.as_mut().unwrap().write_all(b"state\n").unwrap();
        self.line()
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Informer {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Changes, relabels, deletes and creates, differently each time.
async fn write(bed: &Bed, step: usize) {
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
}

async fn changes_reach_a_real_informer(more: &[&str]) {
    let bed = Bed::new().await;
    for number in 0..OBJECTS {
        bed.create(&format!("c{number}"), number % 8).await;
    }
    let proxy = bed.proxy("policy", "slot in (5,6)");
    let mut informer = Informer::start(&bed, &proxy, more);
    let changes = if env::var_os("CTRLMESH_TEST_FULL").is_some() { CHANGES * 10 } else { CHANGES };
    let mut selector = String::new();
    let mut step = 0;
    for change in 0..changes {
        // Never the same twice in a row.
        selector =
            format!("slot in ({},{},{})", change % 8, (change * 3 + 1) % 8, (change * 5 + 2) % 8);
        write_policy(&bed.pki, "policy", &selector);
        #[expect(clippy::cast_precision_loss, reason = "a small count")]
        let wanted = (change + 1) as f64;
        let spliced = async {
            while proxy.metric("ctrlmesh_proxy_watches_spliced_total").await < wanted {
                assert!(proxy.metric("ctrlmesh_proxy_watches_expired_total").await == 0.0);
                write(&bed, step).await;
                step += 1;
            }
        };
        soon("the watch to go over to the new policy", spliced).await;
    }
    let truth = json!(bed.truth(&selector).await);
    let informer = std::cell::RefCell::new(&mut informer);
    until("the store to equal the API server", || async {
        informer.borrow_mut().state()["store"] == truth
    })
    .await;
    let state = informer.borrow_mut().state();
    assert_eq!(
        (&state["lists"], &state["watches"], &state["wrong"]),
        (&json!(1), &json!(1), &json!([]))
    );
}

#[tokio::test]
async fn policy_changes_reach_a_real_informer_in_protobuf_over_http2_without_a_relist() {
    changes_reach_a_real_informer(&[]).await;
}

#[tokio::test]
async fn policy_changes_reach_a_real_informer_in_json_over_http1_without_a_relist() {
    changes_reach_a_real_informer(&["-content-type", "application/json", "-http1"]).await;
}
