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
        #[source]
        source: Box<serde_saphyr::Error>,
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

/// Reads every `ShardingConfig` in `text`; documents of other kinds are passed over.
///
/// # Errors
/// The first document that is a `ShardingConfig` and cannot be read, or has a field in its spec that there is not: nobody
/// else would say so of a file.
pub fn read_sharding_configs(text: &str) -> Result<Vec<ShardingConfig>, ReadError> {
    let mut configs = Vec::new();
    for (at, document) in documents(text).enumerate() {
        let number = at + 1;
        let failed = |source| ReadError::Document { document: number, source: Box::new(source) };
        let Some(meta) = serde_saphyr::from_str::<Option<TypeMeta>>(&document).map_err(failed)?
        else {
            continue;
        };
        if meta.kind.as_deref() != Some(KIND) {
            continue;
        }
        let found = meta.api_version.unwrap_or_default();
        let (group, version) = found.split_once('/').unwrap_or_default();
        if ![names::GROUP, names::KRIDGE_GROUP].contains(&group) || version != names::VERSION {
            return Err(ReadError::ApiVersion { document: number, found });
        }
        let manifest: Value = serde_saphyr::from_str(&document).map_err(failed)?;
        if let Some(unknown) = strict::unknown_in_spec(&DEFINITION, &manifest) {
            let allowed = unknown.allowed.join(", ");
            return Err(ReadError::Field { document: number, field: unknown.field, allowed });
        }
        configs.push(serde_saphyr::from_str(&document).map_err(failed)?);
    }
    Ok(configs)
}

/// The documents of a YAML stream, each behind as many empty lines as it has lines before it, so that an error names
/// the line of the file.
pub fn documents(text: &str) -> impl Iterator<Item = String> {
    let mut starts = vec![0];
    let lines: Vec<&str> = text.lines().collect();
    starts.extend(
        lines.iter().enumerate().filter(|(_, line)| is_separator(line)).map(|(at, _)| at + 1),
    );
    let ends: Vec<usize> =
        starts.iter().skip(1).map(|start| start - 1).chain([lines.len()]).collect();
    let parts: Vec<String> = starts
        .into_iter()
        .zip(ends)
        .map(|(start, end)| "\n".repeat(start) + &lines[start..end].join("\n"))
        .collect();
    parts.into_iter().filter(|part| !part.trim().is_empty())
}

fn is_separator(line: &str) -> bool {
    line.strip_prefix("---").is_some_and(|rest| rest.trim().is_empty() || rest.starts_with(" #"))
}
