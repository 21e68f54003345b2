//! Would the manifests of these files be accepted?
//!
//! Stricter than reading them: a field that the API server would drop is an error, as with `kubectl --validate=strict`.

use ctrlmesh_common::api::{CircuitBreaker, FaultInjection, ManagerState, ShardingConfig};
use ctrlmesh_common::names;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Problem, Report, schema};

/// What became of one manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Its kind.
    pub kind: String,
    /// Its name; empty where it has none.
    pub name: String,
    /// Where it stands: the file, the document from 1, and the item of a list.
    pub place: String,
    /// What was found; none where it is no resource of ours, and was passed over.
    pub report: Option<Report>,
}

/// One manifest, as it was written.
struct Manifest {
    place: String,
    value: Value,
}

// === impl Verdict ===

impl Verdict {
    /// Whether it would be refused.
    pub fn is_refused(&self) -> bool {
        self.report.as_ref().is_some_and(|report| !report.errors.is_empty())
    }
}

/// Checks every resource of ours in `files`, each a name and the documents that it holds, by itself and beside the
/// others.
pub fn manifests(files: &[(String, Vec<Value>)]) -> Vec<Verdict> {
    let mut manifests = Vec::new();
    for (file, documents) in files {
        for (at, document) in documents.iter().enumerate() {
            let place = format!("{file}, document {}", at + 1);
            unfold(document.clone(), None, place, &mut manifests);
        }
    }
    let read = |manifest: &Manifest| parsed::<ShardingConfig>(&manifest.value).ok();
    let of_kind = |manifest: &&Manifest| kind(&manifest.value) == "ShardingConfig";
    let configs: Vec<ShardingConfig> = manifests.iter().filter(of_kind).filter_map(read).collect();
    manifests.into_iter().map(|manifest| verdict(manifest, &configs)).collect()
}

/// Adds `value`, or, where it is a list, its items; those of a typed list need no kind themselves.
fn unfold(mut value: Value, of: Option<(&str, &Value)>, place: String, into: &mut Vec<Manifest>) {
    if value.is_null() {
        return;
    }
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

fn verdict(manifest: Manifest, configs: &[ShardingConfig]) -> Verdict {
    let Manifest { place, value } = manifest;
    let name = value["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let kind = kind(&value).to_owned();
    let (group, version) =
        value["apiVersion"].as_str().and_then(|text| text.split_once('/')).unwrap_or_default();
    let ours = [names::GROUP, names::KRIDGE_GROUP].contains(&group);
    if !ours && !schema::is_known(&kind) {
        return Verdict { kind, name, place, report: None };
    }
    let report = if !ours || version != names::VERSION {
        let found = value["apiVersion"].as_str().unwrap_or_default();
        refused(
            "apiVersion",
            format!("{found:?} is not served; allowed is {}/{}", names::GROUP, names::VERSION),
        )
    } else if schema::is_known(&kind) {
        checked(&kind, &value, configs)
    } else {
        refused("kind", format!("{kind:?} is no kind of {}", names::GROUP))
    };
    Verdict { kind, name, place, report: Some(report) }
}

fn refused(field: &str, message: String) -> Report {
    let mut report = Report::default();
    report.error(field, message);
    report
}

fn checked(kind: &str, value: &Value, configs: &[ShardingConfig]) -> Report {
    let written = schema::of_manifest(kind, value);
    let read = match kind {
        "ShardingConfig" => {
            parsed(value).map(|config| super::sharding_config(&config, configs, None))
        }
        "CircuitBreaker" => parsed::<CircuitBreaker>(value).map(|one| super::circuit_breaker(&one)),
        "FaultInjection" => parsed::<FaultInjection>(value).map(|one| super::fault_injection(&one)),
        _ => parsed::<ManagerState>(value).map(|one| super::manager_state(&one)),
    };
    let mut report = match read {
        Ok(report) => report,
        // The schema says which field it is.
        Err(_) if !written.is_empty() => Report::default(),
        Err(problem) => Report { errors: vec![problem], ..Report::default() },
    };
    let new = written
        .into_iter()
        .filter(|found| !report.errors.iter().any(|said| said.field == found.field));
    let new: Vec<Problem> = new.collect();
    report.errors.extend(new);
    report
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
