//! The proxy's flags and environment variables.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use clap::{Args, value_parser};
use ctrlmesh_common::names::port;
use ctrlmesh_runtime::listen::all_interfaces;
use rustls_pki_types::ServerName;
use thiserror::Error;

use crate::manager_client::ManagerArgs;
use crate::net::memory_budget::MemoryLimit;
use crate::net::tls::issue::Source;
use crate::policy::{PodName, PolicyArgs};
use crate::upstream::{Address, Target};
use ctrlmesh_intercept::{Targets, default_pins};
use ctrlmesh_runtime::telemetry::LogFormat;

const SERVICE_ACCOUNT_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// What every mode of the proxy is told.
#[derive(Clone, Debug, Args)]
pub struct CommonArgs {
    /// The CA that the API server's certificate is verified against; read again when it changes.
    #[arg(long, env = "CTRLMESH_PROXY_UPSTREAM_CA", default_value = SERVICE_ACCOUNT_CA, value_name = "FILE")]
    pub upstream_ca: PathBuf,
    /// The certificate to present to operators, with its chain, PEM.
    #[arg(long, env = "CTRLMESH_PROXY_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// The key of that certificate.
    #[arg(long, env = "CTRLMESH_PROXY_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// The mesh CA, as CERT,KEY: certificates are issued by it instead.
    #[arg(long, env = "CTRLMESH_PROXY_MESH_CA", value_name = "CERT,KEY", conflicts_with_all = ["tls_cert", "tls_key"])]
    pub mesh_ca: Option<MeshCa>,
    /// A further DNS name or address that issued certificates carry; may be repeated.
    #[arg(long, env = "CTRLMESH_PROXY_TLS_NAME", value_name = "NAME", value_delimiter = ',')]
    pub tls_name: Vec<String>,
    /// Where health, readiness and metrics are served.
    #[arg(long, env = "CTRLMESH_PROXY_ADMIN_LISTEN", value_name = "ADDRESS",
          default_value_t = all_interfaces(port::PROXY_ADMIN))]
    pub admin_listen: SocketAddr,
    /// Threads that serve connections; 0 means one a core.
    #[arg(long, env = "CTRLMESH_PROXY_THREADS", default_value_t = 0, value_name = "N")]
    pub threads: usize,
    /// How many connections of clients may be open at once.
    #[arg(long, env = "CTRLMESH_PROXY_MAX_CONNECTIONS", default_value_t = 16_384, value_name = "N")]
    pub max_connections: usize,
    /// How many of them may be of one pod, where one process serves many: so no pod takes the places of the others.
    #[arg(long, env = "CTRLMESH_PROXY_MAX_CONNECTIONS_PER_POD", default_value_t = 1_024, value_name = "N")]
    pub max_connections_per_pod: usize,
    /// How much memory the process may use: in bytes, or with Ki, Mi or Gi behind it. Half of it may wait for those who
    /// do not read, and a quarter of that for one pod, where one process serves many.
    #[arg(long, env = "CTRLMESH_PROXY_MEMORY_LIMIT", default_value = "512Mi", value_name = "AMOUNT")]
    pub memory_limit: MemoryLimit,
    /// How long a connection to the API server may take to open, TLS included.
    #[arg(long, env = "CTRLMESH_PROXY_CONNECT_TIMEOUT", default_value = "5s", value_name = "DURATION", value_parser = duration)]
    pub connect_timeout: Duration,
    /// How long the API server may take to answer what is not a watch, a log, an exec or the like.
    #[arg(long, env = "CTRLMESH_PROXY_RESPONSE_TIMEOUT", default_value = "120s", value_name = "DURATION", value_parser = duration)]
    pub response_timeout: Duration,
    /// How long nothing may come over an HTTP/2 connection from the API server: after two thirds of that it is asked by
    /// a PING whether it is still there, and then it is given up, with the watches on it.
    #[arg(long, env = "CTRLMESH_PROXY_SILENCE_TIMEOUT", default_value = "45s", value_name = "DURATION", value_parser = duration)]
    pub silence_timeout: Duration,
    /// How long writes under way may take to end, where a new policy takes their objects away from the pod; then they are
    /// cut. Only then is the policy acknowledged.
    #[arg(long, env = "CTRLMESH_PROXY_WRITE_DRAIN_TIMEOUT", default_value = "5s", value_name = "DURATION", value_parser = duration)]
    pub write_drain_timeout: Duration,
    /// How long a client may take from connecting to the end of its first request's head.
    #[arg(long, env = "CTRLMESH_PROXY_HEADER_TIMEOUT", default_value = "30s", value_name = "DURATION", value_parser = duration)]
    pub header_timeout: Duration,
    /// How long requests under way may take to end after SIGTERM.
    #[arg(long, env = "CTRLMESH_PROXY_DRAIN_TIMEOUT", default_value = "25s", value_name = "DURATION", value_parser = duration)]
    pub drain_timeout: Duration,
    /// The form of log lines.
    #[arg(long, env = "CTRLMESH_PROXY_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,
}

/// What `sidecar` is told.
#[derive(Clone, Debug, Args)]
pub struct SidecarArgs {
    /// Where operators connect; may be repeated.
    #[arg(long, env = "CTRLMESH_PROXY_LISTEN", value_name = "ADDRESS", value_delimiter = ',',
          default_values_t = [SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port::PROXY_API)])]
    pub listen: Vec<SocketAddr>,
    /// The API server, as https://HOST:PORT; the default is what Kubernetes tells every pod.
    #[arg(long, env = "CTRLMESH_PROXY_UPSTREAM", value_name = "URL")]
    pub upstream: Option<Upstream>,
    /// Where the node's proxy has the kernel send connections, on all addresses; only those that come from inside the
    /// pod are taken.
    #[arg(long, env = "CTRLMESH_PROXY_REDIRECTED", value_name = "PORT", value_parser = value_parser!(u16).range(1..))]
    pub redirected: Option<u16>,
    /// Where the pod's policy comes from; without one, and without a manager, everything passes.
    #[command(flatten)]
    pub policy: PolicyArgs,
    /// The manager, that tells the policy instead.
    #[command(flatten)]
    pub manager: ManagerArgs,
    /// What all modes are told.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// What `node` is told.
#[derive(Clone, Debug, Args)]
pub struct NodeArgs {
    /// File with the pods of this node that are served, in JSON or YAML; read again when it changes.
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
    /// Our own `DaemonSet`: where it is gone when this process ends, or its namespace, pods are let go of; otherwise
    /// they wait for the next process.
    #[arg(long, env = "CTRLMESH_PROXY_DAEMON_SET", value_name = "NAMESPACE/NAME", requires = "api_token")]
    pub daemon_set: Option<PodName>,
    /// Our own account's token, made out to the API server, to ask for that.
    #[arg(long, env = "CTRLMESH_PROXY_API_TOKEN", value_name = "FILE", requires = "daemon_set")]
    pub api_token: Option<PathBuf>,
    /// The name of this node, for the manager.
    #[arg(long, env = "CTRLMESH_PROXY_NODE", value_name = "NAME")]
    pub node: Option<String>,
    /// What is redirected: ADDRESS:PORT or PREFIX/LENGTH:PORT, IPv6 in brackets; may be repeated. The default is what
    /// Kubernetes tells every pod of the API server. Where there is a manager, also wherever that says that it is.
    #[arg(long, env = "CTRLMESH_PROXY_TARGET", value_name = "TARGET", value_delimiter = ',')]
    pub target: Vec<ctrlmesh_intercept::Target>,
    /// Where redirected connections arrive in each pod's network namespace.
    #[arg(long, env = "CTRLMESH_PROXY_REDIRECT_PORT", value_name = "PORT",
          default_value_t = port::PROXY_REDIRECTED, value_parser = value_parser!(u16).range(1..))]
    pub redirect_port: u16,
    /// Folder in which a process that ends meets the one that follows: it serves on until that one does, and gives it
    /// its listeners, so that nothing is refused in between. Without it, what is new is refused.
    #[arg(long, env = "CTRLMESH_PROXY_HANDOVER_DIR", value_name = "DIR")]
    pub handover_dir: Option<PathBuf>,
    /// How long a process that is told to end serves on where none has come yet to follow it.
    #[arg(long, env = "CTRLMESH_PROXY_HANDOVER_TIMEOUT", default_value = "60s", value_name = "DURATION", value_parser = duration)]
    pub handover_timeout: Duration,
    /// Where `ctrlmesh-proxy probe` asks this process and no other: with two of them on a node, only one has
    /// --admin-listen.
    #[arg(long, env = "CTRLMESH_PROXY_PROBE_SOCKET", value_name = "FILE")]
    pub probe_socket: Option<PathBuf>,
    /// Folder of the pins, on a BPF file system.
    #[arg(long, env = "CTRLMESH_PROXY_PIN_DIR", value_name = "DIR", default_value_os_t = default_pins())]
    pub pin_dir: PathBuf,
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
    #[error("`{seen}` is not of the form CERT,KEY")]
    MeshCa { seen: String },
    #[error("which certificate: give --manager, --mesh-ca, or --tls-cert and --tls-key")]
    NoCertificate,
    #[error("`{seen}` is not a duration such as 500ms, 5s or 2m")]
    Duration { seen: String },
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

/// Reads `500ms`, `5s`, `2m`, `1h`.
fn duration(text: &str) -> Result<Duration, ConfigError> {
    let wrong = || ConfigError::Duration { seen: text.to_owned() };
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(digits);
    let number: u32 = number.parse().map_err(|_unfit| wrong())?;
    let unit = match unit {
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        "m" => Duration::from_mins(1),
        "h" => Duration::from_hours(1),
        _ => return Err(wrong()),
    };
    Ok(unit * number)
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

    #[test]
    fn a_duration_needs_its_unit() {
        assert_eq!(duration("250ms").unwrap(), Duration::from_millis(250));
        assert_eq!(duration("2m").unwrap(), Duration::from_mins(2));
        for wrong in ["5", "s", "-1s", "1.5s", "5 s", ""] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
