//! The folder `compile`: manifests, and the policies that follow from them.
//!
//! With `CTRLMESH_GOLDEN=write` in the environment, what follows is written instead; read the difference.

use std::path::{Path, PathBuf};
use std::{env, fs};

use ctrlmesh_manager::compile::{Compiled, World, compile};
use ctrlmesh_manager::manifest::Manifests;
use ctrlmesh_manager::pod::Member;
use ctrlmesh_manager::shard::Labelling;

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compile");
    let mut cases: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    cases
}

fn compiled(case: &Path) -> Compiled {
    let mut manifests = Manifests::default();
    manifests.read(&fs::read_to_string(case.join("in.yaml")).unwrap()).unwrap();
    let before = fs::read_to_string(case.join("before.yaml"))
        .map_or_else(|_| Compiled::default(), |text| serde_saphyr::from_str(&text).unwrap());
    let members: Vec<Member> = manifests.pods.iter().map(Member::from).collect();
    let labelling = Labelling::default();
    let world = World {
        configs: &manifests.configs,
        members: &members,
        namespaces: &manifests.namespaces,
        labelling: &labelling,
    };
    compile(world, &before.policies)
}

#[test]
fn every_case_compiles_to_what_stands_beside_it() {
    let write = env::var("CTRLMESH_GOLDEN").is_ok_and(|value| value == "write");
    let mut wrong = Vec::new();
    for case in cases() {
        let printed = serde_saphyr::to_string(&compiled(&case)).unwrap();
        let file = case.join("out.yaml");
        if write {
            fs::write(&file, &printed).unwrap();
        } else if fs::read_to_string(&file).unwrap_or_default() != printed {
            wrong.push(format!("{}:\n{printed}", file.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(cases().len() >= 9, "the folder is there");
}

#[test]
fn every_policy_is_one_that_a_proxy_can_apply() {
    for case in cases() {
        for (pod, told) in compiled(&case).policies {
            assert_eq!(told.policy.check(), Ok(()), "{}: {pod}", case.display());
        }
    }
}
