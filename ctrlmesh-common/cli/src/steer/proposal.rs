//! What is to be written into a root, and what that moves.
//!
//! Pure.

use ctrlmesh_common::api::{Root, ShardingConfig};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::error::names;
use super::write::FIELD_MANAGER;
use crate::plan::change::RootPlan;

/// What is to be written into a root.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Proposal {
    #[serde(flatten)]
    pub(super) plan: RootPlan,
    /// JSON merge patch. Absent: nothing moves, and nothing is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) patch: Option<Value>,
    /// Field managers that have written how the root divides. What they write the next time wins.
    pub(super) other_writers: Vec<String>,
    /// Whether it was written. A dry run writes nothing.
    pub(super) written: bool,
    /// Whether all is with its new owner. Absent: that was not waited for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) settled: Option<bool>,
}

impl Proposal {
    pub(super) fn of(live: &ShardingConfig, wanted: &ShardingConfig, plan: RootPlan) -> Self {
        let rules = live.spec.root.as_ref().zip(wanted.spec.root.as_ref());
        let patch = rules.filter(|_| plan.moves_anything()).map(|(live, wanted)| patch(live, wanted));
        let other_writers = if patch.is_some() { other_writers(live) } else { Vec::new() };
        Self { plan, patch, other_writers, written: false, settled: None }
    }

    /// The patch as YAML, a shard a line. Empty where there is none.
    pub(super) fn yaml(&self, indent: &str) -> String {
        let fields = self.patch.iter().filter_map(|patch| patch.pointer("/spec/root")?.as_object());
        let lines = fields.flatten().flat_map(|(name, value)| match value {
            Value::Array(items) => {
                let items = items.iter().map(|item| format!("{indent}    - {item}\n"));
                [format!("{indent}    {name}:\n")].into_iter().chain(items).collect::<Vec<_>>()
            }
            value => vec![format!("{indent}    {name}: {value}\n")],
        });
        let head = self.patch.iter().map(|_| format!("{indent}spec:\n{indent}  root:\n"));
        head.chain(lines).collect()
    }
}

/// What differs, as a JSON merge patch of the spec.
fn patch(live: &Root, wanted: &Root) -> Value {
    let mut root = Map::new();
    if live.auto.is_some() && wanted.auto.is_none() {
        root.insert("auto".to_owned(), Value::Null);
    }
    if let Some(canary) = wanted.canary.as_ref().filter(|canary| Some(*canary) != live.canary.as_ref()) {
        let fields = json!({"inNamespaces": canary.in_namespaces, "inShardHash": canary.in_shard_hash});
        root.insert("canary".to_owned(), fields);
    }
    if live.manual != wanted.manual {
        root.insert("manual".to_owned(), json!(wanted.manual));
    }
    json!({"spec": {"root": root}})
}

/// By `metadata.managedFields`.
fn other_writers(root: &ShardingConfig) -> Vec<String> {
    let entries = root.metadata.managed_fields.iter().flatten();
    let writes = entries.filter(|entry| {
        let rule = entry.fields_v1.as_ref().and_then(|fields| fields.0.pointer("/f:spec/f:root"));
        rule.is_some_and(|rule| ["f:auto", "f:manual", "f:canary"].iter().any(|field| rule.get(field).is_some()))
    });
    let mut names: Vec<String> = writes.filter_map(|entry| entry.manager.clone()).collect();
    names.retain(|name| name != FIELD_MANAGER);
    names.sort();
    names.dedup();
    names
}

/// As `ShardingConfig NAMESPACE/NAME`.
pub(super) fn title(root: &ShardingConfig) -> String {
    let (namespace, name) = names(root);
    format!("ShardingConfig {namespace}/{name}")
}

#[cfg(test)]
mod tests;
