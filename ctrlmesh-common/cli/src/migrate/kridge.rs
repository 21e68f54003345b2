//! Converts objects of Kridge's group to ours.
//!
//! Pure. A definition converts between versions of one group only, and never between groups. So objects are copied.

use ctrlmesh_common::names::{GROUP, KRIDGE_GROUP};
use kube::api::DynamicObject;
use serde_json::{Map, Value, json};

use super::object::portable;

/// Fields of a root, as Kridge's first version calls them, and as they are called now.
const MOVED: [(&str, &[&str]); 3] = [
    ("size", &["auto", "shardingSize"]),
    ("normalReplicas", &["auto", "everyShardReplicas"]),
    ("canaryReplicas", &["canary", "replicas"]),
];

/// The same object in our group: keys of labels and annotations too, and the fields of roots that had other names.
pub(super) fn convert(object: &DynamicObject) -> Option<Value> {
    let mut value = portable(object)?;
    value["apiVersion"] = json!(format!("{GROUP}/v1alpha1"));
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        // Nobody serves them, and an owner of the other group owns nothing here.
        metadata.remove("finalizers");
        metadata.remove("ownerReferences");
        for field in ["labels", "annotations"] {
            if let Some(map) = metadata.get_mut(field).and_then(Value::as_object_mut) {
                *map = std::mem::take(map).into_iter().filter(|(key, _)| is_users(key)).map(renamed).collect();
            }
        }
    }
    if let Some(spec) = value.get_mut("spec") {
        rename_keys(spec);
        if let Some(root) = spec.get_mut("root").and_then(Value::as_object_mut) {
            modernize(root);
        }
    }
    Some(value)
}

/// A key of kubectl's holds the whole object in its former group.
fn is_users(key: &str) -> bool {
    key != "kubectl.kubernetes.io/last-applied-configuration"
}

fn renamed((key, value): (String, Value)) -> (String, Value) {
    (key.replace(KRIDGE_GROUP, GROUP), value)
}

/// Selectors name labels of the other group, as keys and as values of `key`. Labels of objects keep their keys: these
/// are taken over as they are.
fn rename_keys(spec: &mut Value) {
    let Some(selector) = spec.get_mut("selector") else { return };
    if let Some(labels) = selector.get_mut("matchLabels").and_then(Value::as_object_mut) {
        *labels = std::mem::take(labels).into_iter().map(renamed).collect();
    }
    for one in selector.get_mut("matchExpressions").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(key) = one.get("key").and_then(Value::as_str) {
            one["key"] = json!(key.replace(KRIDGE_GROUP, GROUP));
        }
    }
}

fn modernize(root: &mut Map<String, Value>) {
    root.remove("type");
    for (old, new) in MOVED {
        if let Some(value) = root.remove(old)
            && let Some(object) = root.entry(new[0]).or_insert_with(|| json!({})).as_object_mut()
        {
            object.entry(new[1]).or_insert(value);
        }
    }
    if let Some(canary) = root.get_mut("canary").and_then(Value::as_object_mut)
        && let Some(hashes) = canary.remove("inNumbers")
    {
        canary.entry("inShardHash").or_insert(hashes);
    }
    for one in root.get_mut("manual").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(shard) = one.as_object_mut()
            && let Some(hashes) = shard.remove("numbers")
        {
            shard.entry("hashes").or_insert(hashes);
        }
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::ShardingConfig;
    use ctrlmesh_manager::rules::validate;

    use super::*;

    fn converted(spec: &Value) -> Value {
        let object = json!({"apiVersion": "kridge.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"name": "a", "namespace": "ns", "uid": "u", "finalizers": ["f"],
                "labels": {"kridge.kusionstack.io/ignore-validate": "true", "team": "x"}},
            "spec": spec, "status": {"root": {}}});
        convert(&serde_json::from_value(object).unwrap()).unwrap()
    }

    #[test]
    fn the_first_versions_fields_are_called_as_now() {
        let root = converted(&json!({"root": {"prefix": "op", "targetStatefulSet": "op", "size": 2,
            "normalReplicas": 1, "canaryReplicas": 3, "type": "auto", "canary": {"inNumbers": ["4"]}}}));
        let config: ShardingConfig = serde_json::from_value(root.clone()).unwrap();
        assert!(validate::sharding_config(&config, &[], None).errors.is_empty(), "{root}");
        let rule = config.spec.root.unwrap();
        let (auto, canary) = (rule.auto.unwrap(), rule.canary.unwrap());
        assert_eq!((auto.sharding_size, auto.every_shard_replicas), (2, Some(1)));
        assert_eq!((canary.replicas, canary.in_shard_hash), (3, vec!["4".to_owned()]));
    }

    #[test]
    fn an_object_comes_without_what_its_server_filled_in() {
        let object = converted(&json!({"selector": {"matchLabels": {"kridge.kusionstack.io/x": "y"}},
            "limits": [{"objectSelector": {"selector": {"matchLabels": {"kridge.kusionstack.io/shard-hash": "1"}}}}]}));
        assert_eq!(
            object["metadata"],
            json!({"name": "a", "namespace": "ns",
            "labels": {"ctrlmesh.kusionstack.io/ignore-validate": "true", "team": "x"}})
        );
        assert_eq!(object["spec"]["selector"]["matchLabels"], json!({"ctrlmesh.kusionstack.io/x": "y"}));
        let kept = &object["spec"]["limits"][0]["objectSelector"]["selector"]["matchLabels"];
        assert_eq!(kept, &json!({"kridge.kusionstack.io/shard-hash": "1"}), "objects keep their labels");
        assert!(object.get("status").is_none());
    }
}
