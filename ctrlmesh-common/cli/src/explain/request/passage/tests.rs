use std::collections::BTreeMap;

use ctrlmesh_common::api::{CircuitBreaker, FaultInjection, ShardingConfig};
use ctrlmesh_common::names::label;
use ctrlmesh_manager::cluster::cache::Snapshot;
use ctrlmesh_manager::rules::compile::compile;
use ctrlmesh_manager::rules::injection::Injection;
use ctrlmesh_manager::rules::pod::Admitted;
use ctrlmesh_manager::rules::shard::Labelling;
use kube::core::ApiResource;
use serde_json::{Value, json};

use super::*;
use crate::explain::args::Verb;
use crate::explain::request::policy::Stage;
use crate::explain::request::screen;
use crate::text::{Document, Format, document};

fn config(name: &str, spec: &Value, status: &Value) -> ShardingConfig {
    let config = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"namespace": "ops", "name": name, "uid": "r", "generation": 1}, "spec": spec, "status": status});
    serde_json::from_value(config).unwrap()
}

fn pod(name: &str, uid: &str) -> Member {
    let labels = [(label::ENABLE_PROXY, "true"), ("app", "op")];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let owner = Some(ctrlmesh_manager::rules::pod::Owner { kind: "StatefulSet".to_owned(), name: "op".to_owned() });
    let mut pod = Member { uid: uid.to_owned(), labels, owner, ready: true, ..Member::default() };
    pod.account = "robot".to_owned();
    pod.name.namespace = "ops".to_owned();
    pod.name.name = name.to_owned();
    pod
}

/// A world with shard `by-hand`, of configmaps of team a, with pod `op-0`.
fn by_hand(more: Snapshot, breakers: Vec<CircuitBreaker>) -> NamespaceWorld {
    let maps = json!([{"apiGroups": [""], "resources": ["configmaps"]}]);
    let limits = json!([{"relateResources": maps, "selector": {"matchLabels": {"team": "a"}}}]);
    let spec = json!({"selector": {"matchLabels": {"app": "op"}}, "limits": limits,
        "controller": {"leaderElectionName": "op"}});
    let configs = vec![config("by-hand", &spec, &json!({})).into()];
    NamespaceWorld::new(Snapshot { configs, ..more }, breakers, vec![pod("op-0", "u-0")], "ops")
}

/// A world with a root of configmaps, fenced by the proxies. Its pod `op-0` owns slots 0 to 15, and `op-1` the others.
/// The manager has written its policies, and the proxy of `op-0` has them.
fn fenced() -> NamespaceWorld {
    fenced_by(json!({}))
}

/// The same, where the root says this, too.
fn fenced_by(more: Value) -> NamespaceWorld {
    let maps = json!([{"apiGroups": [""], "resources": ["configmaps"]}]);
    let mut rule = json!({"prefix": "op", "targetStatefulSet": "op", "fence": "Proxy",
        "auto": {"shardingSize": 2, "everyShardReplicas": 1}, "resourceSelector": [{"relateResources": maps}]});
    rule.as_object_mut().unwrap().append(&mut serde_json::from_value(more).unwrap());
    let owner = |slot: u8| if slot < 16 { "op-1-normal" } else { "op-2-normal" };
    let slots: serde_json::Map<String, Value> = (0..32).map(|slot| (slot.to_string(), json!(owner(slot)))).collect();
    let table = json!({"epoch": 4, "slots": slots, "pods": {"op-0": "op-1-normal", "op-1": "op-2-normal"},
        "podUids": {"u-0": "op-1-normal", "u-1": "op-2-normal"}});
    let spec = json!({"root": rule, "controller": {"leaderElectionName": "op"}});
    let world = |digest: &str| {
        let root = config("root", &spec, &json!({"epoch": 4, "policyDigest": digest, "ownership": table}));
        let mut shard = config("op-1-normal", &json!({}), &json!({"pods": [{"name": "op-0", "epoch": 4}]}));
        shard.metadata.labels = Some([(label::AUTO_SHARDING_ROOT.to_owned(), "root".to_owned())].into());
        let owner = json!([{"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "name": "root",
            "uid": "r", "controller": true}]);
        shard.metadata.owner_references = serde_json::from_value(owner).unwrap();
        let snapshot = Snapshot { configs: vec![root.into(), shard.into()], ..Snapshot::default() };
        NamespaceWorld::new(snapshot, Vec::new(), vec![pod("op-0", "u-0"), pod("op-1", "u-1")], "ops")
    };
    let unwritten = world("");
    let compiled = compile(unwritten.snapshot.world(), &BTreeMap::new());
    world(&compiled.operators["ops/root"].policy_digest)
}

fn api(group: &str, plural: &str) -> ApiResource {
    let api_version = if group.is_empty() { "v1".to_owned() } else { format!("{group}/v1") };
    let (kind, plural) = ("Kind".to_owned(), plural.to_owned());
    ApiResource { group: group.to_owned(), version: "v1".to_owned(), api_version, kind, plural }
}

/// A request for configmaps of a namespace.
fn ask(world: &NamespaceWorld, verb: Verb, namespace: &str, name: Option<&str>) -> RequestExplanation {
    ask_for(world, &api("", "configmaps"), verb, namespace, name)
}

fn ask_for(
    world: &NamespaceWorld,
    api: &ApiResource,
    verb: Verb,
    namespace: &str,
    name: Option<&str>,
) -> RequestExplanation {
    ask_behind("", world, api, verb, (namespace, name))
}

fn ask_behind(
    behind: &str,
    world: &NamespaceWorld,
    api: &ApiResource,
    verb: Verb,
    (namespace, name): (&str, Option<&str>),
) -> RequestExplanation {
    let labels = verb.is_of_collection().then_some("tier=gold");
    let asked = Asked { behind, verb, api, namespace: Some(namespace), name, subresource: None, labels, fields: None };
    let asking = Asking { asked, labels: None, now: Timestamp::UNIX_EPOCH };
    passage(world, world.member("op-0").unwrap(), &asking)
}

/// A namespace of this slot.
fn place(slot: u8) -> String {
    let hash = Labelling::default().hash;
    (0..10_000).map(|number| format!("ns-{number}")).find(|name| hash.slot(name).number() == slot).unwrap()
}

#[test]
fn a_list_is_narrowed_to_the_share() {
    let listed = ask(&by_hand(Snapshot::default(), Vec::new()), Verb::List, "shop", None);
    assert_eq!((listed.outcome, listed.selector.as_deref()), (Outcome::Rewritten, Some("team=a")));
    assert_eq!(listed.target, "/api/v1/namespaces/shop/configmaps?labelSelector=tier%3Dgold");
    let sent = "/api/v1/namespaces/shop/configmaps?labelSelector=team%3Da%2Ctier%3Dgold";
    assert_eq!(listed.sent.as_deref(), Some(sent));
    assert_eq!(listed.limits[0].resources, ["configmaps"]);
    let screen = screen(&listed);
    for said in [
        "The API server classifies it as list: configmaps in namespace \"shop\".",
        "The pod is of shard by-hand of ops/by-hand. Its next policy is not in the status yet.",
        "A limit holds on configmaps: the pod sees what matches \"team=a\".",
        "The proxy puts this before the request's own selector: team=a",
        "The API server gets: GET /api/v1/namespaces/shop/configmaps?labelSelector=team=a,tier=gold",
    ] {
        assert!(screen.contains(said), "{said}: {screen}");
    }
}

#[test]
fn what_is_not_limited_passes_unchanged() {
    let world = by_hand(Snapshot::default(), Vec::new());
    let read = ask(&world, Verb::Get, "shop", Some("one"));
    assert_eq!((read.outcome, read.sent.as_deref()), (Outcome::Passes, Some("/api/v1/namespaces/shop/configmaps/one")));
    assert_eq!((read.api_server, read.answer), (None, None));
    let other = ask_for(&world, &api("", "secrets"), Verb::List, "shop", None);
    assert_eq!((other.outcome, other.selector), (Outcome::Passes, None));
    let written = ask(&world, Verb::Patch, "shop", Some("one"));
    assert_eq!((written.outcome, written.api_server), (Outcome::Passes, None), "a shard by hand has no fence");
}

#[test]
fn the_lock_is_renamed() {
    let world = by_hand(Snapshot::default(), Vec::new());
    let leases = api("coordination.k8s.io", "leases");
    let renewed = ask_for(&world, &leases, Verb::Update, "ops", Some("op"));
    let sent = "/apis/coordination.k8s.io/v1/namespaces/ops/leases/op---by-hand";
    assert_eq!((renewed.outcome, renewed.sent.as_deref()), (Outcome::Rewritten, Some(sent)));
    let lock = renewed.lock.as_ref().unwrap();
    assert!(lock.in_path && lock.in_body && lock.on_server == "op---by-hand", "{lock:?}");
    assert!(screen(&renewed).contains("It is renamed in the path and body, and back in the answer."));
    let created = ask_for(&world, &leases, Verb::Create, "ops", None);
    assert!(created.lock.as_ref().is_some_and(|lock| lock.in_body && !lock.in_path), "{created:?}");
    let reserved = ask_for(&world, &leases, Verb::Get, "ops", Some("op---other"));
    assert_eq!((reserved.outcome, reserved.answer.unwrap().code), (Outcome::Refused, 403));
    let all = ask_for(&world, &leases, Verb::DeleteCollection, "ops", None);
    assert_eq!((all.outcome, all.answer.unwrap().code), (Outcome::Refused, 403));
}

#[test]
fn a_write_to_what_others_own_is_refused() {
    let world = fenced();
    let own = ask(&world, Verb::Patch, &place(7), Some("one"));
    assert_eq!(own.outcome, Outcome::Passes, "{own:?}");
    assert!(own.needs_confirmation, "only the proxies fence");
    assert_eq!((own.policy.state, own.policy.acknowledged_epoch), (Stage::Sent, Some(4)), "{own:?}");
    assert!(screen(&own).contains("Its policy has epoch 4.\n   Its proxy has acknowledged that epoch.\n"));
    let other = ask(&world, Verb::Patch, &place(20), Some("one"));
    let answer = other.answer.as_ref().unwrap();
    assert_eq!(
        (other.outcome, other.sent.as_ref(), answer.code, answer.reason),
        (Outcome::Refused, None, 403, "Forbidden")
    );
    let said = "ctrlmesh: slot 20 belongs to \"op-2-normal\" here, and this pod writes for \"op-1-normal\"";
    assert!(answer.message.starts_with(said), "{answer:?}");
    let fence = other.api_server.as_ref().unwrap();
    assert_eq!(fence.message, "spec.root.fence is Proxy");
    let screen = screen(&other);
    for said in
        ["The policy refuses the request: it does not reach the API server.", "The proxy answers 403 Forbidden: "]
    {
        assert!(screen.contains(said), "{said}: {screen}");
    }
}

#[test]
fn a_request_to_a_member_is_judged_by_its_cluster() {
    let path = |cluster: &str| format!("/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}/proxy");
    let world = fenced_by(json!({"unit": "Cluster", "clusters": [{"path": path("{cluster}")}]}));
    let (own, other) = (place(7), place(20));
    let ask =
        |cluster: &str, verb, name| ask_behind(&path(cluster), &world, &api("", "configmaps"), verb, ("shop", name));
    let listed = ask(&own, Verb::List, None);
    let classified = listed.classified.as_ref().unwrap();
    assert_eq!(
        (classified.cluster.as_ref(), &*classified.resource, &*classified.verb),
        (Some(&own), "configmaps", "list")
    );
    assert_eq!(
        (listed.outcome, listed.sent.as_ref(), &listed.limits[..]),
        (Outcome::Passes, Some(&listed.target), &[][..])
    );
    assert!(screen(&listed).contains("The pod owns the member cluster"), "{}", screen(&listed));
    let hidden = ask(&other, Verb::List, None);
    assert!(hidden.selector.is_some() && hidden.outcome == Outcome::Rewritten, "{hidden:?}");
    assert!(screen(&hidden).contains("The pod does not own the member cluster"), "{}", screen(&hidden));
    assert_eq!(ask(&own, Verb::Patch, Some("one")).outcome, Outcome::Passes);
    let refused = ask(&other, Verb::Patch, Some("one"));
    assert_eq!((refused.outcome, refused.api_server, refused.answer.unwrap().code), (Outcome::Refused, None, 403));
    let ambiguous = ask("./m-1", Verb::List, None);
    assert!(ambiguous.classified.is_none() && screen(&ambiguous).contains("400 BadRequest: "), "{ambiguous:?}");
}

#[test]
fn faults_and_breakers_answer_in_this_order() {
    let selector = json!({"matchLabels": {"app": "op"}});
    let rule = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["*"], "namespaces": ["*"]}]);
    let limiting = json!([{"name": "maps", "resourceRules": rule, "triggerPolicy": "ForceOpened",
        "bucket": {"burst": 1, "interval": "1s", "limit": 1}, "recoverPolicy": {"type": "Manual"}}]);
    let object = |kind: &str, name: &str, spec: Value| {
        json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": kind,
            "metadata": {"namespace": "ops", "name": name}, "spec": spec})
    };
    let breaker = json!({"selector": selector, "rateLimitings": limiting});
    let breaker: CircuitBreaker = serde_json::from_value(object("CircuitBreaker", "calm", breaker)).unwrap();
    let world = by_hand(Snapshot::default(), vec![breaker.clone()]);
    assert_eq!(world.snapshot.breakers[0].selection.errors, Vec::<String>::new());
    let refused = ask(&world, Verb::Get, "shop", Some("one"));
    assert_eq!((refused.outcome, refused.answer.as_ref().unwrap().code), (Outcome::Answered, 429));
    assert!(refused.breakers[0].sentence().contains("\"maps\" of CircuitBreaker ops/calm refuses everything"));
    let abort = json!([{"name": "down", "abort": {"httpStatus": 503, "percent": "100"}}]);
    let injection = json!({"selector": selector, "httpFault": abort});
    let injection: FaultInjection = serde_json::from_value(object("FaultInjection", "storm", injection)).unwrap();
    let injections = vec![Injection::from(&injection)];
    assert_eq!(injections[0].selection.errors, Vec::<String>::new());
    let world = by_hand(Snapshot { injections, ..Snapshot::default() }, vec![breaker]);
    let down = ask(&world, Verb::Get, "shop", Some("one"));
    assert_eq!((down.outcome, down.answer.as_ref().unwrap().code), (Outcome::Answered, 503), "{:?}", down.faults);
    assert_eq!(down.faults[0].name, "ops/storm/down");
}

#[test]
fn a_pod_without_a_proxy_or_a_shard_is_said_to_be_so() {
    let mut bypassed = pod("op-0", "u-0");
    bypassed.admitted = Admitted::Bypassed;
    let world = NamespaceWorld::new(Snapshot::default(), Vec::new(), vec![bypassed], "ops");
    let free = ask(&world, Verb::List, "shop", None);
    assert_eq!((free.policy.state, free.outcome), (Stage::NotEnrolled, Outcome::Passes));
    assert_eq!(free.sent.as_deref(), Some(free.target.as_str()));
    assert!(screen(&free).contains("The pod is not enrolled: no proxy is in its way"), "{}", screen(&free));
    let world = NamespaceWorld::new(Snapshot::default(), Vec::new(), vec![pod("op-0", "u-0")], "ops");
    let nothing = ask(&world, Verb::List, "shop", None);
    assert!(screen(&nothing).contains("No ShardingConfig selects the pod: it sees no object."), "{}", screen(&nothing));
    assert!(nothing.selector.is_some(), "{nothing:?}");
    let configs = vec![config("broken", &json!({"selector": {"matchLabels": {"app": "op"}}}), &json!({})).into()];
    let snapshot = Snapshot { configs, ..Snapshot::default() };
    let world = NamespaceWorld::new(snapshot, Vec::new(), vec![pod("op-0", "u-0")], "ops");
    let unknown = ask(&world, Verb::List, "shop", None);
    assert_eq!((unknown.policy.state, unknown.outcome), (Stage::LastPolicy, Outcome::NotKnown));
    assert!(screen(&unknown).contains("The pod keeps its last one"), "{}", screen(&unknown));
}

#[test]
fn the_document_has_all_documented_fields() {
    let listed = ask(&by_hand(Snapshot::default(), Vec::new()), Verb::List, "shop", None);
    let text = document(Format::Json, &Document::new("RequestExplanation", &listed)).unwrap();
    let text: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(text["kind"], "RequestExplanation");
    let docs = include_str!("../../../../../../docs/inspect.md");
    for (field, _) in text.as_object().unwrap() {
        assert!(docs.contains(&format!("`{field}`")) || docs.contains(&format!("`{field}[]`")), "{field}");
    }
    for field in ["lock", "answer", "apiServer"] {
        assert!(docs.contains(&format!("`{field}`")), "{field}");
    }
}
