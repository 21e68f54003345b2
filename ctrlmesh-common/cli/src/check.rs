//! `ctrlmesh check`: says before and after an installation whether a cluster is as ctrlmesh needs it.
//!
//! It asks the API server only, with the rights of whoever calls it. What the user may not read is skipped. Nothing is
//! changed: objects are created in dry runs only.

mod args;
mod pages;
mod finding;
mod right;
mod expected;
mod dry_run;
mod snapshot;
mod pods;
mod node;
mod cgroups;
mod checks;
mod read;
mod render;

use std::io;
use std::io::{Write as _, stdout};
use std::process::ExitCode;
use std::time::Duration;

use http::StatusCode;
use serde::Serialize;
use tokio::time;

pub(crate) use self::args::Arguments;
use self::finding::{Finding, State};
use crate::cluster::{self, ClusterError, Connection};
use crate::text::{self, Document, DocumentError};

/// Kind of the document about a check.
const KIND: &str = "Check";

/// Exit status where something failed.
const FAILED: u8 = 2;

/// Why there is no check, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("ask the API server {server} for its version (does `kubectl version` work?)")]
    Unreachable { server: String, source: kube::Error },
    #[error("the API server {server} answers {status} when asked for its version (does `kubectl version` work?)")]
    Refused { server: String, status: StatusCode },
    #[error(
        "the checks are not at their end after {within:?}: see if the API server answers slowly, or give --timeout"
    )]
    Late { within: Duration },
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

/// The results of all checks.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    /// Whether it is about a cluster before an installation.
    pre: bool,
    checks: Vec<Finding>,
}

/// Carries out the command.
///
/// # Errors
/// Why there is no check, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CheckError> {
    let report = cluster::block_on(async {
        let late = CheckError::Late { within: arguments.timeout };
        time::timeout(arguments.timeout, make(arguments)).await.map_err(|_elapsed| late)?
    })?;
    let printed = match arguments.output.format() {
        Some(format) => text::document(format, &Document::new(KIND, &report))?,
        None => render::screen(&report),
    };
    write!(stdout().lock(), "{printed}")?;
    let failed = report.checks.iter().any(|one| one.state == State::Failed);
    Ok(if failed { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

async fn make(arguments: &Arguments) -> Result<Report, CheckError> {
    let connection = Connection::of(&arguments.cluster).await?;
    let client = &connection.client;
    let mut checks = if arguments.pre {
        let snapshot = read::snapshot(&connection, &right::OF_INSTALLATION).await?;
        let cgroups = read::cgroups(client, &snapshot.nodes).await;
        checks::before(&snapshot, &cgroups)
    } else {
        let snapshot = read::snapshot(&connection, &right::OF_COMMANDS).await?;
        let installed = Box::pin(read::installed(client, &connection.namespace)).await;
        checks::after(&snapshot, &installed)
    };
    // Stable: the order within a group stays.
    checks.sort_by_key(|one| one.group);
    Ok(Report { pre: arguments.pre, checks })
}

#[cfg(test)]
mod tests;
