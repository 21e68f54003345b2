//! Reads the flags of a Deployment's containers.
//!
//! Pure.

use kube::api::DynamicObject;
use serde_json::{Value, json};

/// A flag with its value, as `--FLAG=VALUE` or in two arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Flag {
    /// With its dashes.
    pub(super) name: String,
    pub(super) value: String,
}

/// The flags that have a value.
pub(super) fn of(deployment: &DynamicObject) -> Vec<Flag> {
    let containers = deployment.data.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    containers.into_iter().flatten().flat_map(of_container).collect()
}

/// Whether a container has the flag `--FLAG=VALUE`, or our variable for it.
pub(super) fn has(deployment: &DynamicObject, flag: &str) -> bool {
    let Some((name, value)) = flag.split_once('=') else { return false };
    let variable = format!("CTRLMESH_MANAGER_{}", name.trim_start_matches('-').replace('-', "_").to_uppercase());
    let containers = deployment.data.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    containers.into_iter().flatten().any(|container| {
        let mut variables = container.get("env").and_then(Value::as_array).into_iter().flatten();
        of_container(container).iter().any(|one| one.name == name && one.value == value)
            || variables.any(|one| one["name"] == json!(variable) && one["value"] == json!(value))
    })
}

fn of_container(container: &Value) -> Vec<Flag> {
    let words = ["command", "args"]
        .into_iter()
        .flat_map(|field| container.get(field).and_then(Value::as_array).into_iter().flatten())
        .filter_map(Value::as_str);
    let mut words = words.peekable();
    let mut flags = Vec::new();
    while let Some(word) = words.next() {
        if !word.starts_with('-') {
            continue;
        }
        let value = match word.split_once('=') {
            Some((name, value)) => Some((name, value)),
            None => words.next_if(|next| !next.starts_with('-')).map(|value| (word, value)),
        };
        flags.extend(value.map(|(name, value)| Flag { name: name.to_owned(), value: value.to_owned() }));
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manager(container: Value) -> DynamicObject {
        let spec = json!({"template": {"spec": {"containers": [container]}}});
        serde_json::from_value(json!({"metadata": {"name": "m"}, "spec": spec})).unwrap()
    }

    #[test]
    fn a_flag_has_its_value_behind_it_or_next_to_it() {
        let words = json!(["run", "--a=1", "--b", "2", "--switch", "--c=x=y", "--last"]);
        let flags = of(&manager(json!({"command": ["/m", "-v", "3"], "args": words})));
        let flags: Vec<(&str, &str)> = flags.iter().map(|one| (one.name.as_str(), one.value.as_str())).collect();
        assert_eq!(flags, [("-v", "3"), ("--a", "1"), ("--b", "2"), ("--c", "x=y")]);
    }

    #[test]
    fn a_variable_of_ours_counts_as_its_flag() {
        let env = json!([{"name": "CTRLMESH_MANAGER_SHARDING_HASH", "value": "kusionstack"}]);
        let manager = manager(json!({"args": ["--x", "y"], "env": env}));
        assert!(has(&manager, "--sharding-hash=kusionstack") && has(&manager, "--x=y"));
        assert!(!has(&manager, "--sharding-hash=fnv1a") && !has(&manager, "--x=z"));
    }
}
