//! Runs a version of Helm.

use std::path::Path;
use std::process::Command;

use crate::tools;

/// The one of [`tools::HELMS`] that is named, with a home of its own. Without a kubeconfig it knows no cluster: it
/// finds nothing of whoever runs it.
pub fn command(release: &str, home: &Path, kubeconfig: Option<&Path>) -> Command {
    let mut command = Command::new(tools::helm(release));
    for folder in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(folder, home);
    }
    command.env("KUBECONFIG", kubeconfig.unwrap_or(Path::new("/dev/null")));
    command
}
