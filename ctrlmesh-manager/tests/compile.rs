//! The folder `compile`: manifests, and the policies that follow from them.
//!
//! With `CTRLMESH_GOLDEN=write` in the environment, what follows is written instead; read the difference.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_manager::rules::compile::{Compiled, World, compile};
use ctrlmesh_manager::rules::manifest::Manifests;
use ctrlmesh_manager::rules::pod::Member;
use ctrlmesh_manager::rules::shard::Labelling;
use ctrlmesh_manager::rules::shared::Shared;

fn cases() -> io::Result<Vec<PathBuf>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compile");
    let cases = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut cases: Vec<PathBuf> = cases.collect::<io::Result<_>>()?;
    cases.sort();
    Ok(cases)
}

fn compiled(case: &Path) -> Result<Compiled> {
    let mut manifests = Manifests::default();
    manifests.read(&fs::read_to_string(case.join("in.yaml"))?)?;
    let before = case.join("before.yaml");
    let before: Compiled =
        if before.exists() { serde_saphyr::from_str(&fs::read_to_string(before)?)? } else { Compiled::default() };
    let members: Vec<_> = manifests.pods.iter().map(|pod| Shared::from(Member::from(pod))).collect();
    let labelling = Labelling::default();
    let world = World {
        configs: &manifests.configs,
        breakers: &manifests.breakers,
        injections: &manifests.injections,
        members: &members,
        namespaces: &manifests.namespaces,
        first_ordinals: &manifests.first_ordinals,
        unenrolled: &manifests.unenrolled(),
        evidence: &BTreeMap::new(),
        leads: true,
        held_back: &BTreeSet::new(),
        waiting: &BTreeSet::new(),
        loads: &BTreeMap::new(),
        labelling: &labelling,
    };
    Ok(compile(world, &before.policies))
}

#[test]
fn every_case_compiles_to_what_stands_beside_it() -> Result<()> {
    let write = env::var("CTRLMESH_GOLDEN").is_ok_and(|value| value == "write");
    let mut wrong = Vec::new();
    for case in cases()? {
        let compiled = compiled(&case).with_context(|| case.display().to_string())?;
        let printed = serde_saphyr::to_string(&compiled)?;
        let file = case.join("out.yaml");
        if write {
            fs::write(&file, &printed)?;
        } else if fs::read_to_string(&file).unwrap_or_default() != printed {
            wrong.push(format!("{}:\n{printed}", file.display()));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(cases()?.len() >= 10, "the folder is there");
    Ok(())
}

#[test]
fn every_policy_is_one_that_a_proxy_can_apply() -> Result<()> {
    for case in cases()? {
        for (pod, compiled) in compiled(&case)?.policies {
            assert_eq!(compiled.policy.check(), Ok(()), "{}: {pod}", case.display());
        }
    }
    Ok(())
}
