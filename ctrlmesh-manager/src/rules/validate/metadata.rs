//! Validates the metadata of manifests.
//!
//! A webhook need not: the API server has checked it before.

use ctrlmesh_common::names::{MAX_SUBDOMAIN_BYTES, is_dns_subdomain};
use ctrlmesh_common::selector::{check_key, check_value};
use serde_json::{Map, Value};

use super::Problem;
use super::schema::{problem, unknown};

/// Name and type.
const FIELDS: [(&str, &str); 15] = [
    ("annotations", "object"),
    ("creationTimestamp", "string"),
    ("deletionGracePeriodSeconds", "integer"),
    ("deletionTimestamp", "string"),
    ("finalizers", "array"),
    ("generateName", "string"),
    ("generation", "integer"),
    ("labels", "object"),
    ("managedFields", "array"),
    ("name", "string"),
    ("namespace", "string"),
    ("ownerReferences", "array"),
    ("resourceVersion", "string"),
    ("selfLink", "string"),
    ("uid", "string"),
];

/// Name, type, and whether it is required.
const OWNER_FIELDS: [(&str, &str, bool); 6] = [
    ("apiVersion", "string", true),
    ("blockOwnerDeletion", "boolean", false),
    ("controller", "boolean", false),
    ("kind", "string", true),
    ("name", "string", true),
    ("uid", "string", true),
];

pub(super) fn check(metadata: Option<&Value>) -> Vec<Problem> {
    let mut problems = Vec::new();
    match metadata {
        Some(Value::Object(fields)) => {
            types(fields, &mut problems);
            names(fields, &mut problems);
            labels(fields, &mut problems);
            finalizers(fields, &mut problems);
            owners(fields, &mut problems);
        }
        Some(_) => problems.push(problem("metadata", "must be of the type object".to_owned())),
        None => problems.push(problem("metadata", "is required, with a name".to_owned())),
    }
    problems
}

fn types(fields: &Map<String, Value>, problems: &mut Vec<Problem>) {
    for (name, value) in fields {
        match FIELDS.iter().find(|(known, _)| known == name) {
            Some((_, wanted)) if !is_of(wanted, value) => {
                let message = format!("must be of the type {wanted}");
                problems.push(problem(&format!("metadata.{name}"), message));
            }
            Some(_) => {}
            None => problems.push(unknown("metadata", name, FIELDS.iter().map(|(name, _)| *name))),
        }
    }
}

fn is_of(wanted: &str, value: &Value) -> bool {
    match wanted {
        "array" => value.is_array(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64(),
        "object" => value.is_object(),
        _ => value.is_string(),
    }
}

fn names(fields: &Map<String, Value>, problems: &mut Vec<Problem>) {
    let text = |name: &str| fields.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let allowed = format!(
        "must be a lower-case DNS subdomain: a-z 0-9 - and ., alphanumeric at both ends of each part, at most {MAX_SUBDOMAIN_BYTES} characters"
    );
    match (text("name"), text("generateName")) {
        (Some(name), _) if !is_dns_subdomain(name) => {
            problems.push(problem("metadata.name", format!("{name:?} {allowed}")));
        }
        (None, None) if fields.get("name").is_none_or(Value::is_string) => {
            problems.push(problem("metadata.name", "or generateName is required".to_owned()));
        }
        _ => {}
    }
    if let Some(begin) = text("generateName").filter(|begin| !is_beginning(begin)) {
        problems.push(problem("metadata.generateName", format!("{begin:?}, and what is put behind it, {allowed}")));
    }
    if let Some(namespace) = text("namespace")
        && (!is_dns_subdomain(namespace) || namespace.contains('.') || namespace.len() > 63)
    {
        let message = format!(
            "{namespace:?} must be a DNS label: a-z 0-9 and -, alphanumeric at both ends, at most 63 characters"
        );
        problems.push(problem("metadata.namespace", message));
    }
}

/// Whether generated names are valid. The API server also requires that the prefix is a name, except for a
/// `-` at its end and the character before that.
fn is_beginning(text: &str) -> bool {
    let before = text.strip_suffix('-').and_then(|before| {
        let mut before = before.chars();
        before.next_back().map(|_| before.as_str().to_owned() + "a")
    });
    is_dns_subdomain(before.as_deref().unwrap_or(text)) && is_dns_subdomain(&format!("{text}x"))
}

fn labels(fields: &Map<String, Value>, problems: &mut Vec<Problem>) {
    for list in ["labels", "annotations"] {
        for (key, value) in fields.get(list).and_then(Value::as_object).into_iter().flatten() {
            let field = format!("metadata.{list}.{key}");
            // Only the prefix of an annotation's key may have capitals.
            let key = if list == "annotations" { key.to_lowercase() } else { key.clone() };
            if let Err(error) = check_key(&key) {
                problems.push(problem(&field, error.to_string()));
            } else if let Some(text) = value.as_str() {
                if list == "labels"
                    && let Err(error) = check_value(text)
                {
                    problems.push(problem(&field, error.to_string()));
                }
            } else {
                problems.push(problem(&field, "must be of the type string".to_owned()));
            }
        }
    }
}

fn finalizers(fields: &Map<String, Value>, problems: &mut Vec<Problem>) {
    let given = fields.get("finalizers").and_then(Value::as_array).into_iter().flatten();
    for (at, one) in given.clone().enumerate() {
        let field = format!("metadata.finalizers[{at}]");
        match one.as_str().map(check_key) {
            Some(Ok(())) => {}
            Some(Err(error)) => problems.push(problem(&field, error.to_string())),
            None => problems.push(problem(&field, "must be of the type string".to_owned())),
        }
    }
    if ["orphan", "foregroundDeletion"].iter().all(|one| given.clone().any(|given| given == one)) {
        let message = "orphan and foregroundDeletion exclude each other; allowed is one of them";
        problems.push(problem("metadata.finalizers", message.to_owned()));
    }
}

fn owners(fields: &Map<String, Value>, problems: &mut Vec<Problem>) {
    let owners = fields.get("ownerReferences").and_then(Value::as_array).into_iter().flatten();
    for (at, one) in owners.clone().enumerate() {
        owner(&format!("metadata.ownerReferences[{at}]"), one, problems);
    }
    if owners.filter(|one| one["controller"] == true).count() > 1 {
        let message = "has several controllers; at most one is allowed";
        problems.push(problem("metadata.ownerReferences", message.to_owned()));
    }
}

fn owner(field: &str, owner: &Value, problems: &mut Vec<Problem>) {
    let Some(fields) = owner.as_object() else {
        problems.push(problem(field, "must be of the type object".to_owned()));
        return;
    };
    for (name, wanted, required) in OWNER_FIELDS {
        let field = format!("{field}.{name}");
        match fields.get(name) {
            Some(value) if !is_of(wanted, value) => {
                problems.push(problem(&field, format!("must be of the type {wanted}")));
            }
            None | Some(Value::String(_)) if required && fields.get(name).is_none_or(|one| one == "") => {
                problems.push(problem(&field, "is required".to_owned()));
            }
            _ => {}
        }
    }
    let version = fields.get("apiVersion").and_then(Value::as_str).unwrap_or_default();
    if version.matches('/').count() > 1 || version.ends_with('/') {
        let message = format!("{version:?} is none; allowed are VERSION and GROUP/VERSION");
        problems.push(problem(&format!("{field}.apiVersion"), message));
    }
    if version == "v1" && fields.get("kind").is_some_and(|kind| kind == "Event") {
        problems.push(problem(&format!("{field}.kind"), "an Event cannot be an owner".to_owned()));
    }
    for name in fields.keys().filter(|name| !OWNER_FIELDS.iter().any(|(known, ..)| known == name)) {
        problems.push(unknown(field, name, OWNER_FIELDS.iter().map(|(name, ..)| *name)));
    }
}
