use serde_json::Value;

use super::definitions;

/// Every schema in our definitions, each with its path: `[]` is an item of a list, `{}` what stands at any key.
fn schemas() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for definition in definitions() {
        for version in &definition.spec.versions {
            let schema = serde_json::to_value(version).unwrap()["schema"]["openAPIV3Schema"].take();
            walk(&definition.spec.names.kind, schema, &mut found);
        }
    }
    found
}

fn walk(path: &str, schema: Value, found: &mut Vec<(String, Value)>) {
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        walk(&format!("{path}.{name}"), inner.clone(), found);
    }
    for (inner, sign) in [("items", "[]"), ("additionalProperties", "{}")] {
        if let Some(inner) = schema.get(inner) {
            walk(&format!("{path}{sign}"), inner.clone(), found);
        }
    }
    found.push((path.to_owned(), schema));
}

/// Those schemas in which `problem` finds something, each with what it found.
fn wrong(problem: impl Fn(&str, &Value) -> Option<&'static str>) -> Vec<String> {
    let schemas = schemas();
    assert!(schemas.len() > 150, "only {} were found", schemas.len());
    let said =
        |(path, schema): &(String, Value)| Some(format!("{path}: {}", problem(path, schema)?));
    schemas.iter().filter_map(said).collect()
}

/// The API server would refuse a definition that is not; here it needs none, and every path is told.
#[test]
fn schemas_are_structural() {
    const ELSEWHERE: [&str; 6] =
        ["$ref", "allOf", "anyOf", "oneOf", "not", "x-kubernetes-preserve-unknown-fields"];
    let found = wrong(|_, schema| match schema["type"].as_str() {
        None | Some("") => Some("has no type"),
        Some("object") if schema["additionalProperties"].is_boolean() => Some("keeps any field"),
        Some(_) if ELSEWHERE.iter().any(|word| schema.get(word).is_some()) => {
            Some("is said elsewhere, or not at all")
        }
        Some(_) => None,
    });
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn every_list_says_how_it_is_merged() {
    let found = wrong(|_, schema| {
        let kind = schema["x-kubernetes-list-type"].as_str();
        let by_keys = schema["x-kubernetes-list-map-keys"].as_array().is_some_and(|keys| {
            let required = schema["items"]["required"].as_array();
            !keys.is_empty() && keys.iter().all(|key| required.is_some_and(|all| all.contains(key)))
        });
        let plain = schema["items"]["type"] != "object";
        match (schema["type"] == "array", kind) {
            (false, None) | (true, Some("atomic")) => None,
            (true, Some("map")) => (!by_keys).then_some("is merged by keys that may be missing"),
            (true, Some("set")) => (!plain).then_some("is a set of objects"),
            (true, _) => Some("does not say how it is merged"),
            (false, Some(_)) => Some("is merged as a list, and is none"),
        }
    });
    assert_eq!(found, Vec::<String>::new());
}

/// What a rule in CEL may cost is worked out from these bounds, and no object can fill the API server's store.
#[test]
fn all_that_users_write_is_bounded() {
    let found = wrong(|path, schema| {
        let has = |bound: &str| schema.get(bound).is_some_and(|bound| !bound.is_null());
        let part = path.split('.').nth(1)?;
        let is_bounded = match schema["type"].as_str()? {
            "array" => has("maxItems"),
            "string" => has("maxLength") || has("enum"),
            "integer" | "number" => has("minimum") && has("maximum"),
            "object" => !has("additionalProperties") || has("maxProperties"),
            _ => true,
        };
        (part == "spec" && !is_bounded).then_some("has no bound")
    });
    assert_eq!(found, Vec::<String>::new());
}
