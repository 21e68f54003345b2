//! `ctrlmesh validate` and `ctrlmesh compile` on the command line.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{fs, io, process};

/// Manifests that the manager's own tests read, too.
const MANAGER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../ctrlmesh-manager/tests");

const SHARD: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a}\n\
    spec: {selector: {matchLabels: {a: b}}, limits: [{RESOURCES: [{apiGroups: [''], resources: [pods]}], selector: {matchLabels: {team: a}}}]}\n";

/// A file that is there as long as the value.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> io::Result<Self> {
        let file = format!("{}-{name}.yaml", process::id());
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(file);
        fs::write(&path, text)?;
        Ok(Self(path))
    }

    fn validate(&self) -> io::Result<Output> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
        command.args(["validate", "-f"]).arg(&self.0).output()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_good_manifest_is_ok() -> io::Result<()> {
    let output = File::new("good", &SHARD.replace("RESOURCES", "relateResources"))?.validate()?;
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(said(&output).contains("ShardingConfig a ("), "{}", said(&output));
    Ok(())
}

#[test]
fn a_misspelled_field_ends_with_1_and_names_the_field() -> io::Result<()> {
    let output = File::new("typo", &SHARD.replace("RESOURCES", "relatedResources"))?.validate()?;
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("error: spec.limits[0].relatedResources: is not a field"));
    Ok(())
}

#[test]
fn an_undividable_root_exits_1_with_the_given_label_keys() -> io::Result<()> {
    let root = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a}\n\
        spec: {root: {prefix: a, targetStatefulSet: a, auto: {shardingSize: 2, everyShardReplicas: 1}, \
        resourceSelector: [{selector: {matchLabels: {example.com/hash: '3'}}}]}}\n";
    let root = File::new("undividable", root)?;
    assert_eq!(root.validate()?.status.code(), Some(0), "{}", said(&root.validate()?));
    let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
    command.args(["validate", "--label-sharding-hash", "example.com/hash", "-f"]).arg(&root.0);
    let output = command.output()?;
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("excludes everything that shard \"a-2-normal\" could own"));
    Ok(())
}

#[test]
fn unowned_hashes_are_reported_by_the_given_label_keys() -> io::Result<()> {
    let shard = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a}\n\
        spec: {controller: {leaderElectionName: a}, selector: {matchLabels: {a: b}}, \
        limits: [{selector: {matchLabels: {example.com/slot: '3'}}}]}\n";
    let shard = File::new("unowned", shard)?;
    assert!(!said(&shard.validate()?).contains("warning"), "{}", said(&shard.validate()?));
    let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
    command.args(["validate", "--label-sharding-hash", "example.com/slot", "-f"]).arg(&shard.0);
    let output = command.output()?;
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(said(&output).contains("warning: spec.limits: the hashes 0,1,2,4,5"), "{}", said(&output));
    Ok(())
}

#[test]
fn a_list_is_looked_into() -> io::Result<()> {
    let item = SHARD.replace("RESOURCES", "relatedResources").replace('\n', "\n  ");
    let list = format!("apiVersion: v1\nkind: List\nitems:\n- {}\n", item.trim_end());
    let output = File::new("list", &list)?.validate()?;
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("document 1, items[0]): refused"), "{}", said(&output));
    Ok(())
}

#[test]
fn a_file_with_nothing_to_check_is_an_error() -> io::Result<()> {
    let foreign = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n";
    for (name, text) in [("none", foreign), ("empty", "")] {
        let output = File::new(name, text)?.validate()?;
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("nothing to check"), "{}", said(&output));
    }
    Ok(())
}

#[test]
fn the_example_in_the_docs_is_what_is_printed() -> io::Result<()> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/sharding-config.md");
    let docs = fs::read_to_string(docs)?;
    let command = "$ ctrlmesh validate -f shards.yaml\n";
    let shown = docs.split_once(command).and_then(|(_, rest)| rest.split_once("\n```"));
    let output = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"))
        .args(["validate", "-f", "shards.yaml"])
        .current_dir(Path::new(MANAGER).join("manifests"))
        .output()?;
    assert_eq!(Some(said(&output).trim_end()), shown.map(|(shown, _)| shown));
    assert_eq!(output.status.code(), Some(1));
    Ok(())
}

#[test]
fn compile_prints_policies_and_ends_with_1_for_troubles() -> io::Result<()> {
    for (case, code) in [("two-shards-by-hand", 0), ("epochs", 1)] {
        let case = Path::new(MANAGER).join("compile").join(case);
        let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
        command.args(["compile", "-f"]).arg(case.join("in.yaml"));
        let before = case.join("before.yaml");
        if before.exists() {
            command.arg("--before").arg(before);
        }
        let output = command.output()?;
        let expected = fs::read_to_string(case.join("out.yaml"))?;
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", case.display());
        assert_eq!(output.status.code(), Some(code), "{}", case.display());
    }
    Ok(())
}
