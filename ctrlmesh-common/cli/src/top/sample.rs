//! Reads the metrics of all proxies through the API server, twice, and takes the difference.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::names::port;
use ctrlmesh_manager::install::rbac;
use http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::TopError;
use super::counters::{Counters, PodKey, counters};
use super::targets::{Target, targets};
use super::traffic::PodTraffic;
use crate::cluster::answer::{self, Unanswered};
use crate::version::part::{NODE_PROXIES, enrolled};

/// Proxies that are asked at once.
const AT_ONCE: usize = 16;

/// What proxies counted within one interval.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) pods: Vec<PodTraffic>,
    /// Proxies whose metrics were not read, with the reason.
    pub(crate) not_read: Vec<String>,
}

/// Compares what proxies have counted with what they had counted before.
pub(crate) struct Sampler {
    client: Client,
    before: Pages,
}

/// When a page was read, and what it says; or why not.
type Pages = BTreeMap<Target, Result<(Instant, BTreeMap<PodKey, Counters>), Unanswered>>;

impl Sampler {
    /// Reads what has been counted up to now.
    ///
    /// # Errors
    /// The pods cannot be listed, or no proxy can be read.
    pub(crate) async fn open(client: Client) -> Result<Self, TopError> {
        let before = pages(&client).await?;
        Ok(Self { client, before })
    }

    /// What has been counted since the last call. Proxies that have come since count from the next call on.
    ///
    /// # Errors
    /// As above.
    pub(crate) async fn next(&mut self) -> Result<Sample, TopError> {
        let now = pages(&self.client).await?;
        let mut sample = Sample::default();
        for (target, page) in &now {
            match (page, self.before.get(target)) {
                (Err(why), _) => sample.not_read.push(format!("{}/{}: {}", target.namespace, target.pod, reason(why))),
                (Ok((at, pods)), Some(Ok((then, before)))) => {
                    let nothing = Counters::default();
                    let traffic = pods.iter().map(|(key, counters)| PodTraffic {
                        key: key.clone(),
                        counters: counters.since(before.get(key).unwrap_or(&nothing)),
                        within: *at - *then,
                    });
                    sample.pods.extend(traffic);
                }
                (Ok(_), _) => {}
            }
        }
        self.before = now;
        Ok(sample)
    }
}

async fn pages(client: &Client) -> Result<Pages, TopError> {
    let read = |why: Unanswered| TopError::Pods { reason: reason(&why) };
    let proxies = answer::list::<Pod>(client, rbac::NAMESPACE, NODE_PROXIES).await.map_err(read)?;
    let enrolled = answer::list_all::<Pod>(client, &enrolled()).await.map_err(read)?;
    let mut left = targets(&proxies, &enrolled);
    let (mut asked, mut pages) = (JoinSet::new(), Pages::new());
    loop {
        while asked.len() < AT_ONCE
            && let Some(target) = left.pop()
        {
            asked.spawn(page(client.clone(), target));
        }
        match asked.join_next().await {
            Some(Ok((target, page))) => drop(pages.insert(target, page)),
            Some(Err(panicked)) => return Err(TopError::Pods { reason: panicked.to_string() }),
            None => break,
        }
    }
    if pages.values().any(Result::is_ok) {
        return Ok(pages);
    }
    let reasons: BTreeSet<String> = pages.values().filter_map(|page| page.as_ref().err().map(reason)).collect();
    Err(if reasons.is_empty() {
        TopError::NoProxy
    } else {
        TopError::Proxies { reasons: reasons.into_iter().collect() }
    })
}

type Page = Result<(Instant, BTreeMap<PodKey, Counters>), Unanswered>;

async fn page(client: Client, target: Target) -> (Target, Page) {
    let Target { namespace, pod, is_sidecar } = &target;
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{}/proxy/metrics", port::PROXY_ADMIN);
    let right = format!("get pods/proxy in namespace {namespace}");
    let request = Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError);
    let answer = match request {
        Ok(request) => client.request_text(request).await,
        Err(error) => Err(error),
    };
    let page = answer.map_err(|error| Unanswered::of(&right, &error)).map(|text| {
        let mut pods = counters(&text);
        if *is_sidecar {
            pods = pods.into_iter().map(|(key, counters)| (named(key, namespace, pod), counters)).collect();
        }
        (Instant::now(), pods)
    });
    (target, page)
}

/// A sidecar may not know the name of its pod.
fn named(key: PodKey, namespace: &str, pod: &str) -> PodKey {
    PodKey { namespace: namespace.to_owned(), pod: pod.to_owned(), shard: key.shard }
}

fn reason(why: &Unanswered) -> String {
    match why {
        Unanswered::Forbidden { right } => format!("you may not {right}"),
        Unanswered::Failed { request, error } => format!("{request}: {error}"),
    }
}
