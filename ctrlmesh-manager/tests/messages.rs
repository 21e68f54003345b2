//! What do we say of each manifest in the folder `manifests`, without an API server?

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api;
use ctrlmesh_manager::validate;
use serde_json::Value;

const ACCEPTED: &str = include_str!("manifests/accepted.yaml");

const REFUSED: &str = include_str!("manifests/refused.yaml");

/// What is said against a manifest by itself.
fn said(manifest: &str) -> Result<Vec<String>> {
    let value: Value = serde_saphyr::from_str(manifest)?;
    let file = ("file".to_owned(), vec![value]);
    let reports = validate::manifests(&[file]).into_iter().filter_map(|verdict| verdict.report);
    Ok(reports.flat_map(|report| report.errors).map(|problem| problem.to_string()).collect())
}

#[test]
fn nothing_is_said_against_what_users_of_the_predecessors_have() -> Result<()> {
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
fn what_must_not_be_is_refused_by_field_and_with_what_is_allowed() -> Result<()> {
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
