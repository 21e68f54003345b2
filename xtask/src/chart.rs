//! Writes what follows from the chart in `deploy/chart`: the manifests in `deploy/`, and the table of its values.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::progress::say;
use crate::run::root;
use crate::setup::{Readiness, helm};
use crate::tools;

mod values;

/// The namespace of the manifests.
const NAMESPACE: &str = "ctrlmesh-system";

/// How each written file begins.
const HEADER: &str = "# Written by `cargo xtask chart` from deploy/chart; do not edit.\n";

/// The files in `deploy/` that are rendered, each from the template of the same path.
const MANIFESTS: [&str; 15] = [
    "namespace.yaml",
    "quota.yaml",
    "readers.yaml",
    "webhooks.yaml",
    "network-policy.yaml",
    "manager/rbac.yaml",
    "manager/account-policies.yaml",
    "manager/service.yaml",
    "manager/deployment.yaml",
    "manager/flow.yaml",
    "node/account.yaml",
    "node/announce.yaml",
    "node/daemonset.yaml",
    "observability/monitors.yaml",
    "observability/rules.yaml",
];

/// What the manifests have that a release lacks by default: Helm makes the namespace, and not every cluster has the
/// Prometheus operator.
const SWITCHED_ON: [&str; 3] =
    ["namespace.create=true", "metrics.podMonitors.enabled=true", "metrics.prometheusRule.enabled=true"];

/// Folders whose files kustomize needs in its own folder, and where they are in the chart.
const COPIES: [(&str, &str); 2] = [("files/crds", "crds"), ("files/dashboards", "observability/dashboards")];

/// A file in `deploy/`, and what it has to contain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub path: PathBuf,
    pub text: String,
}

/// The folder of the chart.
pub fn folder() -> PathBuf {
    root().join("deploy/chart")
}

/// Writes the manifests in `deploy/`, and the table of values into the chart's README.
///
/// # Errors
/// Where Helm cannot be built, or refuses the chart, or a file cannot be written.
pub fn write_manifests() -> Result<()> {
    ensure!(helm::prepare(&[tools::HELM_4])? == Readiness::Ready, "without Helm nobody can render the chart");
    for Manifest { path, text } in manifests(&tools::helm(tools::HELM_4))? {
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        say(&format!("wrote {}", path.strip_prefix(root()).unwrap_or(&path).display()));
    }
    let readme = folder().join("README.md");
    Ok(fs::write(&readme, documented(&readme, &folder().join("values.yaml"))?)?)
}

/// The manifests that follow from the chart, as this Helm renders it. The versions of Helm differ in the order of
/// documents, and in empty lines between them.
///
/// # Errors
/// Where Helm refuses the chart, or a template renders nothing.
pub fn manifests(helm: &Path) -> Result<Vec<Manifest>> {
    let (rendered, mut all) = (rendered(helm)?, Vec::new());
    for name in MANIFESTS {
        let text = format!("{HEADER}{}", documents(&rendered, name)?.join("---\n"));
        all.push(Manifest { path: root().join("deploy").join(name), text });
    }
    for (from, to) in COPIES {
        for entry in fs::read_dir(folder().join(from))? {
            let from = entry?.path();
            let path = root().join("deploy").join(to).join(from.file_name().context("the name of a file")?);
            all.push(Manifest { path, text: fs::read_to_string(&from)? });
        }
    }
    Ok(all)
}

/// Whether the table of values is that of `values.yaml`.
///
/// # Errors
/// Where it is not, or a value has no comment.
pub(crate) fn check_values() -> Result<()> {
    let readme = folder().join("README.md");
    let is_current = fs::read_to_string(&readme)? == documented(&readme, &folder().join("values.yaml"))?;
    ensure!(is_current, "deploy/chart/README.md does not have the values of values.yaml: run `cargo xtask chart`");
    Ok(())
}

/// A README with the table of these values.
///
/// # Errors
/// Where a file cannot be read, or a value has no comment.
pub(crate) fn documented(readme: &Path, values: &Path) -> Result<String> {
    let read = |path: &Path| fs::read_to_string(path).with_context(|| format!("read {}", path.display()));
    values::put(&read(readme)?, &values::table(&read(values)?)?)
}

/// All templates, as Helm prints them.
fn rendered(helm: &Path) -> Result<String> {
    let mut command = Command::new(helm);
    command.args(["template", "ctrlmesh", "--namespace", NAMESPACE]).arg(folder());
    for value in SWITCHED_ON {
        command.args(["--set", value]);
    }
    let output = command.output().with_context(|| format!("start {}", helm.display()))?;
    ensure!(output.status.success(), "helm template: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The documents of one of the rendered templates, without the lines that name it.
fn documents(text: &str, template: &str) -> Result<Vec<String>> {
    let all = text.split("---\n# Source: ctrlmesh/templates/");
    let its = all.filter_map(|one| one.strip_prefix(template)?.strip_prefix('\n'));
    let documents: Vec<String> =
        its.map(str::trim).filter(|one| !one.is_empty()).map(|one| format!("{one}\n")).collect();
    ensure!(!documents.is_empty(), "templates/{template} renders nothing");
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_lose_what_helm_puts_before_and_after_them() {
        let source = "---\n# Source: ctrlmesh/templates/a.yaml\n";
        let text = format!("{source}# Why.\nkind: A\n{source}kind: B\n\n");
        assert_eq!(documents(&text, "a.yaml").unwrap(), ["# Why.\nkind: A\n", "kind: B\n"]);
        assert!(documents("\n", "a.yaml").is_err());
    }

    #[test]
    fn the_chart_has_the_version_of_the_workspace() {
        let chart = fs::read_to_string(folder().join("Chart.yaml")).unwrap();
        for line in ["version", "appVersion"].map(|name| format!("\n{name}: {}\n", env!("CARGO_PKG_VERSION"))) {
            assert!(chart.contains(&line), "{line}");
        }
    }

    #[test]
    fn the_table_of_values_is_current() {
        check_values().unwrap();
    }
}
