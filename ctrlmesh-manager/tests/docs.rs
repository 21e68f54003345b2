//! The docs list every metric of the manager, and the ShardingConfigs, CircuitBreakers and FaultInjections in
//! them are valid.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_manager::rules::validate;
use regex::Regex;
use serde_json::Value;

const METRICS: &str = include_str!("../../docs/reference/metrics.md");
const FAULTS: &str = include_str!("../../docs/faults.md");
const GUARDS: &str = include_str!("../../docs/guards.md");
const CANARY_UPGRADE: &str = include_str!("../../docs/canary-upgrade.md");
const SHARDING_CONFIG: &str = include_str!("../../docs/sharding-config.md");

/// What stands in backquotes; examples are fenced, and do not count.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2))
}

/// Names that are registered in a folder's sources: which module does it, the registry does not tell.
fn metrics(folder: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    let registered = Regex::new(r#"(?:register|counter|gauge)\(\s*(?:\w+,\s*)?"([a-z_]+)","#)?;
    for entry in fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()? {
        let path = entry.path();
        if path.is_dir() {
            metrics(&path, found)?;
        } else {
            let source = fs::read_to_string(&path)?;
            found.extend(registered.captures_iter(&source).map(|one| one[1].to_owned()));
        }
    }
    Ok(())
}

#[test]
fn the_docs_list_every_metric() -> Result<()> {
    let mut names = BTreeSet::new();
    metrics(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut names)?;
    ensure!(names.len() > 12 && names.contains("leader"), "{names:?}");
    let listed: BTreeSet<&str> = quoted(METRICS)
        .filter_map(|name| name.split('{').next())
        .map(|name| name.trim_start_matches("ctrlmesh_manager_").trim_end_matches("_total"))
        .collect();
    for name in names {
        ensure!(listed.contains(&*name), "{name} is not in metrics.md");
    }
    Ok(())
}

/// Checks the examples of a page beside each other, as a reader may apply them, and returns how many there are.
fn check_examples(page: &str, kind: &str) -> Result<usize> {
    let blocks = page.split("\n```yaml\n").skip(1).filter_map(|rest| rest.split("\n```").next());
    let shown = blocks.filter(|block| block.contains(&format!("kind: {kind}")));
    let files = shown.map(|block| {
        let documents: Vec<Value> = serde_saphyr::from_multiple(block)?;
        Ok(("page".to_owned(), documents))
    });
    let verdicts = validate::manifests(&files.collect::<Result<Vec<_>>>()?);
    let count = verdicts.len();
    for verdict in verdicts {
        let report = verdict.report.with_context(|| format!("{} passed over", verdict.name))?;
        ensure!(report.errors.is_empty(), "{}: {:?}", verdict.name, report.errors);
        ensure!(report.warnings.is_empty(), "{}: {:?}", verdict.name, report.warnings);
    }
    Ok(count)
}

#[test]
fn the_shards_in_the_docs_are_valid() -> Result<()> {
    ensure!(check_examples(SHARDING_CONFIG, "ShardingConfig")? > 2);
    Ok(())
}

#[test]
fn the_metrics_of_a_rollout_in_the_docs_are_valid() -> Result<()> {
    let (_, section) = CANARY_UPGRADE.split_once("### Metrics of your own").context("no section of metrics")?;
    ensure!(check_examples(section, "ShardingConfig")? == 1);
    Ok(())
}

#[test]
fn the_circuit_breakers_in_the_docs_are_valid() -> Result<()> {
    ensure!(check_examples(GUARDS, "CircuitBreaker")? == 2);
    Ok(())
}

#[test]
fn the_fault_injections_in_the_docs_are_valid() -> Result<()> {
    ensure!(check_examples(FAULTS, "FaultInjection")? == 2);
    Ok(())
}
