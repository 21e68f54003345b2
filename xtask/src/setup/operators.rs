//! Builds operators that are not ours, and takes the manifests of their Go modules.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::run::{root, run};
use crate::tools;

/// An operator of a Go module.
struct Operator {
    /// The folder in `xtask` with the `go.mod` that names the module's version.
    folder: &'static str,
    module: &'static str,
    /// The package of the program, in the module.
    package: &'static str,
    /// Where the program goes.
    program: PathBuf,
    /// Files of the module, and the names that they get beside the program.
    manifests: &'static [(&'static str, &'static str)],
}

pub(super) fn build_prometheus_operator() -> Result<()> {
    of_prometheus("prometheus-operator", tools::prometheus_operator()).build()
}

pub(super) fn build_prometheus_operator_next() -> Result<()> {
    of_prometheus("prometheus-operator-next", tools::prometheus_operator_next()).build()
}

fn of_prometheus(folder: &'static str, program: PathBuf) -> Operator {
    Operator {
        folder,
        module: "github.com/prometheus-operator/prometheus-operator",
        package: "cmd/operator",
        program,
        manifests: &[("bundle.yaml", "bundle.yaml")],
    }
}

/// Its manifests and samples are under the Elastic License 2.0, so they are not in this repository.
pub(super) fn build_elastic_operator() -> Result<()> {
    let operator = Operator {
        folder: "eck",
        module: "github.com/elastic/cloud-on-k8s/v3",
        package: "cmd",
        program: tools::elastic_operator(),
        manifests: &[
            ("config/crds/v1/all-crds.yaml", "crds.yaml"),
            ("config/webhook/manifests.yaml", "webhook.yaml"),
            ("config/samples/elasticsearch/elasticsearch.yaml", "samples/elasticsearch.yaml"),
            ("config/samples/kibana/kibana_es.yaml", "samples/kibana_es.yaml"),
            ("config/samples/apm/apm_es_kibana.yaml", "samples/apm_es_kibana.yaml"),
        ],
    };
    operator.build()
}

impl Operator {
    fn build(&self) -> Result<()> {
        let name = self.program.file_name().context("the name of a tool")?;
        let folder = self.program.parent().context("the folder of a tool")?;
        tools::put(folder, |staged| {
            let mut build = self.go(&["build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid=", "-o"]);
            run(build.arg(staged.join(name)).arg(format!("{}/{}", self.module, self.package)))?;
            let module = self.module_folder()?;
            self.manifests.iter().try_for_each(|(from, to)| copy(&module.join(from), &staged.join(to)))
        })
    }

    fn go(&self, arguments: &[&str]) -> Command {
        let mut go = Command::new("go");
        go.args(arguments).env("CGO_ENABLED", "0").current_dir(root().join("xtask").join(self.folder));
        go
    }

    /// Where Go keeps the module's sources.
    fn module_folder(&self) -> Result<PathBuf> {
        let output = self.go(&["list", "-m", "-f", "{{.Dir}}", self.module]).output().context("start go list")?;
        ensure!(output.status.success(), "go list: {}", String::from_utf8_lossy(&output.stderr));
        Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim_end()))
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().context("the folder of a manifest")?)?;
    fs::copy(from, to).map(drop).with_context(|| format!("copy {}", from.display()))
}
