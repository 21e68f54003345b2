use std::sync::LazyLock;

use proptest::prelude::*;
use regex::Regex;
use serde_json::Value;

use super::definitions;
use crate::names::is_dns_subdomain;
use crate::resource::ResourceMatch;
use crate::selector::{check_key, check_value};

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
    let said = |(path, schema): &(String, Value)| Some(format!("{path}: {}", problem(path, schema)?));
    schemas.iter().filter_map(said).collect()
}

/// The API server would refuse a definition that is not; here it needs none, and every path is told.
#[test]
fn schemas_are_structural() {
    const ELSEWHERE: [&str; 6] = ["$ref", "allOf", "anyOf", "oneOf", "not", "x-kubernetes-preserve-unknown-fields"];
    let found = wrong(|_, schema| match schema["type"].as_str() {
        None | Some("") => Some("has no type"),
        Some("object") if schema["additionalProperties"].is_boolean() => Some("keeps any field"),
        Some(_) if ELSEWHERE.iter().any(|word| schema.get(word).is_some()) => Some("is said elsewhere, or not at all"),
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

/// One that somebody wrote would otherwise leave no room for the next.
#[test]
fn an_epoch_is_a_number_that_everybody_reads_exactly() {
    let schemas = schemas();
    for path in ["ShardingConfig.status.epoch", "ShardingConfig.status.ownership.epoch"] {
        let (_, schema) = schemas.iter().find(|(one, _)| one == path).unwrap();
        let bounds = [&schema["minimum"], &schema["maximum"]].map(Value::as_f64);
        assert_eq!(bounds, [Some(0.0), Some(9_007_199_254_740_991.0)], "{path}");
    }
}

/// What a schema allows a text to be.
struct Allowed {
    pattern: Regex,
    /// In characters, as the API server counts.
    longest: usize,
}

impl Allowed {
    /// Of the texts at `path` of our definitions.
    fn at(path: &str) -> Self {
        let (_, schema) = schemas().into_iter().find(|(at, _)| at == path).unwrap();
        let longest = schema["maxLength"].as_u64().unwrap();
        Self {
            pattern: Regex::new(schema["pattern"].as_str().unwrap()).unwrap(),
            longest: usize::try_from(longest).unwrap(),
        }
    }

    fn takes(&self, text: &str) -> bool {
        text.chars().count() <= self.longest && self.pattern.is_match(text)
    }
}

/// A text that is nearly a name: of the letters and signs of which names are made, at the lengths at which they end.
fn nearly_a_name() -> impl Strategy<Value = String> {
    let inner = prop_oneof![
        3 => "[a-zA-Z0-9._/*-]{0,6}",
        1 => "[a-z0-9.-]{250,256}",
        1 => "[a-zA-Z0-9]{61,65}",
        1 => "[a-z]{1,3}(\\.[a-z0-9-]{1,62}){0,4}(/[a-zA-Z0-9._-]{0,65})?",
        1 => "[a-z]{252,254}/[a-zA-Z0-9]{62,64}",
    ];
    (inner, "[\n\u{e4} A]?").prop_map(|(text, end)| text + &end)
}

proptest! {
    /// The rules stand twice: as patterns for the API server, and as functions for the webhook.
    #[test]
    fn the_schema_and_we_know_the_same_names(text in nearly_a_name()) {
        static TEXTS: LazyLock<[Allowed; 5]> = LazyLock::new(|| {
            [
                "limits[].selector.matchExpressions[].key",
                "limits[].selector.matchLabels{}",
                "limits[].relateResources[].apiGroups[]",
                "limits[].relateResources[].resources[]",
                "root.targetStatefulSet",
            ]
            .map(|path| Allowed::at(&format!("ShardingConfig.spec.{path}")))
        });
        let [key, value, group, resource, name] = &*TEXTS;
        // The API server's rule about the part before the slash stands beside the pattern.
        let prefix = text.split_once('/').map_or(0, |(prefix, _)| prefix.len());
        prop_assert_eq!(key.takes(&text) && prefix <= 253, check_key(&text).is_ok());
        prop_assert_eq!(value.takes(&text), check_value(&text).is_ok());
        prop_assert_eq!(name.takes(&text), is_dns_subdomain(&text));
        let of = |group: &str, resource: &str| ResourceMatch {
            api_groups: vec![group.to_owned()],
            resources: vec![resource.to_owned()],
        };
        prop_assert_eq!(group.takes(&text), of(&text, "pods").check().is_ok());
        prop_assert_eq!(resource.takes(&text), of("", &text).check().is_ok());
    }
}
