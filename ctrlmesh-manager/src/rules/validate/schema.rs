//! Validates objects against the schema in our CRDs.
//!
//! So nothing passes here that the API server refuses. The CEL rules of the schema are repeated by the other
//! modules.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use ctrlmesh_common::api;
use regex::Regex;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{Problem, Report};

/// By kind.
static SCHEMAS: LazyLock<BTreeMap<String, Value>> = LazyLock::new(schemas);

/// Compiled patterns of all schemas.
static PATTERNS: LazyLock<BTreeMap<&str, Regex>> = LazyLock::new(|| {
    let mut patterns = BTreeMap::new();
    SCHEMAS.values().for_each(|schema| collect_patterns(schema, &mut patterns));
    patterns
});

/// Fields that a schema does not list.
const OBJECT_FIELDS: [&str; 3] = ["apiVersion", "kind", "metadata"];

pub(super) fn is_known(kind: &str) -> bool {
    SCHEMAS.contains_key(kind)
}

/// Adds the problems of `spec`, unless `report` has one for the same field.
pub(super) fn of_spec(kind: &str, spec: &impl Serialize, report: &mut Report) {
    let spec = serde_json::to_value(spec).unwrap_or_default();
    let mut problems = Vec::new();
    if let Some(schema) = SCHEMAS.get(kind) {
        check(schema, &json!({"spec": spec}), "", &mut problems);
    }
    problems.retain(|problem| !report.errors.iter().any(|known_problem| covers(&known_problem.field, &problem.field)));
    report.errors.append(&mut problems);
}

/// Problems of a manifest beside its metadata; unknown fields are problems too.
pub(super) fn of_manifest(kind: &str, object: &Value) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let (Some(schema), Some(object)) = (SCHEMAS.get(kind), object.as_object()) {
        let parts = object.iter().filter(|(name, _)| !OBJECT_FIELDS.contains(&name.as_str()));
        let parts = parts.map(|(name, value)| (name.clone(), value.clone())).collect();
        check(schema, &Value::Object(parts), "", &mut problems);
    } else {
        problems.push(problem("", "must be an object".to_owned()));
    }
    problems
}

/// Whether `field` is `outer` or inside it.
fn covers(outer: &str, field: &str) -> bool {
    field.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

#[expect(clippy::expect_used, reason = "the definitions are constants; every test of ours reads them")]
fn schemas() -> BTreeMap<String, Value> {
    let schema = |definition: &_| serde_json::to_value(definition).expect("a definition is JSON");
    let definitions = api::definitions();
    let schemas = definitions.iter().map(|definition| {
        let value = schema(definition);
        let schema = value.pointer("/spec/versions/0/schema/openAPIV3Schema");
        (definition.spec.names.kind.clone(), schema.cloned().expect("a definition has a schema"))
    });
    schemas.collect()
}

#[expect(clippy::expect_used, reason = "the patterns are constants; every test of ours reads them")]
fn collect_patterns<'a>(schema: &'a Value, patterns: &mut BTreeMap<&'a str, Regex>) {
    if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
        patterns.entry(pattern).or_insert_with(|| Regex::new(pattern).expect("a pattern"));
    }
    match schema {
        Value::Object(parts) => parts.values().for_each(|part| collect_patterns(part, patterns)),
        Value::Array(parts) => parts.iter().for_each(|part| collect_patterns(part, patterns)),
        _ => {}
    }
}

fn check(schema: &Value, value: &Value, field: &str, problems: &mut Vec<Problem>) {
    match (schema["type"].as_str().unwrap_or("object"), value) {
        // A null field counts as missing.
        (_, Value::Null) | ("boolean", Value::Bool(_)) => {}
        ("object", Value::Object(fields)) => check_fields(schema, fields, field, problems),
        ("array", Value::Array(items)) => check_items(schema, items, field, problems),
        ("string", Value::String(text)) => check_text(schema, text, field, problems),
        ("integer" | "number", Value::Number(number)) => {
            check_number(schema, number, field, problems);
        }
        (wanted, _) => problems.push(problem(field, format!("must be of the type {wanted}"))),
    }
}

fn check_fields(schema: &Value, fields: &Map<String, Value>, field: &str, problems: &mut Vec<Problem>) {
    let inner = |name: &str| if field.is_empty() { name.to_owned() } else { format!("{field}.{name}") };
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if fields.get(name).is_none_or(Value::is_null) {
            problems.push(problem(&inner(name), "is required".to_owned()));
        }
    }
    let (known, any) = (schema["properties"].as_object(), schema.get("additionalProperties"));
    for (name, value) in fields {
        if let Some(schema) = known.and_then(|known| known.get(name)).or(any) {
            check(schema, value, &inner(name), problems);
        } else if let Some(known) = known {
            problems.push(unknown(field, name, known.keys().map(String::as_str)));
        }
    }
    let most = limit(schema, "maxProperties");
    if most.is_some_and(|most| fields.len() > most) {
        problems.push(counted(field, fields.len(), "entries", None, most));
    }
}

fn check_items(schema: &Value, items: &[Value], field: &str, problems: &mut Vec<Problem>) {
    let (least, most) = (limit(schema, "minItems"), limit(schema, "maxItems"));
    if least.is_some_and(|least| items.len() < least) || most.is_some_and(|most| items.len() > most) {
        problems.push(counted(field, items.len(), "entries", least, most));
    }
    let keys = schema["x-kubernetes-list-map-keys"].as_array();
    let identity = |item: &Value| match keys {
        Some(keys) => keys.iter().filter_map(Value::as_str).map(|key| item[key].to_string()).collect(),
        None => item.to_string(),
    };
    let distinct = matches!(schema["x-kubernetes-list-type"].as_str(), Some("set" | "map"));
    let mut seen = BTreeSet::new();
    for (at, item) in items.iter().enumerate() {
        let field = format!("{field}[{at}]");
        if distinct && !seen.insert(identity(item)) {
            let by = keys.map_or_else(String::new, |keys| format!(", by {}", Value::from(keys.clone())));
            problems.push(problem(&field, format!("is listed twice; every entry must be different{by}")));
        }
        if item.is_null() {
            let wanted = schema["items"]["type"].as_str().unwrap_or("object");
            problems.push(problem(&field, format!("must be of the type {wanted}, and not null")));
        }
        check(&schema["items"], item, &field, problems);
    }
}

fn check_text(schema: &Value, text: &str, field: &str, problems: &mut Vec<Problem>) {
    let (least, most) = (limit(schema, "minLength"), limit(schema, "maxLength"));
    let length = text.chars().count();
    if least.is_some_and(|least| length < least) || most.is_some_and(|most| length > most) {
        problems.push(counted(field, length, "characters", least, most));
        return;
    }
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.iter().any(|one| one.as_str() == Some(text))
    {
        let allowed = Value::from(allowed.clone());
        problems.push(problem(field, format!("{text:?} is not allowed; allowed are {allowed}")));
    }
    if let Some(pattern) = schema["pattern"].as_str()
        && PATTERNS.get(pattern).is_some_and(|regex| !regex.is_match(text))
    {
        problems.push(problem(field, format!("{text:?} is not allowed; it must match {pattern}")));
    }
}

fn check_number(schema: &Value, number: &serde_json::Number, field: &str, problems: &mut Vec<Problem>) {
    let value = number.as_f64().unwrap_or(f64::NAN);
    let (least, most) = (schema["minimum"].as_f64(), schema["maximum"].as_f64());
    if schema["type"] == "integer" && value.fract() != 0.0 {
        problems.push(problem(field, format!("{number} is no integer")));
    } else if least.is_some_and(|least| value < least) || most.is_some_and(|most| value > most) {
        problems.push(problem(field, format!("{number} is not allowed; {}", bounds(least, most))));
    }
}

fn limit(schema: &Value, name: &str) -> Option<usize> {
    schema[name].as_u64().and_then(|limit| usize::try_from(limit).ok())
}

fn counted(field: &str, count: usize, what: &str, least: Option<usize>, most: Option<usize>) -> Problem {
    problem(field, format!("has {count} {what}; {}", bounds(least, most)))
}

fn bounds<T: std::fmt::Display>(least: Option<T>, most: Option<T>) -> String {
    match (least, most) {
        (Some(least), Some(most)) => format!("allowed are {least} to {most}"),
        (Some(least), None) => format!("at least {least} is required"),
        (None, Some(most)) => format!("at most {most} are allowed"),
        (None, None) => "allowed is any number".to_owned(),
    }
}

pub(super) fn unknown<'a>(field: &str, name: &str, known: impl Iterator<Item = &'a str>) -> Problem {
    let path = if field.is_empty() { name.to_owned() } else { format!("{field}.{name}") };
    let known = known.collect::<Vec<_>>().join(", ");
    problem(&path, format!("is not a field that is known here; known are {known}"))
}

pub(super) fn problem(field: &str, message: String) -> Problem {
    Problem { field: field.to_owned(), message }
}

#[cfg(test)]
mod tests;
