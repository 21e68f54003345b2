//! The options of `ctrlmesh-manager run`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ctrlmesh_common::names::{label, port};
use ctrlmesh_common::selector::{KeyError, check_key};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_runtime::listen::all_interfaces;
use thiserror::Error;

use crate::ca::authority::Names;
use crate::rules::shard::Labelling;
use crate::telemetry::LogFormat;

#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// How the API server is reached; without it as a pod does, or as kubectl
    #[arg(long, env = "CTRLMESH_MANAGER_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The manager's own namespace
    #[arg(long, env = "CTRLMESH_MANAGER_NAMESPACE", default_value = "ctrlmesh-system")]
    pub namespace: String,
    /// What this replica is called; the default is the host's name, which is the pod's
    #[arg(long, env = "CTRLMESH_MANAGER_IDENTITY", value_name = "NAME")]
    pub identity: Option<String>,
    /// The Service behind which all replicas are
    #[arg(long, env = "CTRLMESH_MANAGER_SERVICE", default_value = "ctrlmesh-manager", value_name = "NAME")]
    pub service: String,
    /// A further DNS name or address by which the manager is reached; may be repeated
    #[arg(long, env = "CTRLMESH_MANAGER_SERVING_NAME", value_name = "NAME", value_delimiter = ',')]
    pub serving_name: Vec<String>,
    /// A further DNS name or address by which operators know the API server; may be repeated
    #[arg(long, env = "CTRLMESH_MANAGER_API_SERVER_NAME", value_name = "NAME", value_delimiter = ',')]
    pub api_server_name: Vec<String>,
    /// The service account of node proxies
    #[arg(
        long,
        env = "CTRLMESH_MANAGER_NODE_ACCOUNT",
        default_value = "ctrlmesh-system/ctrlmesh-node",
        value_name = "NAMESPACE/NAME"
    )]
    pub node_account: String,
    /// The service account of the manager itself
    #[arg(
        long,
        env = "CTRLMESH_MANAGER_ACCOUNT",
        default_value = "ctrlmesh-system/ctrlmesh-manager",
        value_name = "NAMESPACE/NAME"
    )]
    pub account: String,
    /// Service account of the manager's namespace as which labels are put right, so that the API server can let that
    /// wait; the manager must be allowed to impersonate it. Without it, that is done as all the rest is
    #[arg(long, env = "CTRLMESH_MANAGER_BACKGROUND_ACCOUNT", value_name = "NAME")]
    pub background_account: Option<String>,
    /// File with this replica's token, made out to `ctrlmesh`, with which it tells the leader what its proxies said,
    /// and asks it for pods' shards
    #[arg(long, env = "CTRLMESH_MANAGER_TOKEN", value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// Where the other replicas reach this one's gRPC, with or without its port; the default is where it listens
    #[arg(long, env = "CTRLMESH_MANAGER_GRPC_ADDRESS", value_name = "IP[:PORT]", value_parser = reachable)]
    pub grpc_address: Option<Reachable>,
    /// Host by which the API server asks the webhooks that the manager registers, at the port of --listen-webhook; the
    /// default is the Service, at port 443
    #[arg(long, env = "CTRLMESH_MANAGER_WEBHOOK_HOST", value_name = "HOST")]
    pub webhook_host: Option<String>,
    /// How long a certificate authority lives
    #[arg(long, env = "CTRLMESH_MANAGER_CA_VALIDITY", default_value = "8760h", value_name = "DURATION", value_parser = duration)]
    pub ca_validity: Duration,
    /// How many proxies may be connected
    #[arg(long, env = "CTRLMESH_MANAGER_MAX_PROXIES", default_value_t = 20_000, value_name = "N")]
    pub max_proxies: usize,
    /// Where proxies connect
    #[arg(long, env = "CTRLMESH_MANAGER_LISTEN_GRPC", value_name = "ADDRESS", default_value_t = all_interfaces(port::MANAGER_GRPC))]
    pub listen_grpc: SocketAddr,
    /// Where the API server calls the webhooks
    #[arg(long, env = "CTRLMESH_MANAGER_LISTEN_WEBHOOK", value_name = "ADDRESS", default_value_t = all_interfaces(port::MANAGER_WEBHOOK))]
    pub listen_webhook: SocketAddr,
    /// Where liveness and readiness are served
    #[arg(long, env = "CTRLMESH_MANAGER_LISTEN_PROBES", value_name = "ADDRESS", default_value_t = all_interfaces(port::MANAGER_PROBES))]
    pub listen_probes: SocketAddr,
    /// Where metrics are served
    #[arg(long, env = "CTRLMESH_MANAGER_LISTEN_METRICS", value_name = "ADDRESS", default_value_t = all_interfaces(port::MANAGER_METRICS))]
    pub listen_metrics: SocketAddr,
    /// The image of the proxy that pods get beside their operator
    #[arg(
        long,
        env = "CTRLMESH_MANAGER_PROXY_IMAGE",
        default_value = concat!("ctrlmesh.dev/proxy:", env!("CARGO_PKG_VERSION")),
        value_name = "IMAGE"
    )]
    pub proxy_image: String,
    /// When nodes pull that image
    #[arg(
        long,
        env = "CTRLMESH_MANAGER_PROXY_PULL_POLICY",
        default_value = "IfNotPresent",
        value_parser = ["Always", "IfNotPresent", "Never"],
        value_name = "POLICY"
    )]
    pub proxy_pull_policy: String,
    /// How objects are labelled
    #[command(flatten)]
    pub labels: LabelArgs,
    /// How long what is under way may take to end after SIGTERM
    #[arg(long, env = "CTRLMESH_MANAGER_DRAIN_TIMEOUT", default_value = "20s", value_name = "DURATION", value_parser = duration)]
    pub drain_timeout: Duration,
    /// The form of log lines
    #[arg(long, env = "CTRLMESH_MANAGER_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,
}

#[derive(Clone, Debug, Args)]
pub struct LabelArgs {
    /// Key of the label with the hash of an object's namespace
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_SHARDING_HASH", default_value = label::SHARDING_HASH, value_name = "KEY", value_parser = label_key)]
    pub label_sharding_hash: String,
    /// Key of the label with an object's namespace
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_NAMESPACE", default_value = label::NAMESPACE, value_name = "KEY", value_parser = label_key)]
    pub label_namespace: String,
    /// Key of the label that says that an object is given to shards
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_CONTROL", default_value = label::CONTROL, value_name = "KEY", value_parser = label_key)]
    pub label_control: String,
    /// How a namespace becomes a hash: fnv1a, or kusionstack as the predecessors do it
    #[arg(long, env = "CTRLMESH_MANAGER_SHARDING_HASH", default_value = "fnv1a", value_name = "HASH")]
    pub sharding_hash: NamespaceHash,
    /// Keep the labels from before on objects after their keys or the hash were changed, for as long as this is given
    #[arg(long, env = "CTRLMESH_MANAGER_KEEP_FORMER_LABELS")]
    pub keep_former_labels: bool,
    /// How many objects that lack labels are labelled in a second, at most
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_RATE", default_value_t = 100, value_name = "N")]
    pub label_rate: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reachable {
    ip: IpAddr,
    /// None: the port of the listener.
    port: Option<u16>,
}

#[derive(Debug, Error)]
#[error("`{seen}` is neither an IP address nor one with a port, as 192.0.2.7:8071 or [2001:db8::7]:8071")]
pub struct ReachableError {
    seen: String,
}

#[derive(Debug, Error)]
#[error(
    "--label-sharding-hash, --label-namespace and --label-control must be three different keys; they are {}",
    .keys.join(", ")
)]
pub struct SameKeysError {
    keys: [String; 3],
}

#[derive(Debug, Error)]
#[error("`{seen}` is not a duration such as 500ms, 5s, 2m or 8760h")]
pub struct DurationError {
    seen: String,
}

impl RunArgs {
    /// The name of this replica: by default the host's name, which is the pod's.
    pub fn replica(&self) -> String {
        let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        self.identity.clone().unwrap_or_else(host).trim().to_owned()
    }

    /// The DNS name of the managers' Service.
    pub fn service_name(&self) -> String {
        format!("{}.{}.svc", self.service, self.namespace)
    }

    /// The names in the manager's certificate.
    pub fn names(&self) -> Names {
        let service = self.service_name();
        let names = [service.clone(), format!("{service}.cluster.local")];
        Names::of(names.into_iter().chain(self.serving_name.iter().cloned()))
    }
}

impl Reachable {
    /// Where the option has no port, it is that of the listener.
    pub fn at(self, listens: u16) -> SocketAddr {
        SocketAddr::new(self.ip, self.port.unwrap_or(listens))
    }
}

impl LabelArgs {
    ///
    /// # Errors
    /// Where two keys are equal.
    pub fn labelling(&self) -> Result<Labelling, SameKeysError> {
        let labelling = Labelling {
            hash_key: self.label_sharding_hash.clone(),
            namespace_key: self.label_namespace.clone(),
            control_key: self.label_control.clone(),
            hash: self.sharding_hash,
        };
        if labelling.is_ambiguous() {
            return Err(SameKeysError { keys: labelling.keys().map(str::to_owned) });
        }
        Ok(labelling)
    }
}

/// An invalid key would end up in selectors and expressions.
fn label_key(text: &str) -> Result<String, KeyError> {
    check_key(text).map(|()| text.to_owned())
}

fn reachable(text: &str) -> Result<Reachable, ReachableError> {
    let whole = text.parse().map(|at: SocketAddr| Reachable { ip: at.ip(), port: Some(at.port()) });
    let bare = || text.parse().map(|ip| Reachable { ip, port: None });
    whole.or_else(|_no_port| bare()).map_err(|_neither| ReachableError { seen: text.to_owned() })
}

/// Reads `500ms`, `5s`, `2m`, `1h`.
fn duration(text: &str) -> Result<Duration, DurationError> {
    let wrong = || DurationError { seen: text.to_owned() };
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
    fn a_pods_address_is_enough_in_either_family() {
        let at = |text| reachable(text).map(|at| at.at(8071).to_string());
        assert_eq!(at("192.0.2.7").unwrap(), "192.0.2.7:8071");
        assert_eq!(at("2001:db8::7").unwrap(), "[2001:db8::7]:8071");
        assert_eq!(at("[2001:db8::7]:99").unwrap(), "[2001:db8::7]:99");
        for wrong in ["", "here", "192.0.2.7:", "[2001:db8::7]"] {
            assert!(reachable(wrong).unwrap_err().to_string().contains("neither"), "{wrong}");
        }
    }

    #[test]
    fn label_keys_must_differ() {
        #[derive(clap::Parser)]
        struct Arguments {
            #[command(flatten)]
            labels: LabelArgs,
        }
        let labelling = |args: &[&str]| <Arguments as clap::Parser>::parse_from(args).labels.labelling();
        assert_eq!(labelling(&["x"]).unwrap(), Labelling::default());
        let error = labelling(&["x", "--label-namespace", label::CONTROL]).unwrap_err().to_string();
        assert!(error.contains("three different keys") && error.contains(label::CONTROL), "{error}");
    }

    #[test]
    fn it_listens_where_the_manifests_and_others_expect_it() {
        #[derive(clap::Parser)]
        struct Arguments {
            #[command(flatten)]
            run: RunArgs,
        }
        let run = <Arguments as clap::Parser>::parse_from(["x"]).run;
        let listens = [run.listen_grpc, run.listen_webhook, run.listen_probes, run.listen_metrics];
        assert_eq!(listens.map(|one| one.port()), [8071, 9443, 8081, 8080]);
        assert!(listens.iter().all(|one| one.ip().is_unspecified()), "{listens:?}");
    }

    #[test]
    fn a_duration_needs_its_unit() {
        assert_eq!(duration("250ms").unwrap(), Duration::from_millis(250));
        assert_eq!(duration("8760h").unwrap(), Duration::from_hours(8760));
        for wrong in ["5", "s", "-1s", "1.5s", "5 s", ""] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
