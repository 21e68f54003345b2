//! Runs Helm and kubectl on a control plane.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::{ControlPlane, until};
use serde_json::Value;
use xtask::{chart, helm, kubectl, tools};

/// The namespace that the chart is for, and the name of its release.
pub(crate) const NAMESPACE: &str = "ctrlmesh-system";
pub(crate) const RELEASE: &str = "ctrlmesh";

/// Every value, other than by default.
pub(crate) fn all_values() -> PathBuf {
    chart::folder().join("ci/all-values.yaml")
}

/// A version of Helm, with a home of its own.
pub(crate) struct Helm {
    release: &'static str,
    home: tempfile::TempDir,
    kubeconfig: Option<PathBuf>,
}

impl Helm {
    /// One that knows no cluster.
    pub(crate) fn alone(release: &'static str) -> Self {
        Self { release, home: tempfile::tempdir().unwrap(), kubeconfig: None }
    }

    pub(crate) fn of(release: &'static str, plane: &ControlPlane) -> Self {
        Self { kubeconfig: Some(plane.kubeconfig()), ..Self::alone(release) }
    }

    pub(crate) fn program(&self) -> PathBuf {
        tools::helm(self.release)
    }

    /// What it says, with its exit status.
    pub(crate) fn output(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = helm::command(self.release, self.home.path(), self.kubeconfig.as_deref());
        command.args(arguments).output().with_context(|| format!("start {}", self.program().display()))
    }

    /// What it prints.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = self.output(arguments)?;
        let said = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
        ensure!(output.status.success(), "helm {} {}: {said}", self.release, arguments.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What it says of something that it refuses.
    pub(crate) fn refusal(&self, arguments: &[&str]) -> Result<String> {
        let output = self.output(arguments)?;
        ensure!(!output.status.success(), "helm {} {} succeeded", self.release, arguments.join(" "));
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Renders the chart, for the namespace that it is for.
    pub(crate) fn template(&self, arguments: &[&str]) -> Result<String> {
        let folder = chart::folder().display().to_string();
        self.run(&[&["template", RELEASE, &folder, "--namespace", NAMESPACE], arguments].concat())
    }
}

/// What kubectl answers.
pub(crate) fn ask(plane: &ControlPlane, arguments: &[&str], input: &str) -> Result<String> {
    kubectl::answer(kubectl::command(&plane.kubeconfig()).args(arguments), input)
}

/// What kubectl answers, in JSON.
pub(crate) fn json(plane: &ControlPlane, arguments: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&ask(plane, &[arguments, &["--output=json"]].concat(), "")?)?)
}

/// Installs the definitions of the Prometheus operator that the chart has objects of.
pub(crate) fn with_prometheus_kinds(plane: &ControlPlane) -> Result<()> {
    let bundle = tools::prometheus_operator().with_file_name("bundle.yaml");
    let text = fs::read_to_string(&bundle).with_context(|| format!("read {}", bundle.display()))?;
    let names = ["podmonitors", "prometheusrules"].map(|plural| format!("name: {plural}.monitoring.coreos.com"));
    let wanted = text.split("---\n").filter(|one| names.iter().any(|name| one.contains(name)));
    let wanted: Vec<&str> = wanted.filter(|one| one.contains("kind: CustomResourceDefinition")).collect();
    ensure!(wanted.len() == names.len(), "{} definitions in {}", wanted.len(), bundle.display());
    ask(plane, &["apply", "--server-side", "--filename", "-"], &wanted.join("---\n"))?;
    let plurals = ["crd/podmonitors.monitoring.coreos.com", "crd/prometheusrules.monitoring.coreos.com"];
    let wait = [&["wait", "--for=condition=Established", "--timeout=10s"], &plurals[..]].concat();
    // It fails where one has no conditions yet.
    until("the definitions to be established", || Ok(ask(plane, &wait, "").ok().map(drop)))
}
