//! What do the commands do that need no cluster? They read files and print.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use anyhow::{Context as _, Result};
use clap::Args;
use ctrlmesh_common::names::label;
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_manager::manifest::Manifests;
use ctrlmesh_manager::shard::Labelling;

mod compile;
mod crds;
mod validate;

pub(crate) use compile::Compile;
pub(crate) use crds::Crds;
pub(crate) use validate::Validate;

/// How objects are labelled.
#[derive(Args)]
pub(crate) struct Labels {
    /// Key of the label with the hash of an object's namespace
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_SHARDING_HASH", default_value = label::SHARDING_HASH, value_name = "KEY")]
    label_sharding_hash: String,
    /// Key of the label with an object's namespace
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_NAMESPACE", default_value = label::NAMESPACE, value_name = "KEY")]
    label_namespace: String,
    /// How a namespace becomes a hash: fnv1a, or kusionstack as the predecessors do it
    #[arg(
        long,
        env = "CTRLMESH_MANAGER_SHARDING_HASH",
        default_value = "fnv1a",
        value_name = "HASH"
    )]
    sharding_hash: NamespaceHash,
}

// === impl Labels ===

impl Labels {
    fn labelling(&self) -> Labelling {
        Labelling {
            hash_key: self.label_sharding_hash.clone(),
            namespace_key: self.label_namespace.clone(),
            hash: self.sharding_hash,
        }
    }
}

/// Reads files, and the files of folders that are YAML or JSON, in the order of their names.
fn manifests(paths: &[PathBuf]) -> Result<Manifests> {
    let mut manifests = Manifests::default();
    for (file, text) in read(paths)? {
        manifests.read(&text).with_context(|| format!("parse {}", file.display()))?;
    }
    Ok(manifests)
}

fn read(paths: &[PathBuf]) -> Result<Vec<(PathBuf, String)>> {
    let text = |file: PathBuf| {
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        Ok((file, text))
    };
    files(paths)?.into_iter().map(text).collect()
}

fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(manifest_files(path).with_context(|| format!("list {}", path.display()))?);
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

fn manifest_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut files: Vec<PathBuf> = entries.collect::<io::Result<_>>()?;
    files.retain(|file| {
        let extension = file.extension().and_then(|extension| extension.to_str());
        file.is_file() && matches!(extension, Some("yaml" | "yml" | "json"))
    });
    files.sort();
    Ok(files)
}

/// Success, unless something was found wrong.
fn verdict(wrong: bool) -> ExitCode {
    if wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
