//! `ctrlmesh`, as people call it.

use std::process::{Command, Output};

use ctrlmesh_testbed::ControlPlane;

use crate::full::OPERATOR;

/// `ctrlmesh` with these arguments, in the operator's namespace.
pub(crate) fn output(cluster: &ControlPlane, arguments: &[&str]) -> Output {
    run(cluster, &[arguments, &["--namespace", OPERATOR]].concat())
}

/// What it prints.
pub(crate) fn printed(cluster: &ControlPlane, arguments: &[&str]) -> String {
    text(arguments, output(cluster, arguments))
}

/// What it prints in another namespace.
pub(crate) fn printed_in(cluster: &ControlPlane, namespace: &str, arguments: &[&str]) -> String {
    text(arguments, run(cluster, &[arguments, &["--namespace", namespace]].concat()))
}

fn run(cluster: &ControlPlane, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_e2e-ctrlmesh"));
    command.args(arguments).arg("--kubeconfig").arg(cluster.kubeconfig());
    command.output().unwrap()
}

fn text(arguments: &[&str], output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}
