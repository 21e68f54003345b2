//! Validates the manifests in the folder `manifests`, without an API server.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api;
use ctrlmesh_manager::rules::validate;
use serde_json::Value;

const ACCEPTED: &str = include_str!("manifests/accepted.yaml");

const REFUSED: &str = include_str!("manifests/refused.yaml");

/// The problems of a manifest by itself.
fn said(manifest: &str) -> Result<Vec<String>> {
    let value: Value = serde_saphyr::from_str(manifest)?;
    let file = ("file".to_owned(), vec![value]);
    let reports = validate::manifests(&[file]).into_iter().filter_map(|verdict| verdict.report);
    Ok(reports.flat_map(|report| report.errors).map(|problem| problem.to_string()).collect())
}

#[test]
fn manifests_of_the_predecessors_users_are_accepted() -> Result<()> {
    for manifest in ACCEPTED.split("\n---\n") {
        assert_eq!(said(manifest)?, Vec::<String>::new(), "{manifest}");
    }
    // Beside each other, too.
    let configs = api::read_sharding_configs(ACCEPTED)?;
    for config in &configs {
        let report = validate::sharding_config(config, &configs, None);
        assert_eq!(report.errors, [], "{:?}", config.metadata.name);
    }
    Ok(())
}

#[test]
fn invalid_manifests_are_refused_with_field_and_what_is_allowed() -> Result<()> {
    let mut wrong = Vec::new();
    for manifest in REFUSED.split("\n---\n") {
        let comment = |kind: &str| manifest.lines().find_map(|line| line.strip_prefix(kind));
        // A webhook must not trust the schema: it refuses all that the schema does, in its own words.
        let expected = comment("# ours: ").or_else(|| comment("# admission: "));
        let expected = expected.with_context(|| format!("no comment: {manifest}"))?;
        let said = said(manifest)?;
        let as_expected = |one: &String| {
            let (field, parts) = expected.split_once('|').unwrap_or((expected, ""));
            one.starts_with(field) && parts.split('|').all(|part| one.contains(part))
        };
        if !said.iter().any(as_expected) {
            wrong.push(format!("{manifest}\n  expected: {expected}\n  said:     {said:#?}\n"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Rules that only a change or a status can break, each with its test.
const ELSEWHERE: [(&str, &str); 4] = [
    ("selector: is immutable; it can be neither added nor removed.", "xtask/e2e: definitions/changes.rs"),
    ("root: can be neither added nor removed.", "xtask/e2e: definitions/changes.rs"),
    ("is immutable. Delete the ShardingConfig", "xtask/e2e: definitions/changes.rs"),
    ("every key must be a slot", "xtask/e2e: definitions/shown.rs"),
];

/// The messages of the CEL rules below `schema`.
fn messages(schema: &Value, found: &mut BTreeSet<String>) {
    let rules = schema["x-kubernetes-validations"].as_array().into_iter().flatten();
    found.extend(rules.map(|rule| rule["message"].as_str().unwrap_or_default().to_owned()));
    let inner = schema.as_object().into_iter().flatten().map(|(_, inner)| inner);
    inner.chain(schema.as_array().into_iter().flatten()).for_each(|inner| messages(inner, found));
}

#[test]
fn each_rule_of_the_schemas_has_a_manifest_that_breaks_it() -> Result<()> {
    let mut rules = BTreeSet::new();
    for definition in api::definitions() {
        messages(&serde_json::to_value(&definition.spec)?, &mut rules);
    }
    ensure!(rules.len() > 30 && !rules.contains(""), "a rule without a message: {rules:?}");
    let lines = REFUSED.lines().filter_map(|line| line.strip_prefix("# schema: "));
    let broken: Vec<&str> = lines.flat_map(|line| line.split('|')).map(str::trim).collect();
    // A word or two would be in many: what is compared says what is allowed.
    let has_manifest = |rule: &String| {
        let is_of_rule = |part: &&str| part.len() > 12 && (rule.contains(part) || part.contains(rule.as_str()));
        broken.iter().any(is_of_rule) || ELSEWHERE.iter().any(|(part, _)| rule.starts_with(part))
    };
    let without: Vec<&String> = rules.iter().filter(|rule| !has_manifest(rule)).collect();
    assert!(without.is_empty(), "no manifest in refused.yaml breaks {without:#?}");
    let gone = |(part, _): &&(&str, &str)| !rules.iter().any(|rule| rule.starts_with(part));
    assert_eq!(ELSEWHERE.iter().find(gone), None);
    Ok(())
}
