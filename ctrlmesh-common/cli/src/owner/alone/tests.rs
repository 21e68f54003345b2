use serde_json::{Value, json};

use super::*;

fn shard(name: &str, limits: &Value) -> ShardingConfig {
    let config = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"namespace": "ops", "name": name}, "spec": {"limits": limits}});
    serde_json::from_value(config).unwrap()
}

fn gadget(team: &str) -> Object {
    let labels = [("team".to_owned(), team.to_owned())].into();
    let [group, resource, name] = ["example.com", "gadgets", "one"].map(str::to_owned);
    Object { group, resource, namespace: Some("shop".to_owned()), name, labels }
}

/// What the limits say of a gadget of team a: whether they cover it, and whether they select it.
fn said(limits: &Value) -> Option<bool> {
    shards(&gadget("a"), &[shard("one", limits)]).pop().map(|shard| shard.selected)
}

#[test]
fn a_shard_by_hand_selects_by_labels() {
    let gadgets = json!([{"apiGroups": ["example.com"], "resources": ["gadgets"]}]);
    let team = |team: &str| json!({"matchLabels": {"team": team}});
    assert_eq!(said(&json!([{"relateResources": gadgets, "selector": team("a")}])), Some(true));
    assert_eq!(said(&json!([{"relateResources": gadgets, "selector": team("b")}])), Some(false));
    assert_eq!(said(&json!([{"selector": team("a")}])), Some(true), "every resource");
    let nested = json!([{"objectSelector": {"relateResources": gadgets, "selector": team("a")}}]);
    assert_eq!(said(&nested), Some(true), "the other spelling");
    let others = json!([{"apiGroups": [""], "resources": ["pods"]}]);
    assert_eq!(said(&json!([{"relateResources": others, "selector": team("a")}])), None);
    let both = json!([{"relateResources": gadgets, "selector": team("a")}, {"selector": team("b")}]);
    assert_eq!(said(&both), Some(false), "all limits hold");
}

#[test]
fn a_shard_of_a_root_that_divides_does_not_stand_alone() {
    let mut made = shard("web-1-normal", &json!([{"selector": {"matchLabels": {"team": "a"}}}]));
    made.metadata.labels = Some([("ctrlmesh.kusionstack.io/auto-sharding-root".to_owned(), "web".to_owned())].into());
    let mut root = shard("web", &json!([]));
    root.spec.root = Some(serde_json::from_value(json!({"prefix": "web", "targetDeployment": "web"})).unwrap());
    assert_eq!(shards(&gadget("a"), &[root.clone(), made.clone()]).len(), 0);
    root.spec.root.as_mut().unwrap().disable = Some(true);
    let alone = shards(&gadget("a"), &[root, made]);
    assert_eq!((alone.len(), alone[0].root.as_deref()), (1, Some("web")));
}
