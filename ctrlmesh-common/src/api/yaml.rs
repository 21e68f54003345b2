//! Reads manifests from files: YAML or JSON, one or many documents, ours or Kridge's.

use std::sync::LazyLock;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use serde::Deserialize;
use serde_json::Value;

use super::{ShardingConfig, strict};
use crate::names;

/// The kind that a document must have to be read; others are passed over.
const KIND: &str = "ShardingConfig";

/// The kinds of lists in which it may stand: as kubectl prints them, and as the API server does.
const LIST: &str = "List";
const TYPED_LIST: &str = "ShardingConfigList";

/// Which fields there are.
static DEFINITION: LazyLock<CustomResourceDefinition> = LazyLock::new(ShardingConfig::crd);

/// A manifest that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is no YAML, or its fields are not those of a `ShardingConfig`.
    #[error("document {document}")]
    Document {
        /// Which document of the file, from 1.
        document: usize,
        /// What is wrong, and in which line.
        source: Box<serde_saphyr::Error>,
    },
    /// An item of a list is no `ShardingConfig`, though it says so.
    #[error("document {document}: items[{item}]")]
    Item {
        /// Which document of the file, from 1.
        document: usize,
        /// Which item, from 0.
        item: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A field of its spec that a `ShardingConfig` does not have.
    #[error("document {document}: {field}: no such field; allowed are {allowed}")]
    Field {
        /// Which document of the file, from 1.
        document: usize,
        /// Where the field stands.
        field: String,
        /// The fields that may stand there.
        allowed: String,
    },
    /// It has an API version that is not ours.
    #[error(
        "document {document}: apiVersion: {found:?}, allowed are \"ctrlmesh.kusionstack.io/v1alpha1\" and \"kridge.kusionstack.io/v1alpha1\""
    )]
    ApiVersion {
        /// Which document of the file, from 1.
        document: usize,
        /// What was given.
        found: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TypeMeta {
    api_version: Option<String>,
    kind: Option<String>,
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    items: Option<Vec<Value>>,
}

/// Reads every `ShardingConfig` in `text`, also those in lists; documents of other kinds are passed over.
///
/// # Errors
/// The first `ShardingConfig` that cannot be read, or has a field in its spec that there is not: nobody
/// else would say so of a file.
pub fn read_sharding_configs(text: &str) -> Result<Vec<ShardingConfig>, ReadError> {
    let mut configs = Vec::new();
    for (at, document) in documents(text).enumerate() {
        let number = at + 1;
        let failed = |source| ReadError::Document { document: number, source: Box::new(source) };
        let Some(meta) = serde_saphyr::from_str::<Option<TypeMeta>>(&document).map_err(failed)? else {
            continue;
        };
        match meta.kind.as_deref() {
            Some(KIND) => {
                check_version(number, meta.api_version.as_deref())?;
                let manifest: Value = serde_saphyr::from_str(&document).map_err(failed)?;
                check_fields(number, "", &manifest)?;
                configs.push(serde_saphyr::from_str(&document).map_err(failed)?);
            }
            Some(list @ (LIST | TYPED_LIST)) => {
                let items: List = serde_saphyr::from_str(&document).map_err(failed)?;
                let version = meta.api_version.as_deref().unwrap_or_default();
                let typed = (list == TYPED_LIST).then_some(version);
                read_items(number, typed, items, &mut configs)?;
            }
            _ => {}
        }
    }
    Ok(configs)
}

/// Reads the `ShardingConfig`s of a list; the items of a `typed` one, of this version, need not say what they are.
fn read_items(
    document: usize,
    typed: Option<&str>,
    list: List,
    configs: &mut Vec<ShardingConfig>,
) -> Result<(), ReadError> {
    for (item, manifest) in list.items.into_iter().flatten().enumerate() {
        let text = |field: &str| manifest.get(field).and_then(Value::as_str);
        if text("kind").or(typed.map(|_| KIND)) != Some(KIND) {
            continue;
        }
        check_version(document, text("apiVersion").or(typed))?;
        check_fields(document, &format!("items[{item}]."), &manifest)?;
        let failed = |source| ReadError::Item { document, item, source };
        configs.push(serde_json::from_value(manifest).map_err(failed)?);
    }
    Ok(())
}

fn check_version(document: usize, found: Option<&str>) -> Result<(), ReadError> {
    let found = found.unwrap_or_default();
    let (group, version) = found.split_once('/').unwrap_or_default();
    if ![names::GROUP, names::KRIDGE_GROUP].contains(&group) || version != names::VERSION {
        return Err(ReadError::ApiVersion { document, found: found.to_owned() });
    }
    Ok(())
}

/// Whether there are only fields that there may be; `place` is where the manifest stands in the document.
fn check_fields(document: usize, place: &str, manifest: &Value) -> Result<(), ReadError> {
    strict::unknown_in_spec(&DEFINITION, manifest).map_or(Ok(()), |unknown| {
        let field = format!("{place}{}", unknown.field);
        Err(ReadError::Field { document, field, allowed: unknown.allowed.join(", ") })
    })
}

/// The documents of a YAML stream, each behind as many empty lines as it has lines before it, so that an error names
/// the line of the file.
pub fn documents(text: &str) -> impl Iterator<Item = String> {
    let mut starts = vec![0];
    let lines: Vec<&str> = text.lines().collect();
    starts.extend(lines.iter().enumerate().filter(|(_, line)| is_separator(line)).map(|(at, _)| at + 1));
    let ends: Vec<usize> = starts.iter().skip(1).map(|start| start - 1).chain([lines.len()]).collect();
    let parts: Vec<String> =
        starts.into_iter().zip(ends).map(|(start, end)| "\n".repeat(start) + &lines[start..end].join("\n")).collect();
    parts.into_iter().filter(|part| !part.trim().is_empty())
}

fn is_separator(line: &str) -> bool {
    line.strip_prefix("---").is_some_and(|rest| rest.trim().is_empty() || rest.starts_with(" #"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1";

    #[test]
    fn lists_are_read_as_documents_are() {
        let item =
            |spec: &str| format!("- {VERSION}\n  kind: ShardingConfig\n  metadata: {{name: a}}\n  spec: {spec}\n");
        let bare = |spec: &str| format!("- metadata: {{name: a}}\n  spec: {spec}\n");
        let of_kubectl = "apiVersion: v1\nkind: List\nitems:\n- {kind: Secret, spec: {x: 1}}\n";
        let of_server = format!("{VERSION}\nkind: ShardingConfigList\nitems:\n");
        for (list, item, at) in [
            (of_kubectl, &item as &dyn Fn(&str) -> String, 1),
            (of_server.as_str(), &item, 0),
            (of_server.as_str(), &bare, 0),
        ] {
            let read = |spec| read_sharding_configs(&format!("{list}{}", item(spec)));
            let found = read("{controller: {leaderElectionName: l}}").unwrap();
            assert_eq!(found.len(), 1, "{list}");
            assert_eq!(found[0].metadata.name.as_deref(), Some("a"));
            let unknown = read("{limts: []}").unwrap_err().to_string();
            let wanted = format!("document 1: items[{at}].spec.limts: no such field; allowed are");
            assert!(unknown.starts_with(&wanted), "{unknown}");
            let wrong = read("{limits: 5}").unwrap_err().to_string();
            assert_eq!(wrong, format!("document 1: items[{at}]"));
        }
        let foreign = of_server.replace("ctrlmesh.", "other.") + &bare("{}");
        let error = read_sharding_configs(&foreign).unwrap_err().to_string();
        assert!(error.starts_with("document 1: apiVersion: \"other."), "{error}");
        for empty in ["kind: PodList\nitems: []\n", "kind: List\n", "kind: List\nitems: null\n"] {
            assert_eq!(read_sharding_configs(&format!("apiVersion: v1\n{empty}")).unwrap(), []);
        }
    }
}
