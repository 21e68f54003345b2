//! What keeps a proxy from starting.

use std::process::Command;

use crate::harness::PROGRAM;

/// What a sidecar says that does not start with `variable` set to true.
fn refused(variable: &str, more: &[&str]) -> String {
    let mut command = Command::new(PROGRAM);
    command.args(["sidecar", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    command.args(["--upstream", "https://127.0.0.1:1"]).args(more).env(variable, "true");
    let output = command.output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn where_a_policy_is_required_none_starts_without() {
    let required = "CTRLMESH_PROXY_REQUIRE_POLICY";
    let said = refused(required, &[]);
    assert!(said.contains("give --manager, --policy or --sharding-config"), "{said}");
    // With one that cannot be read, it gets as far as that.
    let said = refused(required, &["--policy", "/nonexistent"]);
    assert!(said.contains("read the policy file"), "{said}");
}

#[test]
fn where_the_first_process_serves_no_other_starts() {
    let said = refused("CTRLMESH_PROXY_FIRST_PROCESS_ONLY", &["--policy", "/nonexistent"]);
    assert!(said.contains("only the container's first process may serve (--first-process-only)"), "{said}");
}
