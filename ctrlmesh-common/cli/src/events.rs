//! `ctrlmesh events`: shows events about ctrlmesh resources, and those by which its programs report on other objects.
//!
//! It asks the API server only, with the rights of whoever calls it.

mod args;
pub(crate) mod entry;
mod render;

use std::collections::BTreeSet;
use std::io;
use std::io::{Write as _, stderr, stdout};
use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_manager::rules::shard::is_made_by;
use jiff::Timestamp;
use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use serde::Serialize;
use tokio::time;

pub(crate) use self::args::Arguments;
use self::entry::Entry;
use crate::cluster::{self, ClusterError, Connection};
use crate::text::{self, Document, DocumentError, Format};

/// Kind of the document.
const KIND: &str = "EventList";

/// Events in one answer of the API server.
const PAGE: u32 = 500;

/// Between two looks with `--watch`.
const PERIOD: Duration = Duration::from_secs(2);

/// Why events cannot be shown, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EventsError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("read the {kind} of {place} (does `kubectl get {kind}` work there?)")]
    Read { kind: &'static str, place: String, source: kube::Error },
    #[error(
        "there is no ShardingConfig {name:?} in namespace {namespace:?}, and no event about one: `ctrlmesh status -A` lists them"
    )]
    NoSuchConfig { name: String, namespace: String },
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

/// Whose events are shown.
struct Scope {
    client: Client,
    /// `None`: of all namespaces.
    namespace: Option<String>,
    /// Of this ShardingConfig, and of the shards that it made. `None`: of everything of ours.
    root: Option<String>,
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), EventsError> {
    cluster::block_on(Box::pin(show(arguments)))
}

async fn show(arguments: &Arguments) -> Result<(), EventsError> {
    let Connection { client, namespace, .. } = Connection::of(&arguments.cluster).await?;
    let namespace = (!arguments.all_namespaces).then_some(namespace);
    let scope = Scope { client, namespace, root: arguments.root.clone() };
    let entries = scope.entries().await?;
    if let (Some(name), Some(namespace), true) = (&scope.root, &scope.namespace, entries.is_empty())
        && scope.configs().await?.iter().all(|config| config.name_any() != *name)
    {
        return Err(EventsError::NoSuchConfig { name: name.clone(), namespace: namespace.clone() });
    }
    let format = arguments.output.format();
    print(&scope, &entries, format, true)?;
    if arguments.watch { follow(&scope, format, &entries).await } else { Ok(()) }
}

/// Prints what is new after `entries`, for ever.
async fn follow(scope: &Scope, format: Option<Format>, entries: &[Entry]) -> Result<(), EventsError> {
    let mut shown: BTreeSet<(String, i32)> = entries.iter().map(Entry::version).collect();
    loop {
        time::sleep(PERIOD).await;
        let entries = match scope.entries().await {
            // The API server may be away for a while.
            Err(error @ EventsError::Read { .. }) => {
                writeln!(stderr(), "{:#}", anyhow::Error::from(error))?;
                continue;
            }
            read => read?,
        };
        let new: Vec<Entry> = entries.iter().filter(|entry| !shown.contains(&entry.version())).cloned().collect();
        shown = entries.iter().map(Entry::version).collect();
        if !new.is_empty() {
            print(scope, &new, format, false)?;
        }
    }
}

fn print(scope: &Scope, entries: &[Entry], format: Option<Format>, is_first: bool) -> Result<(), EventsError> {
    #[derive(Serialize)]
    struct List<'a> {
        items: &'a [Entry],
    }
    let printed = match format {
        Some(format) => {
            let between = if format == Format::Yaml && !is_first { "---\n" } else { "" };
            between.to_owned() + &text::document(format, &Document::new(KIND, &List { items: entries }))?
        }
        None => render::list(entries, scope.namespace.is_none(), is_first, Timestamp::now()),
    };
    write!(stdout().lock(), "{printed}")?;
    Ok(stdout().flush()?)
}

impl Scope {
    /// Those that are of ours, the newest last.
    async fn entries(&self) -> Result<Vec<Entry>, EventsError> {
        let names = match &self.root {
            Some(root) => Some(related(root, &self.configs().await?)),
            None => None,
        };
        let events = self.events().await?;
        Ok(entry::entries(&events, names.as_ref()))
    }

    async fn events(&self) -> Result<Vec<Event>, EventsError> {
        let api: Api<Event> = match &self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let (mut page, mut events) = (ListParams::default().limit(PAGE), Vec::new());
        loop {
            let list = api.list(&page).await.map_err(|source| self.failed("events.events.k8s.io", source))?;
            events.extend(list.items);
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = page.continue_token(&token),
                None => return Ok(events),
            }
        }
    }

    async fn configs(&self) -> Result<Vec<ShardingConfig>, EventsError> {
        let api: Api<ShardingConfig> = match &self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let list = api.list(&ListParams::default()).await;
        Ok(list.map_err(|source| self.failed("shardingconfigs", source))?.items)
    }

    fn failed(&self, kind: &'static str, source: kube::Error) -> EventsError {
        let place = self.namespace.as_ref().map(|namespace| format!("namespace {namespace:?}"));
        EventsError::Read { kind, place: place.unwrap_or_else(|| "all namespaces".to_owned()), source }
    }
}

/// The names of the root, and of the shards that it made.
fn related(root: &str, configs: &[ShardingConfig]) -> BTreeSet<String> {
    let roots = configs.iter().filter(|config| config.name_any() == root);
    let made = roots.flat_map(|root| configs.iter().filter(|config| is_made_by(root, config)));
    made.map(ShardingConfig::name_any).chain([root.to_owned()]).collect()
}
