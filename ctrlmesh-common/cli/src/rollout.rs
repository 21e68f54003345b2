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
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use tokio::time::{self, Instant};

pub(crate) use self::args::Arguments;
use self::args::{Command, ReportArgs, StatusArgs};
use self::error::RolloutError;
use self::request::Verb;
use crate::cluster::{self, ClusterArgs, Connection, paging};
use crate::text;

/// Who has written the annotation, as `managedFields` shows it.
const FIELD_MANAGER: &str = "ctrlmesh-rollout";

/// How long a command waits until the manager has carried it out.
const WITHIN: Duration = Duration::from_secs(10);

/// Between two looks at the status meanwhile.
const PERIOD: Duration = Duration::from_millis(250);

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
    let printed = cluster::block_on(carry_out(&arguments.command))?;
    write!(stdout().lock(), "{printed}")?;
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
        (Some(format), status) => Ok(text::document(format, status?)?),
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
    Ok(match arguments.output {
        Some(format) => text::document(format, report)?,
        None => render::report(&root, report),
    })
}

fn screen(root: &ShardingConfig) -> String {
    let Some(rule) = &root.spec.root else { return String::new() };
    let status = root.status.as_ref().and_then(|status| status.rollout.as_ref());
    render::screen(root, rule, status, Timestamp::now())
}

impl Roots {
    async fn open(cluster: &ClusterArgs) -> Result<Self, RolloutError> {
        let Connection { client, namespace, .. } = Connection::of(cluster).await?;
        Ok(Self { api: Api::namespaced(client, &namespace), namespace })
    }

    async fn with_rollout(&self) -> Result<Vec<ShardingConfig>, RolloutError> {
        let all = paging::list(&self.api, ListParams::default()).await.map_err(|source| self.unread(source))?;
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
