//! `ctrlmesh plan`: shows what applying roots would move, without applying anything.
//!
//! It asks the API server only, with the rights of whoever calls it.

mod args;
mod objects;
pub(crate) mod census;
pub(crate) mod change;
pub(crate) mod live;
pub(crate) mod render;

use std::io;
use std::io::{Write as _, stdout};
use std::process::ExitCode;
use std::time::Duration;

use ctrlmesh_manager::rules::shard::DivideError;
use kube::Client;
use serde::Serialize;

pub(crate) use self::args::Arguments;
use self::change::{Change, RootPlan, is_same};
use self::live::{Live, count};
use crate::cluster::labelling::LabellingError;
use crate::cluster::{self, ClusterError, Connection};
use crate::files::manifests;
use crate::text::{self, Document, DocumentError};
use crate::top::TopError;
use crate::top::sample::Sample;

/// Kind of the document about a plan.
const KIND: &str = "Plan";

/// Exit status with `--exit-code`, where something would move.
const MOVES: u8 = 2;

/// Why there is no plan, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("{0:#}")]
    Files(anyhow::Error),
    #[error("there is no root in these files: a ShardingConfig with `spec.root`")]
    NoRoot,
    #[error("ShardingConfig {name} would be refused: {problems}")]
    Refused { name: String, problems: String },
    #[error("divide ShardingConfig {name}")]
    Divide { name: String, source: DivideError },
    #[error("--sample: must be longer than 0s")]
    NoSample,
    #[error(transparent)]
    Sample(#[from] TopError),
    #[error("read the {kind} of all namespaces (does `kubectl get {kind} -A` work?)")]
    Read { kind: &'static str, source: kube::Error },
    #[error("ask the API server which resources it has (does `kubectl api-resources` work?)")]
    Discovery(#[source] kube::Error),
    #[error(transparent)]
    Labelling(#[from] LabellingError),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

/// What applying roots would do.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Plan {
    roots: Vec<RootPlan>,
    /// Resources whose objects cannot be listed, with the reason.
    not_counted: Vec<String>,
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, PlanError> {
    let plan = cluster::block_on(make(arguments))?;
    let printed = match arguments.output {
        Some(format) => text::document(format, &Document::new(KIND, &plan))?,
        None => render::screen(&plan),
    };
    write!(stdout().lock(), "{printed}")?;
    let moves = plan.roots.iter().any(RootPlan::moves_anything);
    Ok(if moves && arguments.exit_code { ExitCode::from(MOVES) } else { ExitCode::SUCCESS })
}

/// Measures the load of the roots. Returns of which it cannot be said, with the reason.
async fn measure(client: &Client, time: Duration, changes: &mut [Change]) -> Result<Vec<String>, PlanError> {
    let sample = Sample::within(client, time).await?;
    let unread = sample.not_read.iter().map(|reason| format!("requests: {reason}")).collect::<Vec<_>>();
    if unread.is_empty() {
        let measured = changes.iter_mut().filter_map(|change| change.measure(&sample).err());
        return Ok(measured.collect());
    }
    Ok(unread)
}

async fn make(arguments: &Arguments) -> Result<Plan, PlanError> {
    if arguments.sample.is_some_and(|time| time.is_zero()) {
        return Err(PlanError::NoSample);
    }
    let wanted = manifests(&arguments.filename).map_err(PlanError::Files)?.configs;
    let connection = Connection::of(&arguments.cluster).await?;
    let live = Live::read(&connection.client).await?;
    let (mut changes, mut admitted) = (Vec::new(), live.configs.clone());
    for root in wanted.into_iter().filter(|config| config.spec.root.is_some()) {
        let mut root = root.into_inner();
        root.metadata.namespace.get_or_insert_with(|| connection.namespace.clone());
        changes.push(live.change(&root, &admitted)?);
        admitted.retain(|one| !is_same(&root, one));
        admitted.push(root);
    }
    if changes.is_empty() {
        return Err(PlanError::NoRoot);
    }
    let mut not_counted = count(&connection.client, &mut changes).await?;
    if let Some(time) = arguments.sample {
        not_counted.extend(measure(&connection.client, time, &mut changes).await?);
    }
    Ok(Plan { roots: changes.iter().map(Change::plan).collect(), not_counted })
}
