//! Reads the inputs of a run, and makes the files, keys and redirection that the command needs.

use std::env;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use ctrlmesh_common::policy::Policy;
use rustls::client::ResolvesClientCert;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;

use crate::run::args::{self, Interception, RunArgs};
use crate::run::cluster::{Cluster, Pem};
use crate::run::command::Plan;
use crate::run::command::child::Preparation;
use crate::run::egress::{self, EgressProxy};
use crate::run::error::RunError;
use crate::run::folder::{self, Folder};
use crate::run::identity::{Authority, Credential, Identity};
use crate::run::interception::isolate::{self, Isolation};
use crate::run::interception::service_account;
use crate::run::interception::{self, Route};
use crate::run::kubeconfig::generate::{self, ProxyEndpoint};
use crate::run::kubeconfig::source::{self, SERVICE_ACCOUNT, Source};
use crate::run::kubeconfig::{self, Chosen, text};
use crate::run::proxy::Setup;
use ctrlmesh_proxy::net::tls::issue;
use ctrlmesh_proxy::net::tls::issue::ServingCertificate;
use ctrlmesh_proxy::net::tls::trust::Trust;
use ctrlmesh_proxy::policy;
use ctrlmesh_proxy::serve::explain;

/// Variables that lead clients in a cluster to the API server.
const IN_CLUSTER: [&str; 2] = ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"];

/// Variables that lead clients to a proxy, and those that except hosts from it.
const PROXIES: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];
const EXCEPTIONS: [&str; 2] = ["NO_PROXY", "no_proxy"];

/// What is to be run, before anything is made.
#[derive(Debug)]
pub(crate) struct Inputs {
    source: Source,
    chosen: Chosen,
    pub(crate) cluster: Cluster,
    pub(crate) through: Option<EgressProxy>,
    policy: Policy,
    policy_source: Option<policy::Source>,
}

/// What was made for the command; gone when dropped.
pub(crate) struct Session {
    pub(crate) isolation: Option<Isolation>,
    interception: Interception,
    /// Where the command is to connect.
    server: String,
    port: u16,
    kubeconfig: PathBuf,
    /// The certificate of whoever vouches for that.
    authority: PathBuf,
    /// The files of a service account, for a command that knows only those.
    account: Option<PathBuf>,
    _folder: Folder,
}

/// How everybody proves to be whom the others expect.
struct Keys {
    /// The certificate of this run's own authority, and its file.
    authority: String,
    authority_file: PathBuf,
    /// What the command is shown.
    presented: Arc<ServingCertificate>,
    /// What the command shows, where the proxy speaks for the user.
    credential: Option<Credential>,
    verifier: Arc<dyn ClientCertVerifier>,
    /// Whom the proxy believes, and what it shows them.
    trust: Arc<Trust>,
}

impl Inputs {
    /// Reads all that is named.
    pub(crate) fn find(args: &RunArgs) -> Result<Self, RunError> {
        let source = source::find(args.kubeconfig.as_deref(), &args.command)?;
        let context = args.context.as_deref().or(source.context.as_deref());
        let chosen = kubeconfig::choose(&source.kubeconfig, context)?;
        let cluster = Cluster::of(&chosen, args.certificate_authority.clone())?;
        let namespace = text(&chosen.context, "namespace").unwrap_or("default");
        let (policy, policy_source) = args.policy(namespace)?;
        let environment = |name: &str| env::var(name).ok();
        let through = egress::find(&cluster.server, cluster.proxy_url.as_deref(), environment)?;
        Ok(Self { source, chosen, cluster, through, policy, policy_source })
    }
}

impl Session {
    /// Makes everything but the proxy and the command themselves; `targets` is what eBPF redirects.
    pub(crate) fn make(args: &RunArgs, wanted: &Inputs, targets: &[SocketAddr]) -> Result<(Self, Setup), RunError> {
        let cluster = &wanted.cluster;
        let common = args::common().map_err(RunError::Environment)?;
        let root = args.run_dir.clone().unwrap_or_else(folder::usual);
        let folder = Folder::create(&root, isolate::sweep)?;
        let keys = Keys::make(cluster, &folder)?;
        let Route { interception, listener, isolation } =
            interception::open(args, wanted.through.as_ref(), &folder, targets)?;
        let port = listener.local_addr().map_err(RunError::Start)?.port();
        let server = match interception {
            Interception::Ebpf => cluster.url.clone(),
            Interception::Env | Interception::Kubeconfig => format!("https://127.0.0.1:{port}"),
        };
        let endpoint =
            ProxyEndpoint { server: &server, authority: &keys.authority, credential: keys.credential.as_ref() };
        let kubeconfig = folder.write("kubeconfig", &generate::kubeconfig(&wanted.chosen, endpoint))?;
        let account = (interception == Interception::Env)
            .then(|| service_account::write(&folder, &wanted.chosen, cluster, &keys.authority))
            .transpose()?;
        let setup = Setup {
            args: common,
            listener,
            cluster: cluster.clone(),
            through: wanted.through.clone(),
            trust: keys.trust,
            presented: keys.presented,
            verifier: keys.verifier,
            policy: wanted.policy.clone(),
            source: wanted.policy_source.clone(),
        };
        let made = Self {
            isolation,
            interception,
            server,
            port,
            kubeconfig,
            authority: keys.authority_file,
            account,
            _folder: folder,
        };
        Ok((made, setup))
    }

    /// How the command is started so that it comes here.
    pub(crate) fn plan(&self, args: &RunArgs, wanted: &Inputs) -> Plan {
        let replaced = |argument: &OsStr| {
            let named = |file: &PathBuf| generate::names(argument, file);
            if wanted.source.files.iter().any(named) {
                return Some(self.kubeconfig.clone().into());
            }
            (argument == OsStr::new(&wanted.cluster.url)).then(|| self.server.clone().into())
        };
        let command = generate::arguments(&args.command, replaced);
        self.explain(wanted, command != args.command);
        let preparation = Preparation {
            cgroup: self.isolation.as_ref().map(|isolation| isolation.cgroup().to_owned()),
            binds: self.binds(wanted),
            account: self.account.clone(),
        };
        Plan { command, variables: self.variables(wanted), preparation }
    }

    /// What the command sees in the place of files that it may know by name; only root can have that.
    fn binds(&self, wanted: &Inputs) -> Vec<(PathBuf, PathBuf)> {
        if self.interception != Interception::Ebpf {
            return Vec::new();
        }
        let files = wanted.source.files.iter().filter(|file| file.is_file());
        let mut binds: Vec<_> = files.map(|file| (self.kubeconfig.clone(), file.clone())).collect();
        if wanted.source.files.is_empty() {
            let ca = PathBuf::from(SERVICE_ACCOUNT).join("ca.crt");
            binds.push((self.authority.clone(), ca));
        }
        binds
    }

    fn variables(&self, wanted: &Inputs) -> Vec<(&'static str, Option<OsString>)> {
        let mut variables = vec![("KUBECONFIG", Some(self.kubeconfig.clone().into()))];
        let host = match self.interception {
            // Connecting to the API server itself is what leads here.
            Interception::Ebpf => &wanted.cluster.server.host,
            Interception::Env => {
                let values = ["127.0.0.1".to_owned(), self.port.to_string()];
                variables.extend(IN_CLUSTER.into_iter().zip(values.map(|value| Some(value.into()))));
                "127.0.0.1"
            }
            // A client that finds itself in a cluster would go there.
            Interception::Kubeconfig => {
                variables.extend(IN_CLUSTER.map(|name| (name, None)));
                "127.0.0.1"
            }
        };
        if PROXIES.iter().any(|name| env::var_os(name).is_some()) {
            let before = EXCEPTIONS.iter().find_map(|name| env::var(name).ok());
            let value = generate::no_proxy(before.as_deref(), host);
            variables.extend(EXCEPTIONS.map(|name| (name, Some(value.clone().into()))));
        }
        variables
    }

    fn explain(&self, wanted: &Inputs, arguments_changed: bool) {
        let Inputs { source, cluster, policy, .. } = wanted;
        let files: Vec<String> = source.files.iter().map(|file| file.display().to_string()).collect();
        let files = if files.is_empty() { "the service account".to_owned() } else { files.join(" and ") };
        let kubeconfig = self.kubeconfig.display();
        explain::note(format_args!("KUBECONFIG is {kubeconfig}, made of {files}: CA replaced"));
        match &self.isolation {
            Some(isolation) => explain::note(format_args!(
                "connections to {} from {} come to port {}, by eBPF",
                cluster.url,
                isolation.cgroup().display(),
                self.port
            )),
            None => explain::note(format_args!("server {} became {}", cluster.url, self.server)),
        }
        if arguments_changed {
            explain::note(format_args!("arguments that named {files} name {kubeconfig}"));
        }
        if cluster.identity.is_some() {
            explain::note(format_args!("the user's client certificate is presented by the proxy"));
        }
        if let Some(proxy) = &wanted.through {
            explain::note(format_args!("the API server is reached through {proxy}"));
        }
        explain::policy(policy);
    }
}

impl Keys {
    fn make(cluster: &Cluster, folder: &Folder) -> Result<Self, RunError> {
        let authority = Authority::new()?;
        let own = authority.credential();
        let cert = folder.write("ca.crt", own.certificate.as_bytes())?;
        let key = folder.write("ca.key", own.key.as_bytes())?;
        let names = cluster.names.clone();
        let issuing = issue::Source::MeshCa { cert: cert.clone(), key, names };
        let believed = match &cluster.authority {
            Pem::File(file) => file.clone(),
            Pem::Data(pem) => folder.write("upstream-ca.crt", pem)?,
        };
        let mut identity: Option<Arc<dyn ResolvesClientCert>> = None;
        let mut credential = None;
        let mut verifier = WebPkiClientVerifier::no_client_auth();
        if let Some((certificate, key)) = cluster.identity.clone() {
            identity = Some(Arc::new(Identity::load(certificate, key)?));
            credential = Some(authority.issue()?);
            verifier = authority.verifier()?;
        }
        Ok(Self {
            authority: own.certificate,
            authority_file: cert,
            presented: Arc::new(ServingCertificate::load(issuing)?),
            credential,
            verifier,
            trust: Arc::new(Trust::load_for(&believed, identity)?),
        })
    }
}
