//! Paths of the programs that the bed runs.

use std::fmt;
use std::path::PathBuf;

use xtask::tools;

/// The programs of a control plane.
#[derive(Clone, Debug)]
pub struct Tools {
    /// etcd.
    pub etcd: PathBuf,
    /// kube-apiserver.
    pub apiserver: PathBuf,
    /// kube-controller-manager; needed only where asked for.
    pub controller_manager: PathBuf,
}

/// The programs of a node, and those of the control plane that only a cluster with nodes needs.
#[derive(Clone, Debug)]
pub(crate) struct NodeTools {
    /// kubelet.
    pub(crate) kubelet: PathBuf,
    /// kube-proxy.
    pub(crate) kube_proxy: PathBuf,
    /// kube-scheduler.
    pub(crate) scheduler: PathBuf,
}

/// A program that is not there.
#[derive(Debug)]
pub struct ToolsError {
    missing: PathBuf,
}

impl Tools {
    /// Finds the programs: in `$KUBEBUILDER_ASSETS` where that is set, else in our cache, which
    /// `cargo xtask setup` fills.
    ///
    /// # Errors
    /// Where etcd or kube-apiserver is not there.
    pub fn find() -> Result<Self, ToolsError> {
        let this = Self {
            etcd: tools::control_plane("etcd"),
            apiserver: tools::control_plane("kube-apiserver"),
            controller_manager: tools::control_plane("kube-controller-manager"),
        };
        let missing = [&this.etcd, &this.apiserver].into_iter().find(|program| !program.is_file());
        match missing.cloned() {
            Some(missing) => Err(ToolsError { missing }),
            None => Ok(this),
        }
    }
}

impl NodeTools {
    /// Finds the programs, as [`Tools::find`] does.
    ///
    /// # Errors
    /// Where one is not there.
    pub(crate) fn find() -> Result<Self, ToolsError> {
        let this = Self {
            kubelet: tools::control_plane("kubelet"),
            kube_proxy: tools::control_plane("kube-proxy"),
            scheduler: tools::control_plane("kube-scheduler"),
        };
        let all = [&this.kubelet, &this.kube_proxy, &this.scheduler];
        let missing = all.into_iter().find(|program| !program.is_file());
        match missing.cloned() {
            Some(missing) => Err(ToolsError { missing }),
            None => Ok(this),
        }
    }
}

impl fmt::Display for ToolsError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let missing = self.missing.display();
        write!(out, "{missing} is not there: run `cargo xtask setup`, or set {}", tools::ASSETS)
    }
}

impl std::error::Error for ToolsError {}
