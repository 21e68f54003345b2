//! Builds API servers of other releases of Kubernetes, for the tests that `--full` adds.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::progress::step;
use crate::run::{root, run};
use crate::tools;

/// The API server of one of [`tools::OTHER_KUBERNETES`], built where it is not there.
///
/// # Errors
/// Where it cannot be built.
pub fn api_server(release: &str) -> Result<PathBuf> {
    let program = tools::api_server_of(release);
    if !program.is_file() {
        let what = format!("build kube-apiserver {release}, to which tests give the manifests, once per machine");
        step(&what, Duration::from_secs(285), || build(release, &program))?;
    }
    Ok(program)
}

fn build(release: &str, program: &Path) -> Result<()> {
    let (_, minor) = numbers(release);
    let folder = root().join(format!("xtask/kubernetes-1.{minor}"));
    tools::put(program.parent().context("the folder of a tool")?, |staged| {
        let mut go = Command::new("go");
        go.args(["build", "-trimpath", "-buildvcs=false", "-ldflags", &flags(release), "-o"]);
        go.arg(staged.join("kube-apiserver")).arg("k8s.io/kubernetes/cmd/kube-apiserver");
        run(go.current_dir(folder).env("CGO_ENABLED", "0"))
    })
}

/// What tells programs of Kubernetes their release.
pub(super) fn flags(release: &str) -> String {
    let (major, minor) = numbers(release);
    let version = "k8s.io/component-base/version";
    format!("-s -w -X {version}.gitVersion={release} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}")
}

/// `v1.36.3` as 1 and 36.
fn numbers(release: &str) -> (&str, &str) {
    let mut numbers = release.trim_start_matches('v').split('.');
    (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_their_release() {
        let flags = flags("v1.36.3");
        for said in ["gitVersion=v1.36.3 ", "gitMajor=1 ", "gitMinor=36"] {
            assert!(flags.contains(said), "{flags}");
        }
    }

    #[test]
    fn each_other_release_has_a_module() {
        for release in tools::OTHER_KUBERNETES {
            let (_, minor) = numbers(release);
            assert!(root().join(format!("xtask/kubernetes-1.{minor}/go.mod")).is_file(), "{release}");
        }
    }
}
