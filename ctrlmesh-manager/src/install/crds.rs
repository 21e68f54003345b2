//! Writes the CustomResourceDefinitions as files.

use std::path::Path;
use std::{fs, io};

use ctrlmesh_common::api;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// `<group>_<plural>.yaml`, as controller-gen names it.
    pub file: String,
    pub yaml: String,
}

/// # Errors
/// If one cannot be written as YAML.
pub fn all() -> io::Result<Vec<Definition>> {
    let files = api::definitions().into_iter().map(|definition| {
        let file = format!("{}_{}.yaml", definition.spec.group, definition.spec.names.plural);
        let yaml = serde_saphyr::to_string(&definition).map_err(io::Error::other)?;
        Ok(Definition { file, yaml: format!("# Written by `cargo xtask crds`; do not edit.\n{yaml}") })
    });
    files.collect()
}

/// # Errors
/// If a file cannot be written.
pub fn write(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    all()?.iter().try_for_each(|definition| fs::write(folder.join(&definition.file), &definition.yaml))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_in_deploy_are_those_of_the_types() {
        let ours = |name: &str| name.starts_with("ctrlmesh.kusionstack.io_");
        for folder in ["../deploy/crds", "../deploy/chart/files/crds"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
            for definition in all().unwrap() {
                let there = fs::read_to_string(folder.join(&definition.file)).unwrap_or_default();
                assert!(there == definition.yaml, "{} is stale: run `cargo xtask crds`", definition.file);
            }
            let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name());
            let files = files.filter(|name| name.to_str().is_some_and(ours));
            assert_eq!(files.count(), 4, "one is left of a kind that is gone");
        }
    }
}
