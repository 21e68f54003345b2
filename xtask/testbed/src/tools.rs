//! Where are the programs that the bed runs?

use std::path::{Path, PathBuf};
use std::{env, fmt};

/// Variable that names a folder of programs to use instead of our own, as in controller-runtime's envtest.
const ASSETS: &str = "KUBEBUILDER_ASSETS";

/// Variable that names our cache of built programs.
const CACHE: &str = "CTRLMESH_TOOLS";

/// The release of Kubernetes that the bed is built from.
const KUBERNETES: &str = "v1.36.3";

/// The release of etcd that the bed is built from.
const ETCD: &str = "v3.6.8";

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

/// A program that is not there.
#[derive(Debug)]
pub struct ToolsError {
    missing: PathBuf,
}

// === impl Tools ===

impl Tools {
    /// Finds the programs: in `$KUBEBUILDER_ASSETS` where that is set, else in our cache, which
    /// `cargo xtask setup` fills.
    ///
    /// # Errors
    /// Where etcd or kube-apiserver is not there.
    pub fn find() -> Result<Self, ToolsError> {
        let tools = match env::var_os(ASSETS).filter(|folder| !folder.is_empty()) {
            Some(folder) => Self::flat(Path::new(&folder)),
            None => Self::cached(&cache()),
        };
        let missing =
            [&tools.etcd, &tools.apiserver].into_iter().find(|program| !program.is_file()).cloned();
        match missing {
            Some(missing) => Err(ToolsError { missing }),
            None => Ok(tools),
        }
    }

    fn flat(folder: &Path) -> Self {
        Self {
            etcd: folder.join("etcd"),
            apiserver: folder.join("kube-apiserver"),
            controller_manager: folder.join("kube-controller-manager"),
        }
    }

    fn cached(cache: &Path) -> Self {
        let kubernetes = cache.join("kubernetes").join(KUBERNETES);
        Self { etcd: cache.join("etcd").join(ETCD).join("etcd"), ..Self::flat(&kubernetes) }
    }
}

/// Our cache: `$CTRLMESH_TOOLS`, else `ctrlmesh` in `$XDG_CACHE_HOME`, else in `~/.cache`.
fn cache() -> PathBuf {
    let folder = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    folder(CACHE)
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("ctrlmesh")))
        .or_else(|| folder("HOME").map(|home| home.join(".cache/ctrlmesh")))
        .unwrap_or_else(|| PathBuf::from(".cache/ctrlmesh"))
}

// === impl ToolsError ===

impl fmt::Display for ToolsError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{} is not there: run `cargo xtask setup`, or set {ASSETS}",
            self.missing.display()
        )
    }
}

impl std::error::Error for ToolsError {}
