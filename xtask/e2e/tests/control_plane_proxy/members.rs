//! Requests to member clusters behind paths of the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::LazyLock;

use ctrlmesh_common::policy::{Fence, Members, Policy};
use ctrlmesh_common::slots::{NamespaceHash, Slot, SlotSet};
use ctrlmesh_testbed::{ControlPlane, Options};
use http::{Request, StatusCode, Version};
use kube::runtime::watcher;
use serde_json::{Value, json};

use crate::bed::{Bed, names};
use crate::harness::client::Client;
use crate::harness::proxy::Proxy;
use crate::harness::until;
use crate::member_server::{self, ask};
use crate::reflector::Reflector;

/// The names under which the host knows its one member.
const NAMES: [&str; 3] = ["m-1", "m-2", "m-3"];

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
        let (host, member) = (bed.plane.client().await.unwrap(), MEMBER.client().await.unwrap());
        member_server::admit(&member, &bed.namespace, "operator-0", &bed.namespace).await.unwrap();
        let group = format!("{}.members.test", bed.namespace);
        let members: BTreeMap<_, _> = NAMES.iter().map(|name| ((*name).to_owned(), member.clone())).collect();
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
