//! Computes a JSON patch between two versions of an object.
//!
//! Pure. Both versions were written by our types, and the patched object may have fields that those do not know. Such a
//! field stays with its parent. So list elements are matched by name where all have one, and are added, moved and
//! removed as a whole.

use std::collections::BTreeSet;

use json_patch::{
    AddOperation, MoveOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation, jsonptr::PointerBuf,
};
use serde_json::{Map, Value};

/// The patch from `before` to `after`.
pub(super) fn between(before: &Value, after: &Value) -> Patch {
    let mut operations = Vec::new();
    compare(&PointerBuf::new(), before, after, &mut operations);
    Patch(operations)
}

/// A list whose elements have different names.
struct Named<'a> {
    elements: &'a [Value],
    names: Vec<&'a str>,
}

fn compare(path: &PointerBuf, before: &Value, after: &Value, to: &mut Vec<PatchOperation>) {
    match (before, after) {
        _ if before == after => {}
        (Value::Object(before), Value::Object(after)) => fields(path, before, after, to),
        (Value::Array(before), Value::Array(after)) => match (names(before), names(after)) {
            (Some(before_names), Some(after_names)) => {
                let before = Named { elements: before, names: before_names };
                named(path, before, &Named { elements: after, names: after_names }, to);
            }
            _ => numbered(path, before, after, to),
        },
        _ => to.push(PatchOperation::Replace(ReplaceOperation { path: path.clone(), value: after.clone() })),
    }
}

fn fields(path: &PointerBuf, before: &Map<String, Value>, after: &Map<String, Value>, to: &mut Vec<PatchOperation>) {
    for gone in before.keys().filter(|key| !after.contains_key(*key)) {
        to.push(PatchOperation::Remove(RemoveOperation { path: at(path, gone) }));
    }
    for (key, value) in after {
        match before.get(key) {
            Some(old) => compare(&at(path, key), old, value, to),
            None => to.push(add(at(path, key), value)),
        }
    }
}

fn named(path: &PointerBuf, before: Named<'_>, after: &Named<'_>, to: &mut Vec<PatchOperation>) {
    let (mut names, wanted) = (before.names, &after.names);
    let mut there: Vec<&Value> = before.elements.iter().collect();
    for number in (0..names.len()).rev().filter(|number| !wanted.contains(&names[*number])).collect::<Vec<_>>() {
        names.remove(number);
        there.remove(number);
        let path = at(path, &number.to_string());
        to.push(PatchOperation::Remove(RemoveOperation { path }));
    }
    for (number, (name, value)) in wanted.iter().copied().zip(after.elements).enumerate() {
        let here = at(path, &number.to_string());
        let Some(from) = names.iter().position(|one| *one == name) else {
            names.insert(number, name);
            there.insert(number, value);
            to.push(add(here, value));
            continue;
        };
        if from != number {
            let (path, from) = (here.clone(), at(path, &from.to_string()));
            to.push(PatchOperation::Move(MoveOperation { from, path }));
        }
        let (moved, old) = (names.remove(from), there.remove(from));
        names.insert(number, moved);
        there.insert(number, old);
        compare(&here, old, value, to);
    }
}

/// Elements without names: additional ones are appended.
fn numbered(path: &PointerBuf, before: &[Value], after: &[Value], to: &mut Vec<PatchOperation>) {
    for number in (after.len()..before.len()).rev() {
        let path = at(path, &number.to_string());
        to.push(PatchOperation::Remove(RemoveOperation { path }));
    }
    for (number, value) in after.iter().enumerate() {
        let path = at(path, &number.to_string());
        match before.get(number) {
            Some(old) => compare(&path, old, value, to),
            None => to.push(add(path, value)),
        }
    }
}

/// The names of the elements, where all have different ones.
fn names(elements: &[Value]) -> Option<Vec<&str>> {
    let names: Option<Vec<&str>> = elements.iter().map(|one| one.get("name")?.as_str()).collect();
    let names = names?;
    let different: BTreeSet<&str> = names.iter().copied().collect();
    (different.len() == names.len()).then_some(names)
}

fn add(path: PointerBuf, value: &Value) -> PatchOperation {
    PatchOperation::Add(AddOperation { path, value: value.clone() })
}

fn at(path: &PointerBuf, key: &str) -> PointerBuf {
    let mut path = path.clone();
    path.push_back(key);
    path
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// Patches `asked`, which our types read as `before`.
    fn patched(asked: &Value, before: &Value, after: &Value) -> Value {
        let mut patched = asked.clone();
        json_patch::patch(&mut patched, &between(before, after)).unwrap();
        patched
    }

    #[test]
    fn unknown_fields_stay_with_their_parent() {
        let asked = json!({"spec": {"initContainers": [{"name": "a", "image": "x", "new": 1}, {"name": "b", "new": 2}],
            "env": [{"name": "A", "valueFrom": {"fileKeyRef": {"key": "k"}}}, {"name": "B", "value": "1"}]}});
        let before = json!({"spec": {"initContainers": [{"name": "a", "image": "x"}, {"name": "b"}],
            "env": [{"name": "A", "valueFrom": {}}, {"name": "B", "value": "1"}]}});
        let after = json!({"spec": {"initContainers": [{"name": "ours"}, {"name": "a", "image": "y"}, {"name": "b"}],
            "env": [{"name": "HOST", "value": "h"}, {"name": "A", "valueFrom": {}}, {"name": "B", "value": "1"}]}});
        let expected = json!({"spec": {"initContainers": [{"name": "ours"}, {"name": "a", "image": "y", "new": 1}, {"name": "b", "new": 2}],
            "env": [{"name": "HOST", "value": "h"}, {"name": "A", "valueFrom": {"fileKeyRef": {"key": "k"}}}, {"name": "B", "value": "1"}]}});
        assert_eq!(patched(&asked, &before, &after), expected);
    }

    fn any_list() -> impl Strategy<Value = Value> {
        let element = (0..6_u8, 0..3_u8, any::<bool>());
        prop::collection::vec(element, 0..6).prop_map(|elements| {
            let element = |(name, value, named): (u8, u8, bool)| {
                if named || value > 0 {
                    json!({"name": name.to_string(), "v": value, "a/b~c": {}})
                } else {
                    json!(value)
                }
            };
            json!({"list": elements.into_iter().map(element).collect::<Vec<_>>()})
        })
    }

    proptest! {
        #[test]
        fn the_patch_turns_one_object_into_the_other(before in any_list(), after in any_list()) {
            prop_assert_eq!(patched(&before, &before, &after), after);
        }
    }
}
