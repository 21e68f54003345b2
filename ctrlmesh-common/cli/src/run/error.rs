//! Why the command is not run, and what to do about it.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use ctrlmesh_common::policy::PolicyError;
use ctrlmesh_common::selector::ParseSelectorError;
use nix::errno::Errno;

use crate::run::NOT_EXECUTABLE;
use crate::run::NOT_FOUND;
use crate::run::OWN_FAILURE;
use crate::run::cluster::ClusterError;
use crate::run::egress::EgressProxyError;
use crate::run::folder::FolderError;
use crate::run::identity::IdentityError;
use crate::run::interception::isolate::IsolateError;
use crate::run::kubeconfig::ChooseError;
use crate::run::kubeconfig::source::SourceError;
use ctrlmesh_proxy::app::AppError;
use ctrlmesh_proxy::net::tls::TlsError;
use ctrlmesh_proxy::policy::LoadError;

/// Why the command is not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error("run `{}`: no such command on PATH", program.display())]
    NotFound { program: OsString },
    #[error("run `{}`: it is not executable (chmod +x)", program.display())]
    NotExecutable { program: OsString },
    #[error("{limits} --limit and {selectors} --selector: each limit needs a selector of its own")]
    Pairs { limits: usize, selectors: usize },
    #[error("parse the selector {text:?}")]
    Selector { text: String, source: ParseSelectorError },
    #[error("--selector is empty, which shares nothing: name a label, as `team=a` or `slot in (0,1)`")]
    EmptySelector,
    #[error("check --selector")]
    Contradiction(#[source] Box<LoadError>),
    #[error("check --limit and --lock")]
    Limits(#[source] PolicyError),
    #[error("take the shard from `{file}`")]
    Policy { file: PathBuf, source: Box<LoadError> },
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Choose(#[from] ChooseError),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    EgressProxy(#[from] EgressProxyError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("--interception ebpf needs root: use sudo, or --interception kubeconfig, which needs nothing")]
    NotRoot,
    #[error(
        "--interception ebpf: the API server is reached through the proxy {proxy}, so the command would never connect to it: use --interception kubeconfig"
    )]
    Proxied { proxy: String },
    #[error("--interception ebpf does not work here (--interception kubeconfig would)")]
    Isolate(#[source] IsolateError),
    #[error("--interception env is for users with a token, and this one has {what}: use --interception kubeconfig")]
    NotAnAccount { what: &'static str },
    #[error("port {port} is taken: leave --port out to get a free one")]
    PortTaken { port: u16 },
    #[error("listen at {address}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("look up {host:?}, which the kubeconfig names as the server")]
    Resolve { host: String, source: io::Error },
    #[error("reach the API server {url} (does `kubectl version` reach it with the same kubeconfig?)")]
    Unreachable { url: String, source: io::Error },
    #[error("prepare TLS")]
    Tls(#[from] TlsError),
    #[error("serve")]
    Serve(#[from] AppError),
    #[error("set up TLS")]
    Library(#[from] rustls::Error),
    #[error("read CTRLMESH_PROXY_… from the environment")]
    Environment(#[source] clap::Error),
    #[error("start the proxy or the command")]
    Start(#[source] io::Error),
    #[error("read signals")]
    Signals(#[source] Errno),
}

impl RunError {
    /// As shells say it; what is ours and not the command's has a code of its own.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } => NOT_FOUND,
            Self::NotExecutable { .. } => NOT_EXECUTABLE,
            _ => OWN_FAILURE,
        }
    }
}
