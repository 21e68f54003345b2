//! Validates manifests in files.
//!
//! A field that the API server would drop is an error, as with `kubectl --validate=strict`.

use std::collections::BTreeMap;

use ctrlmesh_common::api::{CircuitBreaker, FaultInjection, ManagerState, ShardingConfig};
use ctrlmesh_common::names;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Problem, Report, metadata, schema};

/// For manifests without a namespace.
const DEFAULT_NAMESPACE: &str = "default";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub kind: String,
    /// Empty if there is none.
    pub name: String,
    /// File, document (from 1) and item of a list.
    pub place: String,
    /// `None` for foreign resources.
    pub report: Option<Report>,
}

struct Manifest {
    place: String,
    value: Value,
}

impl Verdict {
    pub fn is_refused(&self) -> bool {
        self.report.as_ref().is_some_and(|report| !report.errors.is_empty())
    }
}

/// Checks our resources in `files` (name and documents), each by itself and beside the others.
pub fn manifests(files: &[(String, Vec<Value>)]) -> Vec<Verdict> {
    manifests_and(files, &[], &|_| None)
}

/// As [`manifests`], with further hash labels and a further check of each ShardingConfig.
pub fn manifests_and(
    files: &[(String, Vec<Value>)],
    hash_keys: &[&str],
    more: &dyn Fn(&ShardingConfig) -> Option<Problem>,
) -> Vec<Verdict> {
    let mut manifests = Vec::new();
    for (file, documents) in files {
        for (at, document) in documents.iter().enumerate() {
            let place = format!("{file}, document {}", at + 1);
            unfold(document.clone(), None, place, &mut manifests);
        }
    }
    let read = |manifest: &Manifest| {
        let config = kind(&manifest.value) == "ShardingConfig";
        config.then(|| parsed_config(&manifest.value).ok()).flatten()
    };
    let configs: Vec<Option<ShardingConfig>> = manifests.iter().map(read).collect();
    let identities: Vec<_> = manifests.iter().map(|one| identity(&one.value)).collect();
    let mut first = BTreeMap::new();
    let verdicts = manifests.into_iter().enumerate().map(|(at, manifest)| {
        let identity = &identities[at];
        let is_other = |other: usize| match identity {
            Some(_) => identities[other] != *identity,
            None => other != at,
        };
        let others = configs.iter().enumerate().filter(|(other, _)| is_other(*other));
        let others = others.filter_map(|(_, config)| config.as_ref()).collect::<Vec<_>>();
        let mut verdict = verdict(manifest, &others, hash_keys);
        if let (Some(report), Some(config)) = (&mut verdict.report, &configs[at])
            && report.errors.is_empty()
        {
            report.errors.extend(more(config));
        }
        if let (Some(report), Some(identity)) = (&mut verdict.report, identity) {
            let place = first.entry(identity).or_insert_with(|| verdict.place.clone());
            if *place != verdict.place {
                report.error("metadata.name", format!("is that of {place} too; one of a kind and namespace is allowed, and the later would replace the earlier"));
            }
        }
        verdict
    });
    verdicts.collect()
}

/// Kind, namespace (empty for a `ManagerState`) and name.
fn identity(value: &Value) -> Option<[String; 3]> {
    let name = value["metadata"]["name"].as_str().filter(|name| !name.is_empty())?;
    let namespace = if kind(value) == "ManagerState" { "" } else { namespace(value) };
    Some([kind(value), namespace, name].map(str::to_owned))
}

fn namespace(value: &Value) -> &str {
    let given = value["metadata"]["namespace"].as_str().filter(|given| !given.is_empty());
    given.unwrap_or(DEFAULT_NAMESPACE)
}

/// Normalises as the API server does: null fields go, and `1.0` becomes 1.
fn normalize(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(normalize);
        }
        Value::Array(items) => items.iter_mut().for_each(normalize),
        Value::Number(number) => {
            if let Some(whole) = whole(number) {
                *value = whole.into();
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

/// An integer that is written with a point, if it is exact.
fn whole(number: &serde_json::Number) -> Option<i64> {
    let value = number.as_f64().filter(|value| number.is_f64() && value.fract() == 0.0)?;
    format!("{value:.0}").parse().ok().filter(|whole: &i64| whole.unsigned_abs() < 1 << 53)
}

/// Adds `value`, or the items of a list. Items of a typed list need no kind.
fn unfold(mut value: Value, of: Option<(&str, &Value)>, place: String, into: &mut Vec<Manifest>) {
    if value.is_null() {
        return;
    }
    normalize(&mut value);
    if let (Some((kind, version)), Some(fields)) = (of, value.as_object_mut()) {
        fields.entry("kind").or_insert_with(|| kind.into());
        fields.entry("apiVersion").or_insert_with(|| version.clone());
    }
    let list = kind(&value).strip_suffix("List").map(str::to_owned);
    let (Some(inner), Some(items)) = (list, value["items"].as_array()) else {
        into.push(Manifest { place, value });
        return;
    };
    let of = (!inner.is_empty()).then_some((inner.as_str(), &value["apiVersion"]));
    for (at, item) in items.iter().enumerate() {
        unfold(item.clone(), of, format!("{place}, items[{at}]"), into);
    }
}

fn verdict(manifest: Manifest, others: &[&ShardingConfig], hash_keys: &[&str]) -> Verdict {
    let Manifest { place, value } = manifest;
    let name = value["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let kind = kind(&value).to_owned();
    let (group, version) = value["apiVersion"].as_str().and_then(|text| text.split_once('/')).unwrap_or_default();
    let ours = [names::GROUP, names::KRIDGE_GROUP].contains(&group);
    if !ours && !schema::is_known(&kind) {
        return Verdict { kind, name, place, report: None };
    }
    let mut report = if group != names::GROUP || version != names::VERSION {
        not_served(&value, &kind, [group, version])
    } else {
        Report::default()
    };
    if schema::is_known(&kind) {
        let inner = checked(&kind, &value, others, hash_keys);
        report.errors.extend(inner.errors);
        report.warnings.extend(inner.warnings);
    } else {
        report.error("kind", format!("{kind:?} is no kind of {}", names::GROUP));
    }
    Verdict { kind, name, place, report: Some(report) }
}

/// The API server has our group and version only.
fn not_served(value: &Value, kind: &str, given: [&str; 2]) -> Report {
    let found = value["apiVersion"].as_str().unwrap_or_default();
    let allowed = format!("allowed is {}/{}", names::GROUP, names::VERSION);
    let kridge = kind == "ShardingConfig" && given == [names::KRIDGE_GROUP, names::VERSION];
    let rest = if kridge { "; the rest may stay as it is" } else { "" };
    let mut report = Report::default();
    report.error("apiVersion", format!("{found:?} is not served; {allowed}{rest}"));
    report
}

fn checked(kind: &str, value: &Value, others: &[&ShardingConfig], hash_keys: &[&str]) -> Report {
    let mut written = schema::of_manifest(kind, value);
    written.extend(metadata::check(value.get("metadata")));
    let read = match kind {
        "ShardingConfig" => parsed_config(value).map(|config| config_report(&config, others, hash_keys)),
        "CircuitBreaker" => parsed::<CircuitBreaker>(value).map(|one| super::circuit_breaker(&one)),
        "FaultInjection" => parsed::<FaultInjection>(value).map(|one| super::fault_injection(&one)),
        _ => parsed::<ManagerState>(value).map(|one| super::manager_state(&one)),
    };
    let mut report = match read {
        Ok(report) => report,
        // The schema names the field.
        Err(_) if !written.is_empty() => Report::default(),
        Err(problem) => Report { errors: vec![problem], ..Report::default() },
    };
    let new = written
        .into_iter()
        .filter(|found| !report.errors.iter().any(|known_problem| known_problem.field == found.field));
    let new: Vec<Problem> = new.collect();
    report.errors.extend(new);
    report
}

fn config_report(config: &ShardingConfig, others: &[&ShardingConfig], hash_keys: &[&str]) -> Report {
    let mut report = super::beside_others(config, others, None);
    if report.errors.is_empty() {
        report.warnings.extend(super::unowned_beside(config, others, hash_keys).warnings);
    }
    report
}

fn parsed_config(value: &Value) -> Result<ShardingConfig, Problem> {
    let mut config = parsed::<ShardingConfig>(value)?;
    config.metadata.namespace = Some(namespace(value).to_owned());
    Ok(config)
}

fn parsed<T: DeserializeOwned>(value: &Value) -> Result<T, Problem> {
    serde_json::from_value(value.clone())
        .map_err(|error| Problem { field: "(manifest)".to_owned(), message: error.to_string() })
}

fn kind(value: &Value) -> &str {
    value["kind"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests;
