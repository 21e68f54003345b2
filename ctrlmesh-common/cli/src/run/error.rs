//! Why is the command not run, and what is to be done about it?

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use ctrlmesh_common::policy::PolicyError;
use ctrlmesh_common::selector::ParseSelectorError;
use nix::errno::Errno;

use super::cluster::ClusterError;
use super::folder::FolderError;
use super::identity::IdentityError;
use super::isolate::IsolateError;
use super::kubeconfig::ChooseError;
use super::source::SourceError;
use super::through::ThroughError;
use super::{NOT_EXECUTABLE, NOT_FOUND, OWN_FAILURE};
use ctrlmesh_proxy::app::AppError;
use ctrlmesh_proxy::net::tls::TlsError;
use ctrlmesh_proxy::policy::LoadError;

/// Why the command is not run.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunError {
    /// There is no such program.
    #[error("run `{}`: no such command on PATH", program.display())]
    NotFound {
        /// What was asked for.
        program: OsString,
    },
    /// There is, but it cannot be run.
    #[error("run `{}`: it is not executable (chmod +x)", program.display())]
    NotExecutable {
        /// What was asked for.
        program: OsString,
    },
    /// Limits without selectors, or the other way round.
    #[error("{limits} --limit and {selectors} --selector: each limit needs a selector of its own")]
    Pairs {
        /// How many limits.
        limits: usize,
        /// How many selectors.
        selectors: usize,
    },
    /// A selector that is none.
    #[error("parse the selector {text:?}")]
    Selector {
        /// What was given.
        text: String,
        /// What is wrong.
        #[source]
        source: ParseSelectorError,
    },
    /// A selector that selects everything.
    #[error(
        "--selector is empty, which shares nothing: name a label, as `team=a` or `slot in (0,1)`"
    )]
    EmptySelector,
    /// A selector that no object can ever match.
    #[error("check --selector")]
    Contradiction(#[source] Box<LoadError>),
    /// Limits or a lock that cannot be applied.
    #[error("check --limit and --lock")]
    Limits(#[source] PolicyError),
    /// A ShardingConfig from which no policy follows.
    #[error("take the shard from `{file}`")]
    Policy {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        #[source]
        source: Box<LoadError>,
    },
    /// No kubeconfig.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// No context.
    #[error(transparent)]
    Choose(#[from] ChooseError),
    /// No API server.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// No way to it.
    #[error(transparent)]
    Through(#[from] ThroughError),
    /// No certificates.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// No place for files.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// eBPF is for root.
    #[error(
        "--interception ebpf needs root: use sudo, or --interception kubeconfig, which needs nothing"
    )]
    NotRoot,
    /// eBPF does not go through proxies.
    #[error(
        "--interception ebpf: the API server is reached through the proxy {proxy}, so the command would never connect to it: use --interception kubeconfig"
    )]
    Proxied {
        /// The proxy on the way.
        proxy: String,
    },
    /// eBPF does not work here.
    #[error("--interception ebpf does not work here (--interception kubeconfig would)")]
    Isolate(#[source] IsolateError),
    /// A service account has a token, and nothing else.
    #[error(
        "--interception env is for users with a token, and this one has {what}: use --interception kubeconfig"
    )]
    NotAnAccount {
        /// What the user has.
        what: &'static str,
    },
    /// Somebody else listens there.
    #[error("port {port} is taken: leave --port out to get a free one")]
    PortTaken {
        /// The port.
        port: u16,
    },
    /// Nothing can be listened at.
    #[error("listen at {address}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The API server's name leads nowhere.
    #[error("look up {host:?}, which the kubeconfig names as the server")]
    Resolve {
        /// The name.
        host: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The API server is not there, or is somebody else.
    #[error(
        "reach the API server {url} (does `kubectl version` reach it with the same kubeconfig?)"
    )]
    Unreachable {
        /// Where it should be.
        url: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The proxy's own certificates.
    #[error("prepare TLS")]
    Tls(#[from] TlsError),
    /// The proxy.
    #[error("serve")]
    Serve(#[from] AppError),
    /// The TLS library.
    #[error("set up TLS")]
    Library(#[from] rustls::Error),
    /// The environment.
    #[error("read CTRLMESH_PROXY_… from the environment")]
    Environment(#[source] clap::Error),
    /// The operating system gives no thread, runtime or process.
    #[error("start the proxy or the command")]
    Start(#[source] io::Error),
    /// Signals cannot be read.
    #[error("read signals")]
    Signals(#[source] Errno),
}

impl RunError {
    /// As shells say it; what is ours and not the command's has a code of its own.
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } => NOT_FOUND,
            Self::NotExecutable { .. } => NOT_EXECUTABLE,
            _ => OWN_FAILURE,
        }
    }
}
