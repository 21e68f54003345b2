//! Requests to member clusters behind paths of the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::LazyLock;
use std::{fs, io};

use ctrlmesh_common::policy::{Fence, Members, Policy};
use ctrlmesh_common::slots::{NamespaceHash, Slot, SlotSet};
use ctrlmesh_testbed::{ControlPlane, Options};
use http::{Request, StatusCode, Version};
use http_body_util::Full;
use kube::runtime::watcher;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinSet;

use crate::bed::{Bed, names};
use crate::clients;
use crate::harness::client::Client;
use crate::harness::proxy::Proxy;
use crate::harness::{soon, until};
use crate::member_server::{self, ask};
use crate::reflector::Reflector;

/// The names under which the host knows its one member.
const NAMES: [&str; 3] = ["m-1", "m-2", "m-3"];

/// How many requests wait for a member.
const WAITING: usize = 16;

/// The member: its own API server and etcd.
static MEMBER: LazyLock<ControlPlane> =
    LazyLock::new(|| ControlPlane::start(&Options::default()).unwrap_or_else(|error| panic!("{error:?}")));

/// The members of one test.
struct Fleet {
    server: member_server::Members,
    member: kube::Client,
}

impl Fleet {
    async fn new(bed: &Bed) -> Self {
        Self::with(bed, BTreeMap::new()).await
    }

    /// With other members under some of the names.
    async fn with(bed: &Bed, others: BTreeMap<String, kube::Client>) -> Self {
        let (host, member) = (bed.plane.client().await.unwrap(), MEMBER.client().await.unwrap());
        member_server::admit(&member, &bed.namespace, "operator-0", &bed.namespace).await.unwrap();
        let group = format!("{}.members.test", bed.namespace);
        let mut members: BTreeMap<_, _> = NAMES.iter().map(|name| ((*name).to_owned(), member.clone())).collect();
        members.extend(others);
        let server = member_server::Members::serve(&host, &bed.namespace, group, members).await.unwrap();
        Self { server, member }
    }

    fn path(&self, name: &str) -> String {
        self.server.path(name)
    }
}

/// The slots of the members with these names.
fn slots(members: &[&str]) -> BTreeSet<Slot> {
    members.iter().map(|name| NamespaceHash::default().slot(name)).collect()
}

/// Owns these slots of members, and sees what is in them. `None`: members are not divided.
fn policy(fleet: &Fleet, owned: Option<&[&str]>, epoch: u64) -> Policy {
    let sees = owned.map(slots);
    let is_owned = |slot: &Slot| sees.as_ref().is_none_or(|sees| sees.contains(slot));
    let shard = |slot: Slot| if is_owned(&slot) { "a" } else { "b" };
    let slots = SlotSet::ALL.iter().map(|slot| (slot, shard(slot).to_owned())).collect();
    let fence = Fence { owner: Some("a".to_owned()), slots, ..Fence::default() };
    let members = Members { paths: vec![fleet.server.template().parse().unwrap()], sees, ..Members::default() };
    Policy { epoch, fence: Some(fence), members: Some(members), ..Policy::default() }
}

fn write(bed: &Bed, policy: &Policy) {
    let next = bed.pki.path("next");
    fs::write(&next, serde_json::to_string(policy).unwrap()).unwrap();
    fs::rename(next, bed.pki.path("policy")).unwrap();
}

fn proxy(bed: &Bed, policy: &Policy) -> Proxy {
    write(bed, policy);
    Proxy::start(&bed.pki, bed.upstream(), &["--policy", bed.pki.path("policy").to_str().unwrap()])
}

async fn send(bed: &Bed, proxy: &Proxy, method: &str, target: &str, body: &Value) -> (StatusCode, Value) {
    let token = format!("Bearer {}", bed.token);
    let request = Request::builder().method(method).uri(target).header("authorization", token);
    let request = request.header("content-type", "application/json").header("accept", "application/json");
    let request = request.body(body.to_string().into()).unwrap();
    let answer = Client::connect(&bed.pki, proxy.address, Version::HTTP_2).await.ask(request).await;
    (answer.status, serde_json::from_slice(&answer.body).unwrap_or_default())
}

#[tokio::test]
async fn a_pod_works_in_its_own_members_and_in_no_others() {
    let bed = Bed::new().await;
    let fleet = Fleet::new(&bed).await;
    let proxy = proxy(&bed, &policy(&fleet, Some(&["m-1"]), 1));
    let [own, foreign] = ["m-1", "m-2"].map(|name| fleet.path(name));
    let maps = bed.config_maps();
    let made = json!({"metadata": {"name": "one"}});
    assert_eq!(send(&bed, &proxy, "POST", &format!("{own}{maps}"), &made).await.0, StatusCode::CREATED);
    let (status, refused) = send(&bed, &proxy, "PUT", &format!("{foreign}{maps}/one"), &made).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let message = refused["message"].as_str().unwrap();
    assert!(message.contains("\"b\"") && message.contains("epoch 1"), "{message}");
    let (_, list) = bed.through(&proxy, Version::HTTP_2, &format!("{own}{maps}?limit=500")).await;
    assert!(names(&list).contains("one"), "{list}");
    let (status, list) = bed.through(&proxy, Version::HTTP_11, &format!("{foreign}{maps}?limit=500")).await;
    assert_eq!((status, names(&list)), (StatusCode::OK, BTreeSet::new()));
    // The version is the member's own.
    let (_, all) = bed.through(&proxy, Version::HTTP_2, &format!("{own}{maps}")).await;
    let version = |list: &Value| list["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap();
    assert!(version(&list) <= version(&all), "{list} {all}");
    let (status, one) = bed.through(&proxy, Version::HTTP_2, &format!("{foreign}{maps}/one")).await;
    assert_eq!((status, &one["metadata"]["name"]), (StatusCode::OK, &json!("one")));
    assert_eq!(bed.through(&proxy, Version::HTTP_2, &format!("{foreign}/version")).await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_path_that_could_lead_to_two_members_is_refused() {
    let bed = Bed::new().await;
    let fleet = Fleet::new(&bed).await;
    let proxy = proxy(&bed, &policy(&fleet, Some(&["m-1"]), 1));
    let own = fleet.path("m-1");
    for target in [
        format!("{own}/../../m-2/proxy{}", bed.config_maps()),
        own.replace("/clusters/", "//clusters/") + &bed.config_maps(),
        own.replace("m-1", "m-1%2f..%2fm-2") + &bed.config_maps(),
        own.replace("m-1", "m-1/./") + &bed.config_maps(),
    ] {
        let (status, answer) = bed.through(&proxy, Version::HTTP_2, &target).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{target}: {answer}");
    }
}

#[tokio::test]
async fn members_that_do_not_answer_hold_no_other_up() {
    let bed = Bed::new().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    // Nobody listens there, and nobody else will.
    let away = TcpSocket::new_v4().unwrap();
    away.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let client = |address: io::Result<SocketAddr>| {
        let url = format!("http://{}", address.unwrap()).parse().unwrap();
        kube::Client::try_from(kube::Config::new(url)).unwrap()
    };
    let others = [("m-2".to_owned(), client(silent.local_addr())), ("m-3".to_owned(), client(away.local_addr()))];
    let fleet = Fleet::with(&bed, others.into()).await;
    let proxy = proxy(&bed, &policy(&fleet, None, 1));
    let connection = Client::connect(&bed.pki, proxy.address, Version::HTTP_2).await;
    let get = |name: &str| {
        let token = format!("Bearer {}", bed.token);
        let request = Request::get(fleet.path(name) + &bed.config_maps()).header("authorization", token);
        connection.ask_beside(request.body(Full::default()).unwrap())
    };
    let mut waiting: JoinSet<_> = (0..WAITING).map(|_| get("m-2")).collect();
    // The member has them, and says nothing.
    let mut held = Vec::new();
    while held.len() < WAITING {
        held.push(soon("a connection", silent.accept()).await.unwrap());
    }
    for _ in 0..WAITING {
        assert_eq!(get("m-1").await.status, StatusCode::OK);
        assert_eq!(get("m-3").await.status, StatusCode::BAD_GATEWAY);
    }
    assert!(waiting.try_join_next().is_none(), "they have an answer that nobody gave");
    drop((held, silent));
    for answer in waiting.join_all().await {
        assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_works_in_a_member() {
    let bed = Bed::new().await;
    let fleet = Fleet::new(&bed).await;
    let proxy = proxy(&bed, &policy(&fleet, Some(&["m-1"]), 1));
    let ask = |name: &str, arguments: &[&str]| {
        let server = format!("https://{}{}", proxy.address, fleet.path(name));
        clients::write_kubeconfig(&bed.pki, &server, &bed.namespace, &bed.token);
        clients::kubectl(&bed.pki, arguments).output().unwrap()
    };
    let printed = |name: &str, arguments: &[&str]| clients::succeeded(ask(name, arguments));
    assert_eq!(printed("m-1", &["create", "configmap", "one", "--from-literal=a=b"]), "configmap/one created\n");
    assert_eq!(printed("m-1", &["get", "configmaps", "-o", "name"]), "configmap/one\n");
    assert!(printed("m-1", &["explain", "configmap.data"]).contains("FIELD: data <map[string]string>"));
    // The same cluster, under the name of a member that another pod has.
    assert_eq!(printed("m-2", &["get", "configmaps", "-o", "name"]), "");
    assert_eq!(printed("m-2", &["get", "configmap", "one", "-o", "name"]), "configmap/one\n");
    let refused = ask("m-2", &["label", "configmap", "one", "a=b"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("Forbidden") && said.contains("\"b\""), "{said}");
    assert_eq!(printed("m-1", &["label", "configmap", "one", "a=b"]), "configmap/one labeled\n");
    assert!(printed("m-1", &["delete", "configmap", "one"]).starts_with("configmap \"one\" deleted"));
}

#[tokio::test]
async fn limits_hold_for_the_members_that_they_name() {
    let bed = Bed::new().await;
    let fleet = Fleet::new(&bed).await;
    let every = json!(["*"]);
    let requests = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"], "namespaces": every,
        "clusters": ["m-2*"]}]);
    let guard = json!({"breaker": "ops/wild", "rule": "lists", "trigger": "forceOpened", "requests": requests});
    let guards = vec![serde_json::from_value(guard).unwrap()];
    let proxy = proxy(&bed, &Policy { guards, ..policy(&fleet, None, 1) });
    let maps = bed.config_maps();
    let status = async |path: &str| bed.through(&proxy, Version::HTTP_2, &format!("{path}{maps}")).await.0;
    assert_eq!(status(&fleet.path("m-2")).await, StatusCode::TOO_MANY_REQUESTS);
    for passes in ["", &fleet.path("m-1"), &fleet.path("m-3")] {
        assert_eq!(status(passes).await, StatusCode::OK, "{passes}");
    }
    for (cluster, outcome) in [("m-1", "ok"), ("m-2", "refused"), ("m-3", "ok")] {
        let end = format!(r#",cluster="{cluster}",outcome="{outcome}"}} 1"#);
        let is_it = |line: &str| line.starts_with("ctrlmesh_proxy_pod_member_requests_total{") && line.ends_with(&end);
        until("the request to be counted", || async { proxy.page().await.lines().any(is_it) }).await;
    }
}

#[tokio::test]
async fn members_that_are_not_divided_are_read_and_written_by_all() {
    let bed = Bed::new().await;
    let fleet = Fleet::new(&bed).await;
    let proxy = proxy(&bed, &policy(&fleet, None, 1));
    for name in NAMES {
        let path = fleet.path(name) + &bed.config_maps();
        let made = json!({"metadata": {"name": format!("of-{name}")}});
        assert_eq!(send(&bed, &proxy, "POST", &path, &made).await.0, StatusCode::CREATED);
        let (_, list) = bed.through(&proxy, Version::HTTP_2, &path).await;
        assert!(names(&list).contains(&format!("of-{name}")), "{list}");
    }
}

#[tokio::test]
async fn a_watch_of_a_member_follows_its_moves() {
    let bed = Bed::new().await;
    let fleet = Fleet::new(&bed).await;
    let policy = |owned: &[&str], epoch| policy(&fleet, Some(owned), epoch);
    let proxy = proxy(&bed, &policy(&["m-1"], 1));
    let maps = bed.config_maps();
    for name in ["one", "two"] {
        ask(&fleet.member, "POST", &maps, &json!({"metadata": {"name": name}})).await.unwrap();
    }
    let path = fleet.path("m-1");
    let reflector = Reflector::start_at(&bed, &proxy, &path, watcher::Config::default()).await;
    for epoch in 2..=7 {
        let is_owned = epoch % 2 == 1;
        write(&bed, &policy(if is_owned { &["m-1", "m-3"] } else { &["m-2"] }, epoch));
        ask(&fleet.member, "POST", &maps, &json!({"metadata": {"name": format!("new-{epoch}")}})).await.unwrap();
        let all = ask(&fleet.member, "GET", &maps, &Value::Null).await.unwrap();
        let wanted = if is_owned { names(&all) } else { BTreeSet::new() };
        let follows = || async { reflector.state().into_keys().collect::<BTreeSet<_>>() == wanted };
        until("the watch to follow", follows).await;
    }
    reflector.assert_spliced();
    assert!(proxy.metric("ctrlmesh_proxy_watches_expired_total").await == 0.0);
}
