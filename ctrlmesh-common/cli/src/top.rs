//! `ctrlmesh top`: shows what pods ask the API server for, how often and how fast, by shard, pod or namespace.
//!
//! It reads the proxies' metrics through the API server, with the rights of whoever calls it.

mod args;
mod exposition;
pub(crate) mod counters;
pub(crate) mod targets;
pub(crate) mod traffic;
pub(crate) mod sample;
mod render;

use std::collections::BTreeMap;
use std::io;
use std::io::{IsTerminal as _, Write as _, stderr, stdout};

use ctrlmesh_common::api::ShardingConfig;
use kube::api::ListParams;
use kube::{Api, Client};
use serde::Serialize;
use tokio::time;

pub(crate) use self::args::Arguments;
use self::args::By;
use self::counters::PodKey;
use self::sample::{Sample, Sampler};
use self::traffic::{PodTraffic, Rates, by_namespace, grouped};
use crate::cluster::{self, ClusterError, Connection, paging};
use crate::failure;
use crate::status::overview;
use crate::status::shards::ShardOverview;
use crate::text::{self, CLEAR, Document, DocumentError, Format};

/// Kind of the document about an interval.
const KIND: &str = "Top";

/// Why traffic cannot be shown, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TopError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("read which proxies there are: {reason}")]
    Pods { reason: String },
    #[error("no proxy runs: `ctrlmesh check` says why")]
    NoProxy,
    #[error("no proxy's metrics can be read: {}", reasons.join("; "))]
    Proxies { reasons: Vec<String> },
    #[error("read shardingconfigs of namespace {namespace:?} (does `kubectl get shardingconfigs` work there?)")]
    Read { namespace: String, source: kube::Error },
    #[error(
        "there is no root or shard by hand {name:?} in namespace {namespace:?}: `ctrlmesh status -A` lists those of all namespaces"
    )]
    NoSuchConfig { name: String, namespace: String },
    #[error("--interval: must be longer than 0s")]
    NoInterval,
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

/// What one interval comes to.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Top {
    /// For how long requests were counted.
    seconds: f64,
    rows: Vec<Row>,
    /// Proxies whose metrics were not read, with the reason.
    not_read: Vec<String>,
}

/// One row of a table. What it is about decides which names there are.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    /// Of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    /// Of the objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    object_namespace: Option<String>,
    #[serde(flatten)]
    rates: Rates,
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), TopError> {
    if arguments.interval.is_zero() {
        return Err(TopError::NoInterval);
    }
    cluster::block_on(show(arguments))
}

async fn show(arguments: &Arguments) -> Result<(), TopError> {
    let Connection { client, namespace, .. } = Connection::of(&arguments.cluster).await?;
    let mut shown = Shown::read(&client, arguments, &namespace).await?;
    let mut sampler = Sampler::open(client.clone()).await?;
    loop {
        time::sleep(arguments.interval).await;
        match sampler.next().await {
            Ok(sample) => print(arguments, &shown, sample)?,
            Err(error) if !arguments.watch => return Err(error),
            // The API server may be away for a while.
            Err(error) => writeln!(stderr(), "{}", failure::causes(&error))?,
        }
        if !arguments.watch {
            return Ok(());
        }
        shown = Shown::read(&client, arguments, &namespace).await.unwrap_or(shown);
    }
}

/// Which pods are shown.
struct Shown {
    /// `None`: pods of all namespaces.
    namespace: Option<String>,
    /// By pod of the root, its shard. `None`: no root is named.
    shards: Option<BTreeMap<String, String>>,
}

impl Shown {
    async fn read(client: &Client, arguments: &Arguments, namespace: &str) -> Result<Self, TopError> {
        let place = (!arguments.all_namespaces).then(|| namespace.to_owned());
        let Some(name) = &arguments.root else { return Ok(Self { namespace: place, shards: None }) };
        let namespace = namespace.to_owned();
        let api: Api<ShardingConfig> = Api::namespaced(client.clone(), &namespace);
        let configs = match paging::list(&api, ListParams::default()).await {
            Ok(configs) => configs,
            Err(source) => return Err(TopError::Read { namespace, source }),
        };
        let overviews = overview::overviews(&configs, &[]);
        let root = overviews.into_iter().find(|one| one.name == *name);
        let root = root.ok_or_else(|| TopError::NoSuchConfig { name: name.clone(), namespace })?;
        let pods = |shard: ShardOverview| {
            shard.pods.into_iter().map(move |pod| (pod.name, shard.name.clone())).collect::<Vec<_>>()
        };
        Ok(Self { namespace: place, shards: Some(root.shards.into_iter().flat_map(pods).collect()) })
    }

    /// The pods that are shown. Where its proxy does not know it, the root says of which shard a pod is.
    fn of(&self, pods: Vec<PodTraffic>) -> Vec<PodTraffic> {
        let shown = pods.into_iter().filter_map(|mut pod| {
            let PodKey { namespace, pod: name, shard } = &mut pod.key;
            if self.namespace.as_ref().is_some_and(|one| one != namespace) {
                return None;
            }
            if let Some(shards) = &self.shards {
                shard.clone_from(shards.get(name)?);
            }
            Some(pod)
        });
        shown.collect()
    }
}

fn print(arguments: &Arguments, shown: &Shown, sample: Sample) -> Result<(), TopError> {
    let pods = shown.of(sample.pods);
    let top =
        Top { seconds: arguments.interval.as_secs_f64(), rows: rows(&pods, arguments.by), not_read: sample.not_read };
    let text = match arguments.output {
        Some(format) => text::document(format, &Document::new(KIND, &top))?,
        None => render::screen(&top, arguments.by),
    };
    let between = match arguments.output {
        None if arguments.watch && stdout().is_terminal() => CLEAR,
        Some(Format::Yaml) if arguments.watch => "---\n",
        _ => "",
    };
    write!(stdout().lock(), "{between}{text}")?;
    Ok(stdout().flush()?)
}

fn rows(pods: &[PodTraffic], by: By) -> Vec<Row> {
    let some = |name: &String| Some(name.clone());
    let mut rows: Vec<Row> = match by {
        By::Namespace => by_namespace(pods)
            .into_iter()
            .map(|(name, requests)| {
                let rates = Rates { requests, ..Rates::default() };
                Row { object_namespace: Some(name.to_owned()), rates, ..Row::default() }
            })
            .collect(),
        By::Shard => grouped(pods, |pod| (pod.key.namespace.clone(), pod.key.shard.clone()))
            .into_iter()
            .map(|((namespace, shard), pods)| Row {
                namespace: Some(namespace),
                shard: Some(shard),
                rates: Rates::of(pods),
                ..Row::default()
            })
            .collect(),
        By::Pod => pods
            .iter()
            .map(|pod| {
                let PodKey { namespace, pod: name, shard } = &pod.key;
                let (namespace, shard, name) = (some(namespace), some(shard), some(name));
                Row { namespace, shard, pod: name, rates: Rates::of([pod]), ..Row::default() }
            })
            .collect(),
    };
    rows.sort_by(|one, other| other.rates.requests.total_cmp(&one.rates.requests));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(namespace: &str, pod: &str, shard: &str) -> PodTraffic {
        let page = format!(
            "ctrlmesh_proxy_pod_requests_total{{namespace=\"{namespace}\",pod=\"{pod}\",shard=\"{shard}\",verb=\"get\"}} 4"
        );
        let (key, counters) = counters::counters(&page).into_iter().next().unwrap();
        PodTraffic { key, counters, within: std::time::Duration::from_secs(2) }
    }

    #[test]
    fn a_root_shows_its_own_pods_under_their_shards() {
        let shards = Some(BTreeMap::from([("web-0".to_owned(), "web-1-normal".to_owned())]));
        let shown = Shown { namespace: Some("ops".to_owned()), shards };
        let pods = shown.of(vec![pod("ops", "web-0", ""), pod("ops", "other", "s"), pod("else", "web-0", "")]);
        let rows = rows(&pods, By::Pod);
        assert_eq!(rows.len(), 1, "{rows:?}");
        assert_eq!((rows[0].shard.as_deref(), rows[0].rates.requests), (Some("web-1-normal"), 2.0));
    }

    #[test]
    fn pods_of_a_shard_have_one_row() {
        let pods = [pod("ops", "a", "s"), pod("ops", "b", "s"), pod("ops", "c", "t")];
        let rows = rows(&pods, By::Shard);
        let rates: Vec<_> = rows.iter().map(|row| (row.shard.as_deref().unwrap(), row.rates.requests)).collect();
        assert_eq!(rates, [("s", 4.0), ("t", 2.0)]);
    }
}
