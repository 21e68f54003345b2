//! The proxy's flags and environment variables.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use clap::{Args, value_parser};
use ctrlmesh_common::names::{FIRST_PROCESS_VARIABLE, TRACE_SOCKET_VARIABLE, port};
use ctrlmesh_runtime::duration;
use ctrlmesh_runtime::listen::all_interfaces;
use rustls_pki_types::ServerName;
use thiserror::Error;

use crate::manager_client::ManagerArgs;
use crate::net::memory_budget::MemoryLimit;
use crate::net::tls::issue::Source;
use crate::policy::{PodName, PolicyArgs};
use crate::spans::SpanArgs;
use crate::upstream::{Address, Target};
use ctrlmesh_intercept::{Targets, default_pins};
use ctrlmesh_runtime::telemetry::LogFormat;

const SERVICE_ACCOUNT_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// What every mode of the proxy is told.
#[derive(Clone, Debug, Args)]
pub struct CommonArgs {
    /// PEM file with the CA of the API server's certificate. It is read again when it changes.
    #[arg(long, env = "CTRLMESH_PROXY_UPSTREAM_CA", default_value = SERVICE_ACCOUNT_CA, value_name = "FILE")]
    pub upstream_ca: PathBuf,
    /// PEM file with the certificate that operators see, and its chain. Needs --tls-key.
    #[arg(long, env = "CTRLMESH_PROXY_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the private key of --tls-cert.
    #[arg(long, env = "CTRLMESH_PROXY_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// PEM files of a CA and its key, as CERT,KEY. The proxy issues its own certificate with them, in the place of
    /// --tls-cert.
    #[arg(long, env = "CTRLMESH_PROXY_MESH_CA", value_name = "CERT,KEY", conflicts_with_all = ["tls_cert", "tls_key"])]
    pub mesh_ca: Option<MeshCa>,
    /// A further DNS name or IP address in the certificates that the proxy issues. May be repeated.
    #[arg(long, env = "CTRLMESH_PROXY_TLS_NAME", value_name = "NAME", value_delimiter = ',')]
    pub tls_name: Vec<String>,
    /// Address and port of the pages for health, readiness and metrics.
    #[arg(long, env = "CTRLMESH_PROXY_ADMIN_LISTEN", value_name = "ADDRESS",
          default_value_t = all_interfaces(port::PROXY_ADMIN))]
    pub admin_listen: SocketAddr,
    /// Number of threads that serve connections. 0 means one for each processor.
    #[arg(long, env = "CTRLMESH_PROXY_THREADS", default_value_t = 0, value_name = "N")]
    pub threads: usize,
    /// Most client connections that may be open at once, in the whole process.
    #[arg(long, env = "CTRLMESH_PROXY_MAX_CONNECTIONS", default_value_t = 16_384, value_name = "N")]
    pub max_connections: usize,
    /// Most client connections that one pod may have open at once. Counts in node mode only.
    #[arg(long, env = "CTRLMESH_PROXY_MAX_CONNECTIONS_PER_POD", default_value_t = 1_024, value_name = "N")]
    pub max_connections_per_pod: usize,
    /// Memory that the process may use: bytes, or a number with Ki, Mi or Gi; at least 16Mi. Up to half of it buffers
    /// data for slow readers; in node mode, one pod gets a quarter of that half.
    #[arg(long, env = "CTRLMESH_PROXY_MEMORY_LIMIT", default_value = "512Mi", value_name = "AMOUNT")]
    pub memory_limit: MemoryLimit,
    /// Longest time to open a connection to the API server, TLS included.
    #[arg(long, env = "CTRLMESH_PROXY_CONNECT_TIMEOUT", default_value = "5s", value_name = "DURATION", value_parser = duration::parse)]
    pub connect_timeout: Duration,
    /// Longest time until the API server answers a request. Watches, logs, exec, attach and port-forward have no such
    /// limit.
    #[arg(long, env = "CTRLMESH_PROXY_RESPONSE_TIMEOUT", default_value = "120s", value_name = "DURATION", value_parser = duration::parse)]
    pub response_timeout: Duration,
    /// Longest silence on an HTTP/2 connection to the API server. After two thirds of it the proxy sends a PING; after
    /// all of it the proxy closes the connection and its watches.
    #[arg(long, env = "CTRLMESH_PROXY_SILENCE_TIMEOUT", default_value = "45s", value_name = "DURATION", value_parser = duration::parse)]
    pub silence_timeout: Duration,
    /// Longest time for writes that are under way to objects that a new policy takes away from the pod. Then the proxy
    /// cuts them, and acknowledges the policy.
    #[arg(long, env = "CTRLMESH_PROXY_WRITE_DRAIN_TIMEOUT", default_value = "5s", value_name = "DURATION", value_parser = duration::parse)]
    pub write_drain_timeout: Duration,
    /// Longest time from a client's connection to the end of its first request's head.
    #[arg(long, env = "CTRLMESH_PROXY_HEADER_TIMEOUT", default_value = "30s", value_name = "DURATION", value_parser = duration::parse)]
    pub header_timeout: Duration,
    /// Longest time after SIGTERM for requests that are under way. Then the proxy cuts them.
    #[arg(long, env = "CTRLMESH_PROXY_DRAIN_TIMEOUT", default_value = "25s", value_name = "DURATION", value_parser = duration::parse)]
    pub drain_timeout: Duration,
    /// Unix socket on which `ctrlmesh-proxy trace` asks this process for its requests. Only the user of this process
    /// may open it. Without it, nobody may follow requests.
    #[arg(long, env = TRACE_SOCKET_VARIABLE, value_name = "FILE")]
    pub trace_socket: Option<PathBuf>,
    /// Serve only as the first process of the container. So whoever may start another process in it, as by `kubectl
    /// exec`, cannot serve with its key under another policy.
    #[arg(long, env = FIRST_PROCESS_VARIABLE)]
    pub first_process_only: bool,
    /// Format of log lines.
    #[arg(long, env = "CTRLMESH_PROXY_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,
}

/// What `sidecar` is told.
#[derive(Clone, Debug, Args)]
pub struct SidecarArgs {
    /// Address and port on which operators connect. May be repeated.
    #[arg(long, env = "CTRLMESH_PROXY_LISTEN", value_name = "ADDRESS", value_delimiter = ',',
          default_values_t = [SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port::PROXY_API)])]
    pub listen: Vec<SocketAddr>,
    /// URL of the API server, as https://HOST:PORT. The default is the API server that Kubernetes names to every pod.
    #[arg(long, env = "CTRLMESH_PROXY_UPSTREAM", value_name = "URL")]
    pub upstream: Option<Upstream>,
    /// Port for connections that the node's kernel redirects to this sidecar, on all addresses. The proxy accepts them
    /// only from inside its pod. Without it, the sidecar accepts none.
    #[arg(long, env = "CTRLMESH_PROXY_REDIRECTED", value_name = "PORT", value_parser = value_parser!(u16).range(1..))]
    pub redirected: Option<u16>,
    /// Do not start without --manager, --policy or --sharding-config. The image sets it.
    #[arg(long, env = "CTRLMESH_PROXY_REQUIRE_POLICY")]
    pub require_policy: bool,
    /// Where the pod's policy comes from; without one, and without a manager, everything passes.
    #[command(flatten)]
    pub policy: PolicyArgs,
    /// The manager, that tells the policy instead.
    #[command(flatten)]
    pub manager: ManagerArgs,
    /// Where spans go.
    #[command(flatten)]
    pub spans: SpanArgs,
    /// What all modes are told.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// What `node` is told.
#[derive(Clone, Debug, Args)]
pub struct NodeArgs {
    /// JSON or YAML file with the pods to serve on this node, in the place of --manager. It is read again when it
    /// changes.
    #[arg(
        long,
        env = "CTRLMESH_PROXY_PODS",
        value_name = "FILE",
        required_unless_present = "manager",
        conflicts_with = "manager"
    )]
    pub pods: Option<PathBuf>,
    /// The manager, that tells the pods of this node and their policies instead.
    #[command(flatten)]
    pub manager: ManagerArgs,
    /// The DaemonSet of this proxy. When the process ends and the DaemonSet or its namespace is gone, the proxy stops
    /// redirecting; otherwise pods wait for the next process. Needs --api-token.
    #[arg(long, env = "CTRLMESH_PROXY_DAEMON_SET", value_name = "NAMESPACE/NAME", requires = "api_token")]
    pub daemon_set: Option<PodName>,
    /// File with this account's token for the API server, for --daemon-set and --announce.
    #[arg(long, env = "CTRLMESH_PROXY_API_TOKEN", value_name = "FILE", requires = "daemon_set")]
    pub api_token: Option<PathBuf>,
    /// Label the Node of --node with whether its kernel redirects connections, and take its taint
    /// ctrlmesh.kusionstack.io/not-ready away once pods are served. Needs --api-token.
    #[arg(long, env = "CTRLMESH_PROXY_ANNOUNCE", requires_all = ["api_token", "node"])]
    pub announce: bool,
    /// PEM file with the CA of other proxies' certificates, to have them answer reviews of their pods' objects. It is
    /// read again when it changes. The default is the CA of --mesh-ca; without any, no other proxy is asked.
    #[arg(long, env = "CTRLMESH_PROXY_PEER_CA", value_name = "FILE")]
    pub peer_ca: Option<PathBuf>,
    /// Drop TCP packets that pods send to the API server past this proxy, as by a Service of their own, until 15
    /// minutes after this proxy has ended. Takes nftables in the network namespace of this process, which has to be the
    /// node's.
    #[arg(long, env = "CTRLMESH_PROXY_DROP_BYPASS")]
    pub drop_bypass: bool,
    /// Name of this node, as the manager knows it. Needed with --manager.
    #[arg(long, env = "CTRLMESH_PROXY_NODE", value_name = "NAME")]
    pub node: Option<String>,
    /// Address to redirect: ADDRESS:PORT or PREFIX/LENGTH:PORT, with IPv6 in brackets. May be repeated. The default is
    /// the cluster's address of the API server. A manager adds the addresses that it knows.
    #[arg(long, env = "CTRLMESH_PROXY_TARGET", value_name = "TARGET", value_delimiter = ',')]
    pub target: Vec<ctrlmesh_intercept::Target>,
    /// Port in each pod's network namespace to which the kernel redirects connections.
    #[arg(long, env = "CTRLMESH_PROXY_REDIRECT_PORT", value_name = "PORT",
          default_value_t = port::PROXY_REDIRECTED, value_parser = value_parser!(u16).range(1..))]
    pub redirect_port: u16,
    /// Folder with the socket by which an ending process gives its listeners to the next one, so that no connection is
    /// refused. Without it, new connections are refused in between.
    #[arg(long, env = "CTRLMESH_PROXY_HANDOVER_DIR", value_name = "DIR")]
    pub handover_dir: Option<PathBuf>,
    /// Longest time after SIGTERM in which the process keeps serving while it waits for the next one.
    #[arg(long, env = "CTRLMESH_PROXY_HANDOVER_TIMEOUT", default_value = "60s", value_name = "DURATION", value_parser = duration::parse)]
    pub handover_timeout: Duration,
    /// Unix socket on which `ctrlmesh-proxy probe` asks this process. While two processes run on a node, only one of
    /// them has --admin-listen.
    #[arg(long, env = "CTRLMESH_PROXY_PROBE_SOCKET", value_name = "FILE")]
    pub probe_socket: Option<PathBuf>,
    /// Folder on a BPF file system for the kernel programs and maps that outlive the process.
    #[arg(long, env = "CTRLMESH_PROXY_PIN_DIR", value_name = "DIR", default_value_os_t = default_pins())]
    pub pin_dir: PathBuf,
    /// Where spans go.
    #[command(flatten)]
    pub spans: SpanArgs,
    /// What all modes are told.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// `https://HOST:PORT` of an API server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Upstream {
    /// A DNS name or an address, without brackets.
    pub host: String,
    pub port: u16,
}

/// The two PEM files of the mesh CA.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MeshCa {
    pub cert: PathBuf,
    pub key: PathBuf,
}

#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("`{seen}` is not of the form https://HOST:PORT")]
    Upstream { seen: String },
    #[error("which API server: give --upstream, or run where KUBERNETES_SERVICE_HOST is set")]
    NoUpstream,
    #[error("which connections: give --target, or run where KUBERNETES_SERVICE_HOST is an address")]
    NoTarget,
    #[error("which node: give --node beside --manager")]
    NoNode,
    #[error("which pods: give --pods or --manager")]
    NoPods,
    #[error("which pod: give --pod beside --manager")]
    NoPod,
    #[error(
        "which policy: give --manager, --policy or --sharding-config; `mode: pass` in a policy lets everything pass"
    )]
    NoPolicy,
    #[error("this is process {process}, and only the container's first process may serve (--first-process-only)")]
    NotFirst { process: u32 },
    #[error("`{seen}` is not of the form CERT,KEY")]
    MeshCa { seen: String },
    #[error("which certificate: give --manager, --mesh-ca, or --tls-cert and --tls-key")]
    NoCertificate,
}

impl CommonArgs {
    /// The source of the certificate, which carries `names` beside those of `--tls-name`.
    pub fn certificate(&self, names: &[String]) -> Result<Source, ConfigError> {
        match (&self.mesh_ca, &self.tls_cert, &self.tls_key) {
            (Some(ca), ..) => {
                Ok(Source::MeshCa { cert: ca.cert.clone(), key: ca.key.clone(), names: self.names(names) })
            }
            (None, Some(cert), Some(key)) => Ok(Source::Files { cert: cert.clone(), key: key.clone() }),
            _ => Err(ConfigError::NoCertificate),
        }
    }

    /// # Errors
    /// Where `process` must not serve.
    pub fn check_process(&self, process: u32) -> Result<(), ConfigError> {
        if self.first_process_only && process != 1 { Err(ConfigError::NotFirst { process }) } else { Ok(()) }
    }

    pub fn lacks_certificate(&self) -> bool {
        self.mesh_ca.is_none() && self.tls_cert.is_none()
    }

    /// `--tls-name` and `more`.
    pub fn names(&self, more: &[String]) -> Vec<String> {
        self.tls_name.iter().chain(more).cloned().collect()
    }

    pub fn serving_threads(&self) -> usize {
        if self.threads > 0 { self.threads } else { thread::available_parallelism().map_or(1, usize::from) }
    }
}

impl SidecarArgs {
    /// # Errors
    /// Where a policy is required, and none is named.
    pub fn check_policy(&self) -> Result<(), ConfigError> {
        let is_named = self.manager.manager.is_some() || self.policy.source().is_some();
        if self.require_policy && !is_named { Err(ConfigError::NoPolicy) } else { Ok(()) }
    }

    /// The API server to forward to.
    pub fn target(&self) -> Result<Target, ConfigError> {
        self.upstream.clone().or_else(Upstream::of_the_cluster).ok_or(ConfigError::NoUpstream)?.target()
    }
}

impl NodeArgs {
    /// The destinations to redirect.
    pub fn targets(&self) -> Result<Targets, ConfigError> {
        let mut list = self.target.clone();
        if list.is_empty() {
            let told = Upstream::of_the_cluster().ok_or(ConfigError::NoTarget)?;
            let host = told.host.parse::<IpAddr>().map_err(|_unfit| ConfigError::NoTarget)?;
            list.push(SocketAddr::new(host, told.port).into());
        }
        Ok(Targets { name: "api server".to_owned(), list })
    }

    /// By the environment that Kubernetes gives every pod.
    pub fn api_server(&self) -> Result<Target, ConfigError> {
        Upstream::of_the_cluster().ok_or(ConfigError::NoUpstream)?.target()
    }
}

impl Upstream {
    /// By the environment that Kubernetes gives every pod.
    fn of_the_cluster() -> Option<Self> {
        let host = std::env::var("KUBERNETES_SERVICE_HOST").ok()?;
        let port = std::env::var("KUBERNETES_SERVICE_PORT").ok()?.parse().ok()?;
        Some(Self { host, port })
    }

    /// The same, where it is an address.
    pub fn address_of_the_cluster() -> Option<SocketAddr> {
        let Self { host, port } = Self::of_the_cluster()?;
        Some(SocketAddr::new(host.parse().ok()?, port))
    }

    pub fn target(&self) -> Result<Target, ConfigError> {
        let name = ServerName::try_from(self.host.clone())
            .map_err(|_unfit| ConfigError::Upstream { seen: self.host.clone() })?;
        let address = match self.host.parse::<IpAddr>() {
            Ok(address) => Address::Socket(SocketAddr::new(address, self.port)),
            Err(_) => Address::Host(self.host.clone(), self.port),
        };
        Ok(Target { address, name })
    }
}

impl FromStr for Upstream {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = || ConfigError::Upstream { seen: text.to_owned() };
        let authority = text.strip_prefix("https://").ok_or_else(wrong)?;
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let authority: http::uri::Authority = authority.parse().map_err(|_unfit| wrong())?;
        let host = authority.host();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() || authority.as_str().contains('@') {
            return Err(wrong());
        }
        Ok(Self { host: host.to_owned(), port: authority.port_u16().unwrap_or(443) })
    }
}

impl FromStr for MeshCa {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text.split_once(',') {
            Some((cert, key)) if !cert.is_empty() && !key.is_empty() => Ok(Self { cert: cert.into(), key: key.into() }),
            _ => Err(ConfigError::MeshCa { seen: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upstream_is_an_https_url_without_a_path() {
        let parsed: Upstream = "https://[fd00::1]:6443".parse().unwrap();
        assert_eq!(parsed, Upstream { host: "fd00::1".into(), port: 6443 });
        let parsed: Upstream = "https://kubernetes.default.svc/".parse().unwrap();
        assert_eq!(parsed, Upstream { host: "kubernetes.default.svc".into(), port: 443 });
        for wrong in ["http://10.0.0.1:443", "10.0.0.1:443", "https://", "https://a/b", "https://token@host"] {
            assert!(wrong.parse::<Upstream>().is_err(), "{wrong}");
        }
    }
}
