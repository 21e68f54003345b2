use ctrlmesh_common::names::label::AUTO_SHARDING_ROOT;
use serde_json::{Value, json};

use super::*;
use crate::explain::render::screen;
use crate::owner::owners::owners;
use crate::text::{Document, Format, document};

const THEN: &str = "2026-01-01T00:00:00Z";

fn config(name: &str, spec: &Value, status: &Value) -> ShardingConfig {
    let config = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"namespace": "ops", "name": name}, "spec": spec, "status": status});
    serde_json::from_value(config).unwrap()
}

/// Root `web` of websites with the label `tier=gold`, whose only shard owns every slot, and that shard.
fn configs(conditions: &Value) -> Vec<ShardingConfig> {
    let websites = json!({"apiGroups": ["example.com"], "resources": ["websites"]});
    let gold = json!({"relateResources": [websites], "selector": {"matchLabels": {"tier": "gold"}}});
    let rule = json!({"prefix": "web", "targetStatefulSet": "web", "fence": "Proxy", "resourceSelector": [gold]});
    let slots: serde_json::Map<String, Value> = (0..32).map(|slot| (slot.to_string(), json!("web-0-normal"))).collect();
    let table = json!({"epoch": 3, "slots": slots, "podUids": {"u-0": "web-0-normal"}});
    let status = json!({"epoch": 3, "ownership": table, "conditions": conditions});
    let pod = json!({"pods": [{"name": "web-0", "node": "n1", "epoch": 2, "lastContact": THEN}]});
    let mut shard = config("web-0-normal", &json!({"limits": [gold]}), &pod);
    shard.metadata.labels = Some([(AUTO_SHARDING_ROOT.to_owned(), "web".to_owned())].into());
    vec![config("web", &json!({"root": rule, "controller": {"leaderElectionName": "web"}}), &status), shard]
}

fn object() -> Object {
    let labelling = Labelling::default();
    let own = labelling.of_namespace("shop").map(|(key, value)| (key.to_owned(), value));
    let labels = own.into_iter().chain([("tier".to_owned(), "gold".to_owned())]).collect();
    let [group, resource, name] = ["example.com", "websites", "site"].map(str::to_owned);
    Object { group, resource, namespace: Some("shop".to_owned()), name, labels }
}

/// One enrolled pod, one write, and a lock.
fn facts() -> Facts {
    let mut pod = Member { uid: "u-0".to_owned(), account: "robot".to_owned(), ..Member::default() };
    pod.name.namespace = "ops".to_owned();
    pod.name.name = "web-0".to_owned();
    let write =
        json!({"manager": "op", "operation": "Update", "subresource": "status", "time": "2026-01-01T00:00:05Z"});
    let lock = LockHolder {
        lease: "web---web-0-normal".to_owned(),
        holder: Some("web-0_1".to_owned()),
        renewed: Some("2026-01-01T00:00:08Z".parse().unwrap()),
    };
    let root = RootFacts { pods: vec![pod], granted: Vec::new(), lock: Some(lock) };
    Facts {
        managed_fields: vec![serde_json::from_value(write).unwrap()],
        namespace_labels: Some([].into()),
        roots: [(("ops".to_owned(), "web".to_owned()), root)].into(),
        not_known: Vec::new(),
    }
}

fn explained(object: Object, configs: &[ShardingConfig], facts: Facts) -> Explanation {
    let labelling = Labelling::default();
    explanation(owners(object, configs, &labelling), configs, &labelling, facts)
}

fn settled(status: &str, reason: &str) -> Value {
    json!([{"type": "Settled", "status": status, "reason": reason, "message": "slots 1 wait for a pod",
        "lastTransitionTime": THEN}])
}

fn shown(explanation: &Explanation) -> String {
    screen(explanation, "2026-01-01T00:00:10Z".parse().unwrap())
}

#[test]
fn an_object_is_explained_step_by_step() {
    let explanation = explained(object(), &configs(&settled("True", "Settled")), facts());
    let (slot, hashing) = (explanation.slot, explanation.hashing.sentence());
    let expected = format!(
        "\
Object: websites.example.com shop/site

1. Slot
   {hashing}
   The object has the labels by which shards see it.

2. Owner by root ops/web, StatefulSet web
   spec.root.resourceSelector[0] divides the objects of websites.example.com that match \"tier=gold\".
   By the ownership table of epoch 3, slot {slot} belongs to shard web-0-normal.
   That is so since 2026-01-01T00:00:00Z, 10s ago, or longer, by condition Settled.
   Nothing of the root is known to be on its way.
   Pod web-0 on node n1 serves that shard. Its proxy has acknowledged epoch 2, and not 3 yet. It was in touch 10s ago.
   The lock of the shard, Lease web---web-0-normal, is held by \"web-0_1\", who renewed it 2s ago.

3. Writes by pods of root ops/web
   Only the proxies refuse writes: spec.root.fence is Proxy.
   POD     WRITES FOR     PROXY     API SERVER
   web-0   web-0-normal   allowed   not fenced
   web-0, API server: spec.root.fence is Proxy

4. Last writes
   FIELD MANAGER   OPERATION   SUBRESOURCE   AGE   WRITER
   op              Update      status        5s    if a pod of root ops/web wrote it: one of web-0-normal
   A field manager is a name that a writer gives itself. It names no pod, so a shard is only a guess.
"
    );
    assert_eq!(shown(&explanation), expected);
}

#[test]
fn what_is_not_known_is_said() {
    let not_known = vec!["the pods of namespace ops: forbidden".to_owned()];
    let explanation = explained(object(), &configs(&json!([])), Facts { not_known, ..Facts::default() });
    let screen = shown(&explanation);
    for said in [
        "Since when is not known: neither an event Granted nor condition Settled tells it.",
        "No enrolled pod of the workload is known.",
        "Not known: the object has no managedFields.",
        "What could not be read\n   the pods of namespace ops: forbidden\n",
    ] {
        assert!(screen.contains(said), "{said}: {screen}");
    }
}

#[test]
fn a_move_and_labels_that_are_missing_are_said() {
    let unlabelled = Object { labels: [("tier".to_owned(), "gold".to_owned())].into(), ..object() };
    let mut moving = configs(&settled("False", "Moving"));
    let table = moving[0].status.as_mut().unwrap().ownership.as_mut().unwrap();
    table.slots.clear();
    let screen = shown(&explained(unlabelled, &moving, facts()));
    for said in [
        "No shard sees the object before it has the labels ",
        "belongs to nobody.",
        "Something of the root is on its way: slots 1 wait for a pod.",
    ] {
        assert!(screen.contains(said), "{said}: {screen}");
    }
    let mut half = object();
    half.labels.remove("ctrlmesh.kusionstack.io/namespace");
    let screen_of_one = shown(&explained(half, &moving, facts()));
    assert!(screen_of_one.contains("before it has the label ctrlmesh.kusionstack.io/namespace="), "{screen_of_one}");
    assert!(!screen.contains("Since when"), "nobody owns it: {screen}");
    let left_out = Object { labels: [].into(), ..object() };
    let screen = shown(&explained(left_out, &configs(&json!([])), facts()));
    assert!(screen.contains("The selector leaves the object out, so no shard of the root sees it."), "{screen}");
}

#[test]
fn an_object_that_nothing_limits_is_free() {
    let other = Object { resource: "gadgets".to_owned(), ..object() };
    let screen = shown(&explained(other, &configs(&json!([])), Facts::default()));
    assert!(screen.contains("No root divides the object, and no shard by hand limits it"), "{screen}");
}

#[test]
fn the_document_has_all_documented_fields() {
    let explanation = explained(object(), &configs(&settled("True", "Settled")), facts());
    let text = document(Format::Json, &Document::new("Explanation", &explanation)).unwrap();
    let text: Value = serde_json::from_str(&text).unwrap();
    let root = &text["roots"][0];
    assert_eq!(
        (&text["kind"], &text["group"], &text["namespace"]),
        (&json!("Explanation"), &json!("example.com"), &json!("shop"))
    );
    assert_eq!((&root["shard"], &root["rule"]), (&json!("web-0-normal"), &json!("Slot")), "as owner has it");
    let divided_by = json!([{"entry": 0, "resources": ["websites.example.com"], "selector": "tier=gold"}]);
    assert_eq!(root["dividedBy"], divided_by);
    assert_eq!(root["since"], json!({"time": THEN, "source": "SettledCondition"}));
    assert_eq!(root["fencing"], json!({"mode": "Proxy", "proved": false}));
    let answers = json!([{"pod": "web-0", "writesFor": "web-0-normal", "proxy": {"outcome": "Allowed"},
        "apiServer": {"outcome": "NotFenced", "message": "spec.root.fence is Proxy"}}]);
    assert_eq!(root["answers"], answers);
    let write = json!([{"manager": "op", "operation": "Update", "subresource": "status", "time": "2026-01-01T00:00:05Z",
        "writer": {"kind": "LikelyShard", "root": "ops/web", "shard": "web-0-normal"}}]);
    assert_eq!(text["lastWrites"], write);
    let docs = include_str!("../../../../../docs/inspect.md");
    let fields = ["hashing", "dividedBy", "since", "moving", "lock", "fencing", "answers", "lastWrites", "notKnown"];
    for field in fields {
        assert!(["`{}", ".{}"].iter().any(|form| docs.contains(&form.replace("{}", field))), "{field}");
    }
}
