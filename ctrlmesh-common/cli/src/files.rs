//! Reads the manifests that a command names: files, and folders of files.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use anyhow::{Context as _, Result};
use ctrlmesh_manager::rules::manifest::Manifests;

/// Reads all that [`files`] finds.
pub(crate) fn manifests(paths: &[PathBuf]) -> Result<Manifests> {
    let mut manifests = Manifests::default();
    for file in files(paths)? {
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        manifests.read(&text).with_context(|| format!("parse {}", file.display()))?;
    }
    Ok(manifests)
}

/// Files as they are named; of a folder those that are YAML or JSON, in the order of their names.
pub(crate) fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
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
pub(crate) fn exit_code(wrong: bool) -> ExitCode {
    if wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
