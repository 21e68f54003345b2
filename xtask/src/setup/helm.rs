//! Finds or builds both major versions of Helm. Nobody has to be root for it.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::{Readiness, missing_go};
use crate::progress::{say, step};
use crate::run::{root, run};
use crate::tools;

/// A major version of Helm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Helm {
    /// The folder in `xtask` with the `go.mod` that names its release.
    folder: &'static str,
    module: &'static str,
    release: &'static str,
    /// Variables of the linker that say which Kubernetes it knows. Version 4 reads that from its own modules.
    kubernetes: &'static [&'static str],
}

/// Both, the older first.
const ALL: [Helm; 2] = [
    Helm {
        folder: "helm-v3",
        module: "helm.sh/helm/v3",
        release: tools::HELM_3,
        kubernetes: &["pkg/chartutil", "pkg/lint/rules"],
    },
    Helm { folder: "helm-v4", module: "helm.sh/helm/v4", release: tools::HELM_4, kubernetes: &[] },
];

/// Those that are not there.
pub(crate) fn lacking() -> impl Iterator<Item = Helm> {
    ALL.into_iter().filter(|helm| !helm.program().is_file())
}

/// Sees to it that the `wanted` ones are there; builds nothing else, and installs nothing.
///
/// # Errors
/// Where one cannot be built.
pub fn prepare(wanted: &[&str]) -> Result<Readiness> {
    for helm in lacking().filter(|helm| wanted.contains(&helm.release)) {
        if let Some(problem) = missing_go() {
            say(&format!("helm is built here: {problem}"));
            return Ok(Readiness::NotReady);
        }
        let what = format!("build Helm {}, for the chart, once per machine", helm.release);
        step(&what, Duration::from_secs(90), || helm.build())?;
    }
    Ok(Readiness::Ready)
}

impl Helm {
    fn program(self) -> PathBuf {
        tools::helm(self.release)
    }

    fn build(self) -> Result<()> {
        let folder = root().join("xtask").join(self.folder);
        let program = self.program();
        let flags = self.flags(&self.client_go()?)?;
        tools::put(program.parent().context("the folder of a tool")?, |staged| {
            let mut go = Command::new("go");
            go.args(["build", "-trimpath", "-buildvcs=false", "-ldflags", &flags, "-o"]).arg(staged.join("helm"));
            go.arg(format!("{}/cmd/helm", self.module)).env("CGO_ENABLED", "0").current_dir(&folder);
            run(&mut go)
        })
    }

    /// The version of Kubernetes' client in it, as `v0.37.0`.
    fn client_go(self) -> Result<String> {
        let mut go = Command::new("go");
        go.args(["list", "-m", "-f", "{{.Version}}", "k8s.io/client-go"]);
        let output = go.current_dir(root().join("xtask").join(self.folder)).output().context("start go list")?;
        ensure!(output.status.success(), "go list: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }

    /// What Helm's own build tells the linker: without it, Helm says that it knows Kubernetes 1.20.
    fn flags(self, client_go: &str) -> Result<String> {
        let minor = client_go.split('.').nth(1).context("the minor version of client-go")?;
        let Self { module, release, kubernetes, .. } = self;
        let known = kubernetes.iter().map(|package| {
            let variable = format!("{module}/{package}.k8sVersion");
            format!(" -X {variable}Major=1 -X {variable}Minor={minor}")
        });
        let version = format!("-s -w -buildid= -X {module}/internal/version.version={release}");
        Ok([version].into_iter().chain(known).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helm_says_its_version_and_that_of_kubernetes() {
        let [three, four] = ALL.map(|helm| helm.flags("v0.37.2").unwrap());
        assert!(three.contains(&format!("internal/version.version={}", tools::HELM_3)), "{three}");
        assert!(three.contains("helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=37"), "{three}");
        assert!(four.contains(&format!("internal/version.version={}", tools::HELM_4)), "{four}");
        assert!(ALL[0].flags("devel").is_err());
    }
}
