//! Checks the etcd and kube-apiserver that the user names in place of ours.

use std::path::Path;
use std::process::Command;

use super::CONTROL_PLANE;
use crate::tools;

/// What is wrong with the folder of programs that the user names, if they name one.
pub fn assets_problem() -> Option<String> {
    problem_of(&tools::assets()?, |program| {
        let output = Command::new(program).arg("--version").output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
    })
}

/// The same of a folder; `version` is what a program says of its own.
fn problem_of(folder: &Path, version: impl FnOnce(&Path) -> String) -> Option<String> {
    let mut needed = CONTROL_PLANE.iter().map(|(program, ..)| program);
    let absent = needed.find(|program| tools::is_of_assets(program) && !folder.join(program).is_file());
    if let Some(program) = absent {
        let (variable, folder) = (tools::ASSETS, folder.display());
        return Some(format!(
            "{program} is not in {variable}={folder}; put it there, or unset {variable} and it is built"
        ));
    }
    release_problem(&version(&folder.join("kube-apiserver")))
}

/// What is wrong with what an API server says of its release: the tests know what one minor release does.
fn release_problem(said: &str) -> Option<String> {
    let minor = tools::KUBERNETES.rsplit_once('.').map_or("", |(minor, _)| minor);
    let found = said.strip_prefix("Kubernetes ").unwrap_or(said);
    (!found.starts_with(&format!("{minor}."))).then(|| {
        let variable = tools::ASSETS;
        format!("kube-apiserver in {variable} must be of {minor}, found {found:?}; or unset {variable} and it is built")
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn programs_of_another_release_are_refused() {
        assert_eq!(release_problem(&format!("Kubernetes {}", tools::KUBERNETES)), None);
        assert_eq!(release_problem("Kubernetes v1.36.0"), None);
        let other = release_problem("Kubernetes v1.33.1").unwrap();
        assert!(other.contains("must be of v1.36, found \"v1.33.1\""), "{other}");
        assert!(release_problem("").is_some());
    }

    #[test]
    fn what_is_not_there_or_does_not_do_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let problem = |says: &str| problem_of(folder.path(), |_| says.to_owned());
        for program in ["etcd", "kube-apiserver"] {
            let absent = format!("{program} is not in KUBEBUILDER_ASSETS={};", folder.path().display());
            let said = problem("not asked").unwrap();
            assert!(said.starts_with(&absent), "{said}");
            fs::write(folder.path().join(program), "").unwrap();
        }
        let other = problem("Kubernetes v1.33.1").unwrap();
        assert!(other.contains("must be of v1.36, found \"v1.33.1\""), "{other}");
        assert_eq!(problem(&format!("Kubernetes {}", tools::KUBERNETES)), None);
    }
}
