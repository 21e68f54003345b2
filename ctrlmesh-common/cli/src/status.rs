//! `ctrlmesh status`: shows how the roots and shards by hand of a cluster stand, on one screen.
//!
//! It asks the API server only, with the rights of whoever calls it.

mod args;
pub(crate) mod shards;
pub(crate) mod overview;
mod render;

use std::io::{IsTerminal as _, Write as _, stderr, stdout};
use std::time::Duration;
use std::{fmt, io};

use ctrlmesh_common::api::{CircuitBreaker, ShardingConfig};
use jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, Client};
use serde::Serialize;
use tokio::time;

pub(crate) use self::args::Arguments;
use self::args::Output;
use self::overview::Overview;
use crate::cluster::{self, ClusterError, Connection, paging};
use crate::failure;
use crate::text::{self, CLEAR, Document, DocumentError, Format};

/// Between two looks with `--watch`.
const PERIOD: Duration = Duration::from_secs(2);

/// Kind of the document about one root, or about one shard by hand.
const KIND: &str = "Status";

/// Kind of the document about all of them.
const LIST_KIND: &str = "StatusList";

/// Why roots cannot be shown, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StatusError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("read {kind} of {place} (does `kubectl get {kind}` work there?)")]
    Read { kind: &'static str, place: Place, source: kube::Error },
    #[error(
        "there is no root or shard by hand {name:?} in {place}: `ctrlmesh status -A` lists those of all namespaces"
    )]
    NoSuchConfig { name: String, place: Place },
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

/// Where roots are looked for.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// `None`: everywhere.
    namespace: Option<String>,
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), StatusError> {
    cluster::block_on(show(arguments))
}

async fn show(arguments: &Arguments) -> Result<(), StatusError> {
    let Connection { client, namespace, .. } = Connection::of(&arguments.cluster).await?;
    let place = Place { namespace: (!arguments.all_namespaces).then_some(namespace) };
    let format = arguments.output.and_then(Output::format);
    let is_screen = arguments.watch && stdout().is_terminal() && format.is_none();
    let mut last = String::new();
    loop {
        let all = match read(&client, &place, arguments.name.as_deref()).await {
            // The API server may be away for a while.
            Err(error @ StatusError::Read { .. }) if !last.is_empty() => {
                writeln!(stderr(), "{}", failure::causes(&error))?;
                time::sleep(PERIOD).await;
                continue;
            }
            read => read?,
        };
        // Ages are no change, but a screen shows them.
        let state = format!("{:?}", all.iter().map(Overview::without_ages).collect::<Vec<_>>());
        if is_screen || state != last {
            let between = match format {
                _ if is_screen => CLEAR,
                Some(Format::Yaml) if arguments.watch => "---\n",
                _ => "",
            };
            write!(stdout().lock(), "{between}{}", print(arguments, &place, &all)?)?;
            stdout().flush()?;
            last = state;
        }
        if !arguments.watch {
            return Ok(());
        }
        time::sleep(PERIOD).await;
    }
}

/// What there is to show.
async fn read(client: &Client, place: &Place, name: Option<&str>) -> Result<Vec<Overview>, StatusError> {
    let failed = |kind| move |source| StatusError::Read { kind, place: place.clone(), source };
    let (configs, breakers): (Api<ShardingConfig>, Api<CircuitBreaker>) = match &place.namespace {
        Some(namespace) => (Api::namespaced(client.clone(), namespace), Api::namespaced(client.clone(), namespace)),
        None => (Api::all(client.clone()), Api::all(client.clone())),
    };
    let configs = paging::list(&configs, ListParams::default()).await.map_err(failed("shardingconfigs"))?;
    // They are an extra: whoever may not read them sees the rest.
    let breakers = paging::list(&breakers, ListParams::default()).await.unwrap_or_default();
    let mut all = overview::overviews(&configs, &breakers);
    if let Some(name) = name {
        all.retain(|one| one.name == name);
        if all.is_empty() {
            return Err(StatusError::NoSuchConfig { name: name.to_owned(), place: place.clone() });
        }
    }
    Ok(all)
}

fn print(arguments: &Arguments, place: &Place, all: &[Overview]) -> Result<String, StatusError> {
    let named = all.first().filter(|_| arguments.name.is_some());
    if let Some(format) = arguments.output.and_then(Output::format) {
        return Ok(printed(format, named, all)?);
    }
    let is_wide = arguments.output == Some(Output::Wide);
    Ok(match (named, all) {
        (Some(one), _) => render::screen(one, is_wide, Timestamp::now()),
        (None, []) => format!("there is no root and no shard by hand in {place}\n"),
        (None, _) if is_wide => {
            let screens: Vec<_> = all.iter().map(|one| render::screen(one, true, Timestamp::now())).collect();
            screens.join("\n")
        }
        (None, _) => render::list(all, place.namespace.is_none()),
    })
}

/// For programs: one document about what is named, or a list.
fn printed(format: Format, named: Option<&Overview>, all: &[Overview]) -> Result<String, DocumentError> {
    #[derive(Serialize)]
    struct List<'a> {
        items: Vec<Document<'a, Overview>>,
    }
    let status = |one| Document::new(KIND, one);
    match named {
        Some(one) => text::document(format, &status(one)),
        None => text::document(format, &Document::new(LIST_KIND, &List { items: all.iter().map(status).collect() })),
    }
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(out, "namespace {namespace:?}"),
            None => out.write_str("any namespace"),
        }
    }
}

#[cfg(test)]
mod tests;
