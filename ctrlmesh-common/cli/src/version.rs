//! `ctrlmesh version`: shows the version of this program, and those of the managers and proxies of a cluster.
//!
//! It asks the API server only, with the rights of whoever calls it.

mod args;
pub(crate) mod image;
pub(crate) mod part;

use std::io;
use std::io::{Write as _, stdout};

use ctrlmesh_manager::install::rbac;
use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;

pub(crate) use self::args::Arguments;
use self::part::Part;
use crate::cluster::answer::{self, Answer, Unanswered};
use crate::cluster::{self, ClusterError, Connection};
use crate::text::{self, Document, DocumentError};

/// Kind of the document about versions.
const KIND: &str = "Version";

/// Why versions cannot be shown, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VersionError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("read the pods of the cluster: {reason} (does `kubectl get pods` work? --client asks no API server)")]
    Read { reason: String },
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

/// The versions of this program and of a cluster.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Versions {
    client: &'static str,
    /// Absent with `--client`, and where the user may not list the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    managers: Option<Vec<Part>>,
    /// The same.
    #[serde(skip_serializing_if = "Option::is_none")]
    node_proxies: Option<Vec<Part>>,
    /// The same.
    #[serde(skip_serializing_if = "Option::is_none")]
    sidecars: Option<Vec<Part>>,
    /// Rights that the user lacks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    missing_rights: Vec<String>,
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it. People see the version of this program also then.
pub(crate) fn run(arguments: &Arguments) -> Result<(), VersionError> {
    let mut versions =
        Versions { client: image::OWN, managers: None, node_proxies: None, sidecars: None, missing_rights: Vec::new() };
    let read = if arguments.client { Ok(()) } else { cluster::block_on(read(arguments, &mut versions)) };
    let printed = match arguments.output {
        Some(format) => {
            read?;
            text::document(format, &Document::new(KIND, &versions))?
        }
        None if arguments.client || read.is_err() => {
            write!(stdout().lock(), "{}", text::described(&[client(&versions)]))?;
            return read;
        }
        None => screen(&versions),
    };
    Ok(write!(stdout().lock(), "{printed}")?)
}

async fn read(arguments: &Arguments, versions: &mut Versions) -> Result<(), VersionError> {
    let client = Connection::of(&arguments.cluster).await?.client;
    let managers = answer::list::<Pod>(&client, rbac::NAMESPACE, part::MANAGERS).await;
    versions.managers = taken(managers, part::MANAGER, &mut versions.missing_rights)?;
    let proxies = answer::list::<Pod>(&client, rbac::NAMESPACE, part::NODE_PROXIES).await;
    versions.node_proxies = taken(proxies, part::NODE_PROXY, &mut versions.missing_rights)?;
    let enrolled = answer::list_all::<Pod>(&client, &part::enrolled()).await;
    versions.sidecars = taken(enrolled, part::SIDECAR, &mut versions.missing_rights)?;
    Ok(())
}

/// The images of these pods. `None`: the user may not list them.
fn taken(
    pods: Answer<Vec<Pod>>,
    container: &str,
    missing: &mut Vec<String>,
) -> Result<Option<Vec<Part>>, VersionError> {
    match pods {
        Ok(pods) => Ok(Some(part::parts(&pods, container))),
        Err(Unanswered::Forbidden { right }) => {
            if !missing.contains(&right) {
                missing.push(right);
            }
            Ok(None)
        }
        Err(Unanswered::Failed { error, .. }) => Err(VersionError::Read { reason: error }),
    }
}

fn client(versions: &Versions) -> (&'static str, String) {
    ("Client", versions.client.to_owned())
}

fn screen(versions: &Versions) -> String {
    let line = |parts: &Option<Vec<Part>>| match parts.as_deref() {
        None => "not known: you may not list their pods".to_owned(),
        Some([]) => "none".to_owned(),
        Some(parts) => parts.iter().map(said).collect::<Vec<_>>().join(", "),
    };
    text::described(&[
        client(versions),
        ("Managers", line(&versions.managers)),
        ("Node proxies", line(&versions.node_proxies)),
        ("Sidecars", line(&versions.sidecars)),
    ])
}

fn said(part: &Part) -> String {
    let version = part.version.as_ref().unwrap_or(&part.image);
    format!("{version} ({})", text::counted(part.pods, "pod"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn part(image: &str, version: Option<&str>, pods: usize) -> Part {
        Part { image: image.to_owned(), version: version.map(str::to_owned), pods }
    }

    fn versions() -> Versions {
        Versions {
            client: "0.1.0",
            managers: Some(vec![part("m:0.1.0", Some("0.1.0"), 2)]),
            node_proxies: Some(vec![part("p:0.1.0", Some("0.1.0"), 1), part("p@sha256:0", None, 2)]),
            sidecars: None,
            missing_rights: vec!["list pods in all namespaces".to_owned()],
        }
    }

    #[test]
    fn each_part_has_a_line() {
        let expected = "\
Client:       0.1.0
Managers:     0.1.0 (2 pods)
Node proxies: 0.1.0 (1 pod), p@sha256:0 (2 pods)
Sidecars:     not known: you may not list their pods
";
        assert_eq!(screen(&versions()), expected);
    }

    #[test]
    fn programs_get_every_documented_field() {
        let document = text::document(text::Format::Json, &Document::new(KIND, &versions())).unwrap();
        let document: serde_json::Value = serde_json::from_str(&document).unwrap();
        let expected = json!({"apiVersion": "cli.ctrlmesh.kusionstack.io/v1alpha1", "kind": "Version",
            "client": "0.1.0",
            "managers": [{"image": "m:0.1.0", "version": "0.1.0", "pods": 2}],
            "nodeProxies": [{"image": "p:0.1.0", "version": "0.1.0", "pods": 1}, {"image": "p@sha256:0", "pods": 2}],
            "missingRights": ["list pods in all namespaces"]});
        assert_eq!(document, expected);
        let docs = include_str!("../../../docs/inspect.md");
        for field in ["client", "managers", "nodeProxies", "sidecars", "missingRights", ".image", ".version", ".pods"] {
            assert!(docs.contains(&format!("{field}`")), "{field}");
        }
    }
}
