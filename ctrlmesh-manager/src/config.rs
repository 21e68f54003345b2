//! The options of `ctrlmesh-manager run`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ctrlmesh_common::names::{label, port};
use ctrlmesh_common::selector::{KeyError, check_key};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_runtime::duration;
use ctrlmesh_runtime::listen::all_interfaces;
use ctrlmesh_runtime::traces::{CollectorUrl, TraceRatio};
use thiserror::Error;

use crate::ca::authority::Names;
use crate::rules::shard::Labelling;
use crate::telemetry::LogFormat;

#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Kubeconfig for the API server. The default is the pod's service account, or what kubectl would use
    #[arg(long, env = "CTRLMESH_MANAGER_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace in which the manager runs, with its Lease, Secret and Service
    #[arg(long, env = "CTRLMESH_MANAGER_NAMESPACE", default_value = "ctrlmesh-system")]
    pub namespace: String,
    /// Name of this replica, unique among all. The default is the host name, which is the pod's name
    #[arg(long, env = "CTRLMESH_MANAGER_IDENTITY", value_name = "NAME")]
    pub identity: Option<String>,
    /// Name of the Service in front of all replicas
    #[arg(long, env = "CTRLMESH_MANAGER_SERVICE", default_value = "ctrlmesh-manager", value_name = "NAME")]
    pub service: String,
    /// A further DNS name or IP address in the manager's own certificate. May be repeated
    #[arg(long, env = "CTRLMESH_MANAGER_SERVING_NAME", value_name = "NAME", value_delimiter = ',')]
    pub serving_name: Vec<String>,
    /// A further DNS name or IP address by which operators call the API server: the certificates of proxies carry it.
    /// May be repeated
    #[arg(long, env = "CTRLMESH_MANAGER_API_SERVER_NAME", value_name = "NAME", value_delimiter = ',')]
    pub api_server_name: Vec<String>,
    /// Service account of the node proxies
    #[arg(
        long,
        env = "CTRLMESH_MANAGER_NODE_ACCOUNT",
        default_value = "ctrlmesh-system/ctrlmesh-node",
        value_name = "NAMESPACE/NAME"
    )]
    pub node_account: String,
    /// Service account of the manager itself
    #[arg(
        long,
        env = "CTRLMESH_MANAGER_ACCOUNT",
        default_value = "ctrlmesh-system/ctrlmesh-manager",
        value_name = "NAMESPACE/NAME"
    )]
    pub account: String,
    /// Service account, in the manager's namespace, that the manager impersonates to label existing objects. The API
    /// server can then give that work a lower priority. Without it, the manager uses its own account
    #[arg(long, env = "CTRLMESH_MANAGER_BACKGROUND_ACCOUNT", value_name = "NAME")]
    pub background_account: Option<String>,
    /// File with this replica's service account token for audience `ctrlmesh`. The replica shows it to the leader.
    /// Needed with more than one replica
    #[arg(long, env = "CTRLMESH_MANAGER_TOKEN", value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// IP address, with or without port, at which the other replicas reach this one. The default is where it listens
    #[arg(long, env = "CTRLMESH_MANAGER_GRPC_ADDRESS", value_name = "IP[:PORT]", value_parser = reachable)]
    pub grpc_address: Option<Reachable>,
    /// Host in the URL of the webhooks that the manager registers, at the port of --listen-webhook. The default is the
    /// Service, at port 443
    #[arg(long, env = "CTRLMESH_MANAGER_WEBHOOK_HOST", value_name = "HOST")]
    pub webhook_host: Option<String>,
    /// How long a certificate authority of the manager is valid
    #[arg(long, env = "CTRLMESH_MANAGER_CA_VALIDITY", default_value = "8760h", value_name = "DURATION", value_parser = duration::parse)]
    pub ca_validity: Duration,
    /// Most proxies that may be connected to this replica
    #[arg(long, env = "CTRLMESH_MANAGER_MAX_PROXIES", default_value_t = 20_000, value_name = "N")]
    pub max_proxies: usize,
    /// Address and port on which proxies connect
    #[arg(long, env = "CTRLMESH_MANAGER_LISTEN_GRPC", value_name = "ADDRESS", default_value_t = all_interfaces(port::MANAGER_GRPC))]
    pub listen_grpc: SocketAddr,
    /// Address and port of the webhooks
    #[arg(long, env = "CTRLMESH_MANAGER_LISTEN_WEBHOOK", value_name = "ADDRESS", default_value_t = all_interfaces(port::MANAGER_WEBHOOK))]
    pub listen_webhook: SocketAddr,
    /// Address and port of the liveness and readiness pages
    #[arg(long, env = "CTRLMESH_MANAGER_LISTEN_PROBES", value_name = "ADDRESS", default_value_t = all_interfaces(port::MANAGER_PROBES))]
    pub listen_probes: SocketAddr,
    /// Address and port of the metrics page
    #[arg(long, env = "CTRLMESH_MANAGER_LISTEN_METRICS", value_name = "ADDRESS", default_value_t = all_interfaces(port::MANAGER_METRICS))]
    pub listen_metrics: SocketAddr,
    /// Image of the proxy container that the manager injects
    #[arg(
        long,
        env = "CTRLMESH_MANAGER_PROXY_IMAGE",
        default_value = concat!("ctrlmesh.dev/proxy:", env!("CARGO_PKG_VERSION")),
        value_name = "IMAGE"
    )]
    pub proxy_image: String,
    /// Pull policy of the proxy container
    #[arg(
        long,
        env = "CTRLMESH_MANAGER_PROXY_PULL_POLICY",
        default_value = "IfNotPresent",
        value_parser = ["Always", "IfNotPresent", "Never"],
        value_name = "POLICY"
    )]
    pub proxy_pull_policy: String,
    /// URL of an OpenTelemetry collector that injected proxies send spans to by OTLP over gRPC, as http://HOST:PORT or
    /// https://HOST:PORT. Without it they make none
    #[arg(long, env = "CTRLMESH_MANAGER_SIDECAR_OTLP_ENDPOINT", value_name = "URL")]
    pub sidecar_otlp_endpoint: Option<CollectorUrl>,
    /// Share of the traces that injected proxies record, from 0 to 1, among those that they begin themselves
    #[arg(long, env = "CTRLMESH_MANAGER_SIDECAR_TRACE_RATIO", default_value = "1", value_name = "RATIO")]
    pub sidecar_trace_ratio: TraceRatio,
    /// How objects are labelled
    #[command(flatten)]
    pub labels: LabelArgs,
    /// Leave labels with former keys on objects after the keys or the hash changed. Without it, the manager removes
    /// them once every proxy uses the new ones
    #[arg(long, env = "CTRLMESH_MANAGER_KEEP_FORMER_LABELS")]
    pub keep_former_labels: bool,
    /// Most objects that the manager labels in a second
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_RATE", default_value_t = 100, value_name = "N")]
    pub label_rate: u32,
    /// Longest time that a move of ownership waits for a silent proxy, where the API server refuses what that proxy
    /// would let pass
    #[arg(long, env = "CTRLMESH_MANAGER_ACKNOWLEDGE_WITHIN", default_value = "5s", value_name = "DURATION", value_parser = duration::parse)]
    pub acknowledge_within: Duration,
    /// Time from one look at the load of elastic shares with `balance: Load` to the next, at least 1s. At each at most
    /// 4 slots of a root begin to move
    #[arg(long, env = "CTRLMESH_MANAGER_BALANCE_INTERVAL", default_value = "1m", value_name = "DURATION", value_parser = duration::parse)]
    pub balance_interval: Duration,
    /// Longest time after SIGTERM for requests and connections that are under way
    #[arg(long, env = "CTRLMESH_MANAGER_DRAIN_TIMEOUT", default_value = "20s", value_name = "DURATION", value_parser = duration::parse)]
    pub drain_timeout: Duration,
    /// Format of log lines
    #[arg(long, env = "CTRLMESH_MANAGER_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,
}

#[derive(Clone, Debug, Args)]
pub struct LabelArgs {
    /// Key of the label with the slot of an object's namespace
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_SHARDING_HASH", default_value = label::SHARDING_HASH, value_name = "KEY", value_parser = label_key)]
    pub label_sharding_hash: String,
    /// Key of the label with the name of an object's namespace
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_NAMESPACE", default_value = label::NAMESPACE, value_name = "KEY", value_parser = label_key)]
    pub label_namespace: String,
    /// Key of the label whose value `true` marks an object that belongs to shards
    #[arg(long, env = "CTRLMESH_MANAGER_LABEL_CONTROL", default_value = label::CONTROL, value_name = "KEY", value_parser = label_key)]
    pub label_control: String,
    /// Hash from a namespace to its slot. fnv1a spreads evenly; kusionstack gives the slots of KusionStack's controller
    /// mesh, for a migration
    #[arg(long, env = "CTRLMESH_MANAGER_SHARDING_HASH", default_value = "fnv1a", value_name = "HASH")]
    pub sharding_hash: NamespaceHash,
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
}
