//! Runs a version of Helm on a cluster, with the chart of the checkout.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::Cluster;
use xtask::{chart, helm};

use crate::mesh::NAMESPACE;

/// The name of the release, as the documentation has it.
pub(crate) const RELEASE: &str = "ctrlmesh";

/// How long a step may take that takes seconds on an idle machine.
const WITHIN: &str = "--timeout=400s";

/// A version of Helm, with a home of its own.
pub(crate) struct Helm<'a> {
    cluster: &'a Cluster,
    release: &'static str,
    home: tempfile::TempDir,
}

impl<'a> Helm<'a> {
    pub(crate) fn of(release: &'static str, cluster: &'a Cluster) -> Result<Self> {
        Ok(Self { cluster, release, home: tempfile::tempdir()? })
    }

    /// A command on the release, such as `upgrade`; what Helm prints.
    pub(crate) fn run(&self, command: &str, arguments: &[&str]) -> Result<String> {
        let mut helm = helm::command(self.release, self.home.path(), Some(self.cluster.kubeconfig()));
        helm.args([command, RELEASE, "--namespace", NAMESPACE, WITHIN]).args(arguments);
        let output = helm.output().context("start helm")?;
        let said = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
        ensure!(output.status.success(), "helm {} {command}: {said}", self.release);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The same, of commands that take the chart; waits until everything is ready.
    pub(crate) fn apply(&self, command: &str, arguments: &[&str]) -> Result<String> {
        let folder = chart::folder().display().to_string();
        self.run(command, &[&[folder.as_str(), "--wait"], arguments].concat())
    }
}
