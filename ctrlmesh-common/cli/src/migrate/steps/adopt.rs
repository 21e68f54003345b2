//! Replaces the children of a root by ones of the same names that the root owns.
//!
//! Pure. The predecessor's children select their pods by ordinal, and ours by a label of the pod. A selector cannot be
//! changed. So a child is deleted, and made again with the owner reference that it lacked.

use std::collections::BTreeSet;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::{FINALIZER, label};
use ctrlmesh_manager::rules::shard::{self, Labelling, Shard};
use kube::ResourceExt;
use kube::api::DynamicObject;
use serde_json::Value;

use super::Planned;
use crate::migrate::change::Reversible;
use crate::migrate::labels::Labels;
use crate::migrate::object::{SHARDING_CONFIG, portable};
use crate::migrate::snapshot::{Snapshot, in_both_groups, rule};

/// Label of a child without its group: the name of its root.
const AUTO_SHARDING_ROOT: &str = "auto-sharding-root";

/// Endings of the children's names, behind prefix and number.
const ENDINGS: [&str; 2] = ["canary", "normal"];

pub(super) fn plan(snapshot: &Snapshot) -> Planned {
    let mut planned = Planned::default();
    let labelling = labelling(snapshot);
    let namespaces: BTreeSet<String> = snapshot.namespaces.iter().map(ResourceExt::name_any).collect();
    for root in snapshot.roots() {
        let name = format!("{}/{}", root.namespace().unwrap_or_default(), root.name_any());
        let children: Vec<&DynamicObject> = snapshot.rules.iter().filter(|one| is_child_of(root, one)).collect();
        let divided = parse(root).and_then(|config| {
            let shards = shard::divide(&config, &labelling, &namespaces, &[]).map_err(|error| error.to_string())?;
            Ok((config, shards))
        });
        match divided {
            // It is switched off: its children stand by themselves.
            Ok((_, None)) => planned.notes.push(format!("root {name} is disabled: its children stay as they are")),
            Ok((config, Some(shards))) => {
                planned.problems.extend(shards.iter().filter_map(|shard| taken(root, shard, &children, snapshot)));
                replace(&config, &shards, &children, &mut planned);
            }
            Err(error) => planned.problems.push(format!(
                "root {name} cannot be divided, change it first (`ctrlmesh validate` says the same): {error}"
            )),
        }
    }
    planned
}

/// Whether `object` is called like a child of the predecessor's root, and has the label with the root's name.
pub(super) fn is_child_of(root: &DynamicObject, object: &DynamicObject) -> bool {
    let kinds = [root, object].map(|one| one.types.as_ref().map(|types| (&types.api_version, &types.kind)));
    let Some(prefix) = rule(root).and_then(|rule| rule.get("prefix")).and_then(Value::as_str) else { return false };
    kinds[0] == kinds[1]
        && rule(object).is_none()
        && root.metadata.namespace == object.metadata.namespace
        && is_name_of_child(prefix, &object.name_any())
        && in_both_groups(AUTO_SHARDING_ROOT).iter().any(|key| object.labels().get(key) == Some(&root.name_any()))
}

/// Whether it is `PREFIX-NUMBER-canary` or `PREFIX-NUMBER-normal`.
fn is_name_of_child(prefix: &str, name: &str) -> bool {
    let rest = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('-'));
    rest.and_then(|rest| rest.split_once('-'))
        .is_some_and(|(id, ending)| id.parse::<u8>().is_ok() && ENDINGS.contains(&ending))
}

/// Our managers' own where they run already, and else the predecessor's.
fn labelling(snapshot: &Snapshot) -> Labelling {
    let state = snapshot.manager_state.as_ref();
    let in_force = state.and_then(|state| state.data.pointer("/status/labels/inForce"));
    let text = |field: &str| in_force.and_then(|labels| labels.get(field)?.as_str().map(str::to_owned));
    let read = || {
        Some(Labelling {
            hash_key: text("shardingHash")?,
            namespace_key: text("namespace")?,
            control_key: text("control")?,
            hash: text("hash")?.parse().ok()?,
        })
    };
    read().unwrap_or_else(|| Labels::of(&snapshot.namespaces, snapshot.manager.as_ref()).labelling)
}

/// Why a shard cannot be made: another ShardingConfig has its name.
fn taken(root: &DynamicObject, shard: &Shard, children: &[&DynamicObject], snapshot: &Snapshot) -> Option<String> {
    let target = SHARDING_CONFIG.named(root.metadata.namespace.as_deref(), &shard.share.name);
    let is_target = |one: &DynamicObject| SHARDING_CONFIG.is(one) && SHARDING_CONFIG.of_object(one) == target;
    let is_child = children.iter().any(|child| is_target(child));
    (!is_child && snapshot.rules.iter().any(is_target)).then(|| {
        format!(
            "{target} is called like a shard of root {name}, but does not say that the root made it: give it the label {}={name} if it did, and another name if not",
            label::AUTO_SHARDING_ROOT,
            name = root.name_any()
        )
    })
}

fn parse(object: &DynamicObject) -> Result<ShardingConfig, String> {
    let value = serde_json::to_value(object).map_err(|error| error.to_string())?;
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn replace(root: &ShardingConfig, shards: &[Shard], children: &[&DynamicObject], planned: &mut Planned) {
    let mut whole = BTreeSet::new();
    for child in children {
        let wanted = shards.iter().find(|shard| shard.share.name == child.name_any());
        let is_whole = parse(child).is_ok_and(|child| {
            shard::is_made_by(root, &child)
                && wanted.is_none_or(|wanted| wanted.config.spec.selector == child.spec.selector)
        });
        if is_whole {
            // A running manager of ours has made it, or a run that was cut.
            whole.insert(child.name_any());
            continue;
        }
        let target = SHARDING_CONFIG.of_object(child);
        if child.finalizers().iter().any(|one| one == FINALIZER) {
            planned.changes.push(Reversible::remove_finalizer(target.clone(), FINALIZER));
        }
        planned.changes.push(Reversible::delete(target, portable(child).map(without_finalizer)));
    }
    for shard in shards.iter().filter(|shard| !whole.contains(&shard.share.name)) {
        let target = SHARDING_CONFIG.named(root.metadata.namespace.as_deref(), &shard.share.name);
        match serde_json::to_value(&shard.config) {
            Ok(content) => planned.changes.push(Reversible::create(target, content)),
            Err(error) => planned.problems.push(format!("{target}: {error}")),
        }
    }
    let names: Vec<String> = children.iter().map(|child| child.name_any()).collect();
    let gone = names.iter().filter(|name| !shards.iter().any(|shard| shard.share.name == **name));
    planned.notes.extend(gone.map(|name| format!("root {} has no shard {name} any more", root.name_any())));
}

/// Another record gives the finalizer back.
fn without_finalizer(mut child: Value) -> Value {
    if let Some(metadata) = child.get_mut("metadata").and_then(Value::as_object_mut)
        && let Some(finalizers) = metadata.get_mut("finalizers").and_then(Value::as_array_mut)
    {
        finalizers.retain(|one| one != FINALIZER);
    }
    child
}
