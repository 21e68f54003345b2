//! `ctrlmesh rollout`: shows how new versions of operators are tried, and goes on with a trial or ends it.
//!
//! A command is an annotation on the root. The manager that leads carries it out, and says so in the status.

mod args;
mod error;
mod request;
mod render;
#[cfg(test)]
mod samples;

use std::io::{Write as _, stdout};
use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use jiff::Timestamp;
use kube::api::{ListParams, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use rustls::crypto::aws_lc_rs;
use serde::Serialize;
use tokio::runtime::Builder;
use tokio::time::{self, Instant};

pub(crate) use self::args::Arguments;
use self::args::{ClusterArgs, Command, Format, ReportArgs, StatusArgs};
use self::error::RolloutError;
use self::request::Verb;

/// Who has written the annotation, as `managedFields` shows it.
const FIELD_MANAGER: &str = "ctrlmesh-rollout";

/// How long a command waits until the manager has carried it out.
const WITHIN: Duration = Duration::from_secs(10);

/// Between two looks at the status meanwhile.
const PERIOD: Duration = Duration::from_millis(250);

/// Limit for one answer of the API server.
const ANSWER: Duration = Duration::from_secs(30);

/// The ShardingConfigs of one namespace.
struct Roots {
    api: Api<ShardingConfig>,
    namespace: String,
}

/// What somebody wants done with a revision of a root.
struct Request<'a> {
    verb: Verb,
    root: &'a str,
    revision: Option<&'a str>,
    wait: bool,
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: Arguments) -> Result<(), RolloutError> {
    // Fails only if it is installed already.
    drop(aws_lc_rs::default_provider().install_default());
    let runtime = Builder::new_current_thread().enable_all().build().map_err(RolloutError::Runtime)?;
    let text = runtime.block_on(Box::pin(carry_out(&arguments.command)))?;
    write!(stdout().lock(), "{text}")?;
    Ok(())
}

/// What to print.
async fn carry_out(command: &Command) -> Result<String, RolloutError> {
    match command {
        Command::Status(status) => show(status).await,
        Command::Report(report) => tell(report).await,
        Command::Promote(promote) => {
            let verb = if promote.full { Verb::PromoteFull } else { Verb::Promote };
            let (revision, wait) = (promote.revision.as_deref(), promote.waiting.wait);
            let request = Request { verb, root: &promote.root, revision, wait };
            Roots::open(&promote.cluster).await?.send(&request).await
        }
        Command::Abort(abort) => {
            let request = Request { verb: Verb::Abort, root: &abort.root, revision: None, wait: abort.waiting.wait };
            Roots::open(&abort.cluster).await?.send(&request).await
        }
    }
}

async fn show(arguments: &StatusArgs) -> Result<String, RolloutError> {
    let roots = Roots::open(&arguments.cluster).await?;
    let Some(name) = &arguments.root else {
        let with_rollout = roots.with_rollout().await?;
        if with_rollout.is_empty() {
            return Ok(format!("no root of namespace {:?} has a rollout\n", roots.namespace));
        }
        return Ok(render::list(&with_rollout));
    };
    let root = roots.get(name).await?;
    match (arguments.output, request::status(&root)) {
        (Some(format), status) => print(format, status?),
        (None, Err(RolloutError::NoStatus { .. })) => Ok(screen(&root)),
        (None, status) => status.map(|_| screen(&root)),
    }
}

async fn tell(arguments: &ReportArgs) -> Result<String, RolloutError> {
    let roots = Roots::open(&arguments.cluster).await?;
    let root = roots.get(&arguments.root).await?;
    let report = request::status(&root)?.shadow.as_ref();
    let report = report.ok_or_else(|| {
        let (namespace, name) = (roots.namespace.clone(), arguments.root.clone());
        RolloutError::NoReport { namespace, name }
    })?;
    arguments.output.map_or_else(|| Ok(render::report(&root, report)), |format| print(format, report))
}

fn print(format: Format, part: &impl Serialize) -> Result<String, RolloutError> {
    match format {
        Format::Json => Ok(serde_json::to_string_pretty(part)? + "\n"),
        Format::Yaml => serde_saphyr::to_string(part).map_err(|error| RolloutError::Yaml(error.into())),
    }
}

fn screen(root: &ShardingConfig) -> String {
    let Some(rule) = &root.spec.root else { return String::new() };
    let status = root.status.as_ref().and_then(|status| status.rollout.as_ref());
    render::screen(root, rule, status, Timestamp::now())
}

impl Roots {
    async fn open(cluster: &ClusterArgs) -> Result<Self, RolloutError> {
        let mut config = config(cluster).await?;
        config.read_timeout = Some(ANSWER);
        let namespace = cluster.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(RolloutError::Client)?;
        Ok(Self { api: Api::namespaced(client, &namespace), namespace })
    }

    async fn with_rollout(&self) -> Result<Vec<ShardingConfig>, RolloutError> {
        let all = self.api.list(&ListParams::default()).await.map_err(|source| self.unread(source))?;
        let has_rollout = |one: &ShardingConfig| one.spec.root.as_ref().is_some_and(|rule| rule.rollout.is_some());
        Ok(all.into_iter().filter(has_rollout).collect())
    }

    async fn get(&self, name: &str) -> Result<ShardingConfig, RolloutError> {
        let found = self.api.get_opt(name).await.map_err(|source| self.unread(source))?;
        found.ok_or_else(|| RolloutError::NoSuchRoot { namespace: self.namespace.clone(), name: name.to_owned() })
    }

    /// Writes the annotation, and returns what to print.
    async fn send(&self, request: &Request<'_>) -> Result<String, RolloutError> {
        let name = request.root;
        let revision = request::revision(request.verb, &self.get(name).await?, request.revision)?;
        let value = request::value(request.verb, &revision, Timestamp::now());
        let patch = Patch::Merge(request::patch(&value));
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let written = self.api.patch_metadata(name, &params, &patch).await;
        written.map_err(|source| {
            let (namespace, name) = (self.namespace.clone(), name.to_owned());
            RolloutError::Write { namespace, name, source }
        })?;
        if !request.wait {
            return Ok(format!("asked the manager for {value:?}\n"));
        }
        let root = self.handled(name, value).await?;
        Ok(render::outcome(&root, request::status(&root)?, &revision))
    }

    /// The root, once the manager has carried out the annotation with this value.
    async fn handled(&self, name: &str, value: String) -> Result<ShardingConfig, RolloutError> {
        let end = Instant::now() + WITHIN;
        loop {
            let root = self.get(name).await?;
            if request::is_handled(&root, &value) {
                return Ok(root);
            }
            if Instant::now() >= end {
                return Err(RolloutError::NotHandled { value, seconds: WITHIN.as_secs() });
            }
            time::sleep(PERIOD).await;
        }
    }

    fn unread(&self, source: kube::Error) -> RolloutError {
        RolloutError::Read { namespace: self.namespace.clone(), source }
    }
}

/// As kubectl finds it.
async fn config(cluster: &ClusterArgs) -> Result<Config, RolloutError> {
    let options = KubeConfigOptions { context: cluster.context.clone(), ..KubeConfigOptions::default() };
    if let Some(path) = &cluster.kubeconfig {
        let failed = |source| RolloutError::Kubeconfig { path: path.clone(), source: Box::new(source) };
        let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
        return Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(failed);
    }
    if cluster.context.is_some() {
        let config = Config::from_kubeconfig(&options).await;
        return config.map_err(|source| RolloutError::Context(Box::new(source)));
    }
    Config::infer().await.map_err(|source| RolloutError::NoCluster(Box::new(source)))
}
