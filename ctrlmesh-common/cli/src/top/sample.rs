//! Reads the metrics of all proxies through the API server, twice, and takes the difference.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ctrlmesh_common::names::port;
use ctrlmesh_manager::install::rbac;
use futures::AsyncReadExt as _;
use http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use tokio::task::JoinSet;
use tokio::time::{self, Instant};

use super::TopError;
use super::counters::{Counters, PodKey, counters};
use super::targets::{Target, targets};
use super::traffic::PodTraffic;
use crate::cluster::answer::{self, Unanswered};
use crate::version::part::{NODE_PROXIES, enrolled};

/// Proxies that are asked at once.
const AT_ONCE: usize = 16;

/// Limit for one page. That of a node with 100 busy pods has about 20 MB.
const PAGE_BYTES: u64 = 64 << 20;

/// Limit for the time until one page is read.
const ANSWER: Duration = Duration::from_secs(30);

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

impl Sample {
    /// What proxies count within this time.
    ///
    /// # Errors
    /// As of [`Sampler`].
    pub(crate) async fn within(client: &Client, duration: Duration) -> Result<Self, TopError> {
        let mut sampler = Sampler::open(client.clone()).await?;
        time::sleep(duration).await;
        sampler.next().await
    }
}

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
                (Err(why), _) => sample.not_read.push(format!("{}/{}: {why}", target.namespace, target.pod)),
                (Ok((at, pods)), Some(Ok((then, before)))) => {
                    sample.pods.extend(pods.iter().map(|(key, counters)| PodTraffic {
                        key: key.clone(),
                        counters: counters.since(&counted(before, key)),
                        within: *at - *then,
                    }));
                }
                (Ok(_), _) => {
                    let Target { namespace, pod, .. } = target;
                    sample
                        .not_read
                        .push(format!("{namespace}/{pod}: it was not there before, and is counted from now on"));
                }
            }
        }
        self.before = now;
        Ok(sample)
    }
}

/// What had been counted of a pod. A pod that has got another shard goes on counting under the name of that one.
fn counted(before: &BTreeMap<PodKey, Counters>, key: &PodKey) -> Counters {
    let is_it = |(one, _): &(&PodKey, &Counters)| one.namespace == key.namespace && one.pod == key.pod;
    before.get(key).or_else(|| before.iter().find(is_it).map(|(_, counters)| counters)).cloned().unwrap_or_default()
}

async fn pages(client: &Client) -> Result<Pages, TopError> {
    let read = |why: Unanswered| TopError::Pods { reason: why.to_string() };
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
    let reasons: BTreeSet<String> =
        pages.values().filter_map(|page| page.as_ref().err().map(ToString::to_string)).collect();
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
        Ok(request) => text(&client, request, &right).await,
        Err(error) => Err(Unanswered::of(&right, &error)),
    };
    let page = answer.map(|text| {
        let mut pods = counters(&text);
        if *is_sidecar {
            pods = pods.into_iter().map(|(key, counters)| (named(key, namespace, pod), counters)).collect();
        }
        (Instant::now(), pods)
    });
    (target, page)
}

/// The beginning of an answer, which is all of it unless somebody else answers in the place of a proxy.
async fn text(client: &Client, request: Request<Vec<u8>>, right: &str) -> Result<String, Unanswered> {
    let failed = |error: String| Unanswered::Failed { request: right.to_owned(), error };
    let read = async {
        let stream = client.request_stream(request).await.map_err(|error| Unanswered::of(right, &error))?;
        let mut text = String::new();
        let read = stream.take(PAGE_BYTES).read_to_string(&mut text).await;
        read.map(|_| text).map_err(|error| failed(error.to_string()))
    };
    time::timeout(ANSWER, read).await.unwrap_or_else(|_late| Err(failed("no whole answer in time".to_owned())))
}

/// A sidecar may not know the name of its pod.
fn named(key: PodKey, namespace: &str, pod: &str) -> PodKey {
    PodKey { namespace: namespace.to_owned(), pod: pod.to_owned(), shard: key.shard }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_changes_its_shard_is_not_counted_anew() {
        let key = |pod: &str, shard: &str| PodKey {
            namespace: "ops".to_owned(),
            pod: pod.to_owned(),
            shard: shard.to_owned(),
        };
        let counters = Counters { requests: 7.0, ..Counters::default() };
        let before = BTreeMap::from([(key("a", "one"), counters.clone())]);
        assert_eq!(counted(&before, &key("a", "two")), counters);
        assert_eq!(counted(&before, &key("b", "one")), Counters::default());
    }
}
