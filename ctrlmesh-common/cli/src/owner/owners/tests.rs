use ctrlmesh_common::names::label::AUTO_SHARDING_ROOT;
use ctrlmesh_common::slots::COUNT;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::owner::render::screen;
use crate::text::{Document, Format, document};

const THEN: &str = "2026-01-01T00:00:00Z";

fn config(name: &str, spec: &Value, status: &Value) -> ShardingConfig {
    let config = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"namespace": "ops", "name": name}, "spec": spec, "status": status});
    serde_json::from_value(config).unwrap()
}

/// Root `web` of websites with the label `tier=gold`, whose only shard owns all but what is `revoked`.
fn configs(revoked: &Value) -> Vec<ShardingConfig> {
    let websites = json!({"apiGroups": ["example.com"], "resources": ["websites"]});
    let selector = json!([{"relateResources": [websites], "selector": {"matchLabels": {"tier": "gold"}}}]);
    let rule = json!({"prefix": "web", "targetDeployment": "web", "resourceSelector": selector});
    let taken = revoked["slots"].as_object().cloned().unwrap_or_default();
    let slots = (0..COUNT).map(|slot| slot.to_string()).filter(|slot| !taken.contains_key(slot));
    let slots: serde_json::Map<String, Value> = slots.map(|slot| (slot, json!("web-1-normal"))).collect();
    let mut table = json!({"epoch": 3, "slots": slots, "namespaces": {"pay": "web-1-normal"}});
    if !revoked.is_null() {
        table["revoked"] = revoked.clone();
    }
    let pod = json!({"pods": [{"name": "web-a", "node": "n1", "epoch": 3, "lastContact": THEN}]});
    vec![config("web", &json!({"root": rule}), &json!({"epoch": 3, "ownership": table})), made("web-1-normal", &pod)]
}

/// A shard that root `web` has made.
fn made(name: &str, status: &Value) -> ShardingConfig {
    let websites = json!({"apiGroups": ["example.com"], "resources": ["websites"]});
    let limits = json!({"limits": [{"relateResources": [websites], "selector": {"matchLabels": {"tier": "gold"}}}]});
    let mut shard = config(name, &limits, status);
    shard.metadata.labels = Some([(AUTO_SHARDING_ROOT.to_owned(), "web".to_owned())].into());
    shard
}

fn object(resource: &str, namespace: Option<&str>, labels: &[(&str, &str)]) -> Object {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let (namespace, name) = (namespace.map(str::to_owned), "site".to_owned());
    Object { group: "example.com".to_owned(), resource: resource.to_owned(), namespace, name, labels }
}

fn shown(object: Object, configs: &[ShardingConfig]) -> String {
    let now: Timestamp = "2026-01-01T00:00:02Z".parse().unwrap();
    screen(&owners(object, configs, &Labelling::default()), now)
}

#[test]
fn an_object_belongs_to_the_shard_of_its_slot() {
    let labelling = Labelling::default();
    let own: Vec<(&str, String)> = labelling.of_namespace("shop").into();
    let mut labels: Vec<(&str, &str)> = own.iter().map(|(key, value)| (*key, value.as_str())).collect();
    labels.push(("tier", "gold"));
    let slot = labelling.hash.slot("shop");
    let expected = format!(
        "\
Object: websites.example.com shop/site
Slot:   {slot}
Labels: it has those by which shards see it

Root:    ops/web, Deployment web, epoch 3
  Owner: web-1-normal, by slot {slot}
  POD     NODE   EPOCH   CONTACT
  web-a   n1     3       2s ago
"
    );
    assert_eq!(shown(object("websites", Some("shop"), &labels), &configs(&Value::Null)), expected);
}

#[test]
fn what_no_shard_sees_is_said() {
    let all = configs(&Value::Null);
    let text = shown(object("websites", Some("shop"), &[("tier", "tin")]), &all);
    assert!(text.contains("no shard sees it before it has ctrlmesh.kusionstack.io/sharding-hash="), "{text}");
    assert!(text.contains("  Selected: no: resourceSelector leaves it out"), "{text}");
    let text = shown(object("gadgets", Some("shop"), &[]), &all);
    assert!(text.ends_with("No root divides it, and no shard by hand limits it: every pod sees it.\n"), "{text}");
    let text = shown(object("websites", Some("shop"), &[("tier", "gold")]), &all[..1]);
    assert!(text.ends_with("  no pod works for that shard\n"), "{text}");
}

#[test]
fn what_moves_belongs_to_nobody_and_what_is_pinned_says_so() {
    let slot = Labelling::default().hash.slot("shop").to_string();
    let revoked = json!({"epoch": 3, "slots": {slot.as_str(): "web-2-normal"}, "namespaces": {"late": "web-2-normal"}});
    let all = configs(&revoked);
    let text = shown(object("websites", Some("shop"), &[]), &all);
    assert!(
        text.contains(&format!("Owner:    none now: it is being taken from web-2-normal, by slot {slot}")),
        "{text}"
    );
    let text = shown(object("websites", Some("late"), &[]), &all);
    assert!(text.contains("none now: it is being taken from web-2-normal, by its namespace"), "{text}");
    let mut anybody = configs(&json!({"epoch": 3, "slots": {slot.as_str(): ""}}));
    let text = shown(object("websites", Some("shop"), &[]), &anybody);
    assert!(text.contains("it is being taken from whoever had it"), "{text}");
    let table = anybody[0].status.as_mut().unwrap().ownership.as_mut().unwrap();
    table.slots.insert(slot.parse().unwrap(), "unsharded".to_owned());
    let text = shown(object("websites", Some("shop"), &[]), &anybody);
    assert!(text.contains("the pods that are not enrolled, by slot") && !text.contains("no pod works"), "{text}");
    let text = shown(object("websites", Some("pay"), &[]), &all);
    assert!(text.contains("web-1-normal, by its namespace, which the root names"), "{text}");
}

#[test]
fn objects_of_cluster_scope_are_in_the_slot_of_their_name() {
    let labelling = Labelling::default();
    let all = configs(&Value::Null);
    let of = |group: &str, resource: &str, name: &str| {
        let object = object(resource, None, &[]);
        owners(Object { group: group.to_owned(), name: name.to_owned(), ..object }, &all, &labelling)
    };
    let cluster = of("example.com", "websites", "shop");
    assert_eq!((cluster.slot, cluster.roots[0].rule), (labelling.hash.slot("shop"), Rule::Slot));
    assert!(cluster.missing_labels[1].contains("=cluster."), "{cluster:?}");
    let namespace = of("", "namespaces", "shop");
    assert!(namespace.missing_labels[1].ends_with("=shop"), "{namespace:?}");
}

#[test]
fn a_root_that_is_switched_off_leaves_it_to_its_shards() {
    let mut all = configs(&Value::Null);
    all[0].spec.root.as_mut().unwrap().disable = Some(true);
    let text = shown(object("websites", Some("shop"), &[("tier", "gold")]), &all);
    let expected = "
Root:    ops/web, Deployment web, epoch 3
  Owner: none by slot: the root is switched off, and each of its shards goes by its own limits

Shard:     ops/web-1-normal, of root web, switched off
  Sees it: by its labels: tier=gold
  POD     NODE   EPOCH   CONTACT
  web-a   n1     3       2s ago
";
    assert!(text.ends_with(expected), "{text}");
    let text = shown(object("websites", Some("shop"), &[]), &all);
    assert!(text.ends_with("\nLimits of these shards do not select it: ops/web-1-normal\n"), "{text}");
}

#[test]
fn what_a_wildcard_leaves_out_has_no_owner_by_slot() {
    let mut all = configs(&Value::Null);
    let every = json!([{"relateResources": [{"apiGroups": ["*"], "resources": ["*"]}]}]);
    all[0].spec.root.as_mut().unwrap().resource_selector = serde_json::from_value(every).unwrap();
    let of = |group: &str, resource: &str, labels: &[(&str, &str)]| Object {
        group: group.to_owned(),
        ..object(resource, Some("shop"), labels)
    };
    let event = shown(of("events.k8s.io", "events", &[]), &all);
    let expected = "\
Object: events.events.k8s.io shop/site

Root:     ops/web, Deployment web, epoch 3
  Owner:  none: `*` in the root does not stand for this resource, so the manager does not label it
  Reads:  lists and watches of its shards leave it out; every pod gets it by its name
  Writes: every pod of the root may write it
";
    assert_eq!(event, expected);
    let own = shown(of("ctrlmesh.kusionstack.io", "circuitbreakers", &[]), &all);
    assert!(own.contains("Writes: only pods of the owner of slot "), "{own}");
}

#[test]
fn a_resource_that_is_written_out_or_labelled_goes_by_slot() {
    let lease = |labels: &[(&str, &str)]| Object {
        group: "coordination.k8s.io".to_owned(),
        ..object("leases", Some("shop"), labels)
    };
    let by = |selector: &Value, lease| {
        let mut configs = configs(&Value::Null);
        configs[0].spec.root.as_mut().unwrap().resource_selector = serde_json::from_value(selector.clone()).unwrap();
        let root = owners(lease, &configs, &Labelling::default()).roots.remove(0);
        (root.rule, root.fenced)
    };
    let written_out = json!([{"relateResources": [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}]}]);
    assert_eq!(by(&written_out, lease(&[])), (Rule::Slot, true));
    assert_eq!(by(&json!([]), lease(&[])), (Rule::Unlabelled, false));
    let labelling = Labelling::default();
    let labels = labelling.of_namespace("shop");
    let labels = labels.each_ref().map(|(key, value)| (*key, value.as_str()));
    assert_eq!(by(&json!([]), lease(&labels)), (Rule::Slot, false));
}

#[test]
fn the_document_has_all_documented_fields() {
    let slot = Labelling::default().hash.slot("late").to_string();
    let revoked = json!({"epoch": 3, "slots": {slot.as_str(): "web-2-normal"}, "namespaces": {"late": "web-2-normal"}});
    let mut all = configs(&revoked);
    let mut by_hand = made("by-hand", &json!({"epoch": 2, "pods": [{"name": "pod-a"}]}));
    by_hand.metadata.labels = None;
    all.push(by_hand);
    let owners = owners(object("websites", Some("late"), &[("tier", "gold")]), &all, &Labelling::default());
    let text = document(Format::Json, &Document::new("Owner", &owners)).unwrap();
    let text: Value = serde_json::from_str(&text).unwrap();
    let labels = owners.missing_labels.clone();
    let expected = json!({
        "apiVersion": "cli.ctrlmesh.kusionstack.io/v1alpha1", "kind": "Owner",
        "group": "example.com", "resource": "websites", "namespace": "late", "name": "site",
        "slot": slot, "missingLabels": labels,
        "roots": [{"namespace": "ops", "name": "web", "workload": "Deployment web", "epoch": 3, "selected": true,
            "fenced": true, "takenFrom": "web-2-normal", "rule": "Namespace", "pods": []}],
        "shards": [{"namespace": "ops", "name": "by-hand", "epoch": 2, "selected": true,
            "limits": [{"resources": ["websites.example.com"], "selector": "tier=gold"}],
            "pods": [{"name": "pod-a", "current": false}]}],
    });
    assert_eq!(text, expected);
    let docs = include_str!("../../../../../docs/inspect.md");
    let fields = ["group", "resource", "slot", "missingLabels", "selected", "fenced", "takenFrom"];
    for field in fields.iter().chain(&["shard", "rule", "root", "limits"]) {
        assert!(docs.contains(&format!("`{field}`")) || docs.contains(&format!(".{field}`")), "{field}");
    }
}
