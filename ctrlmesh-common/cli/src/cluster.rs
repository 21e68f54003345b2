//! Reaches the API server as kubectl does.

pub(crate) mod paging;
pub(crate) mod answer;
pub(crate) mod labelling;

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::discovery::v2::{APIGroupDiscovery, APIResourceDiscovery};
use kube::discovery::ApiResource;
use kube::{Client, Config};
use rustls::crypto::aws_lc_rs;
use tokio::runtime::Builder;

/// Limit for one answer of the API server.
const ANSWER: Duration = Duration::from_secs(30);

/// Group and plural of namespaces, whose objects are in the slot of their own name, and in the namespace of it.
pub(crate) const NAMESPACES: (&str, &str) = ("", "namespaces");

/// As kubectl has them.
#[derive(Args, Clone, Debug)]
pub(crate) struct ClusterArgs {
    /// Namespace of the root, of the object, or of dry runs. The default is that of the kubeconfig's context
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// Kubeconfig of the cluster. The default is KUBECONFIG, then ~/.kube/config, then the pod's service account
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig, in the place of the current one
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
}

/// Why the API server cannot be asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClusterError {
    #[error("read the kubeconfig `{path}`")]
    Kubeconfig { path: PathBuf, source: Box<KubeconfigError> },
    #[error("take the context from the kubeconfig (does `kubectl config get-contexts` list it?)")]
    Context(#[source] Box<KubeconfigError>),
    #[error("find the cluster: name a --kubeconfig, or set KUBECONFIG")]
    NoCluster(#[source] Box<InferConfigError>),
    #[error("ask behind a path: `{url}` is not a URL")]
    Path { url: String, source: http::uri::InvalidUri },
    #[error("make a client of the API server")]
    Client(#[source] kube::Error),
    #[error("start the runtime")]
    Runtime(#[source] io::Error),
}

/// A client, and the namespace that commands are about.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    /// The API server's URL.
    pub(crate) server: String,
}

impl Connection {
    /// Opens no connection yet.
    ///
    /// # Errors
    /// Where there is no kubeconfig, or it cannot be used.
    pub(crate) async fn of(cluster: &ClusterArgs) -> Result<Self, ClusterError> {
        Self::behind(cluster, "").await
    }

    /// To what the API server serves behind a path.
    ///
    /// # Errors
    /// As [`Self::of`], and where that is no path.
    pub(crate) async fn behind(cluster: &ClusterArgs, path: &str) -> Result<Self, ClusterError> {
        let mut config = config(cluster).await?;
        config.read_timeout = Some(ANSWER);
        if !path.is_empty() {
            let url = format!("{}{path}", config.cluster_url.to_string().trim_end_matches('/'));
            // A member that is away is an answer, too.
            config.default_retry = false;
            config.cluster_url = url.parse().map_err(|source| ClusterError::Path { url, source })?;
        }
        let namespace = cluster.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let server = config.cluster_url.to_string();
        Ok(Self { client: Client::try_from(config).map_err(ClusterError::Client)?, namespace, server })
    }
}

/// Runs a command that asks the API server.
///
/// # Errors
/// Where there is no runtime for it, and its own.
pub(crate) fn block_on<T, E: From<ClusterError>>(command: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    // Fails only if it is installed already.
    drop(aws_lc_rs::default_provider().install_default());
    let runtime = Builder::new_current_thread().enable_all().build().map_err(ClusterError::Runtime)?;
    runtime.block_on(Box::pin(command))
}

/// What the API server serves, in the order in which it lists its groups; the core group comes first.
///
/// # Errors
/// The API server does not say it.
pub(crate) async fn groups(client: &Client) -> Result<Vec<APIGroupDiscovery>, kube::Error> {
    let core = client.list_core_api_versions_aggregated().await?.items;
    let groups = client.list_api_groups_aggregated().await?.items;
    Ok(core.into_iter().chain(groups).collect())
}

/// A resource as discovery has it. `None` where that does not say everything.
pub(crate) fn api_resource(group: &str, version: &str, resource: &APIResourceDiscovery) -> Option<ApiResource> {
    Some(ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") },
        kind: resource.response_kind.as_ref()?.kind.clone()?,
        plural: resource.resource.clone()?,
    })
}

/// As `PLURAL.GROUP`; without the group where that is the core one.
pub(crate) fn resource_name(group: &str, plural: &str) -> String {
    if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") }
}

/// As kubectl finds it.
async fn config(cluster: &ClusterArgs) -> Result<Config, ClusterError> {
    let options = KubeConfigOptions { context: cluster.context.clone(), ..KubeConfigOptions::default() };
    if let Some(path) = &cluster.kubeconfig {
        let failed = |source| ClusterError::Kubeconfig { path: path.clone(), source: Box::new(source) };
        let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
        return Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(failed);
    }
    if cluster.context.is_some() {
        let config = Config::from_kubeconfig(&options).await;
        return config.map_err(|source| ClusterError::Context(Box::new(source)));
    }
    Config::infer().await.map_err(|source| ClusterError::NoCluster(Box::new(source)))
}
