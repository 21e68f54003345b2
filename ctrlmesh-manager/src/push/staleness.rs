//! Does this replica know what the API server knows?
//!
//! A watch may be late, or wait after a failure, and nothing tells: what was seen stays, and is old. A proxy that another
//! replica told more is not to be told by that what was before, nor that its pods are gone. So where what is known here
//! would take something from a proxy, the API server itself is asked for the pods and the ShardingConfigs in question, by
//! lists that show the newest there is; it holds once what is posted here follows from that, or from what is newer.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::is_dns_subdomain;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time;

use crate::cluster::cache::Snapshot;
use crate::cluster::plan::Plans;
use crate::push::policy_store::Subject;
use crate::rules::pod::{self, Member, PodName};

/// How long the API server may take for all of it, and how long it may take until it is asked.
const DEADLINE: Duration = Duration::from_secs(5);

/// For how many proxies it is asked at once: ten thousand that come back together are to be no flood.
const AT_ONCE: usize = 16;

/// What a proxy knows of a pod that what is posted here does not follow from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// The pod.
    pub pod: PodName,
    /// The ShardingConfigs on which it depends whether what is posted is old, as `NAMESPACE/NAME`.
    pub operators: Vec<String>,
    /// The version of its ShardingConfig that the proxy was told by, where what is posted is of an older one.
    pub newer: Option<u64>,
}

/// Asks the API server.
#[derive(Clone)]
pub struct Doubts {
    client: Client,
    own: String,
    /// From which plan follows what is posted, or did until a moment ago.
    posted: Plans,
    room: Arc<Semaphore>,
}

/// What the API server says.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    members: BTreeMap<PodName, Member>,
    /// The versions of the ShardingConfigs that were asked for; none of one that is not there.
    versions: BTreeMap<String, Option<u64>>,
}

/// The API server gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum DoubtError {
    /// It refused, or was not reached.
    #[error("ask the API server what it knows of the proxy's pods")]
    Ask(#[from] kube::Error),
    /// It took too long.
    #[error("the API server did not say within {DEADLINE:?} what it knows of the proxy's pods")]
    Late,
    /// It was not asked.
    #[error("for {DEADLINE:?} it was asked about the pods of {AT_ONCE} other proxies at once")]
    Busy,
}

/// How an answer compares with what is known here, as far as one pod is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// What follows from what is known here is no older.
    Settled,
    /// Nothing newer is known anywhere, but what its proxy was told stands in no status that is known here: it is not
    /// written yet, or is of a ShardingConfig of which nothing new can be said.
    Unwritten,
    /// This replica knows less.
    Behind,
}

// === impl Doubts ===

impl Doubts {
    /// Asks as `client`, whose namespace `own` is; `posted` is the plan that was posted last.
    pub fn new(client: Client, own: String, posted: Plans) -> Self {
        Self { client, own, posted, room: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// The plan that was posted last.
    pub fn posted(&self) -> Plans {
        self.posted.clone()
    }

    /// Asks for the enrolled pods of `subject`, and what `doubts` depend on.
    ///
    /// # Errors
    /// Where there is no answer.
    pub async fn ask(&self, subject: &Subject, doubts: &[Doubt]) -> Result<Answer, DoubtError> {
        let room = time::timeout(DEADLINE, self.room.acquire()).await;
        // It is never closed.
        let _room = room.map_err(|_elapsed| DoubtError::Busy)?;
        let answer = async {
            let mut answer = Answer { members: self.members(subject).await?, ..Answer::default() };
            for operator in doubts.iter().flat_map(|doubt| &doubt.operators) {
                if !answer.versions.contains_key(operator) {
                    let version = self.version(operator).await?;
                    answer.versions.insert(operator.clone(), version);
                }
            }
            Ok(answer)
        };
        time::timeout(DEADLINE, answer).await.map_err(|_elapsed| DoubtError::Late)?
    }

    async fn members(&self, subject: &Subject) -> kube::Result<BTreeMap<PodName, Member>> {
        let (pods, its): (Api<Pod>, _) = match subject {
            Subject::Node(node) => (Api::all(self.client.clone()), format!("spec.nodeName={node}")),
            Subject::Pod(pod, _) => (
                Api::namespaced(self.client.clone(), &pod.namespace),
                format!("metadata.name={}", pod.name),
            ),
        };
        let (labels, elsewhere) = pod::watched(&self.own);
        let these = ListParams::default().labels(&labels).fields(&format!("{its},{elsewhere}"));
        let pods = pods.list(&these).await?.items;
        Ok(pods.iter().map(Member::from).map(|member| (member.name.clone(), member)).collect())
    }

    /// The version of a ShardingConfig. What cannot be the name of one is that of none.
    async fn version(&self, operator: &str) -> kube::Result<Option<u64>> {
        let name = operator.parse::<PodName>().ok();
        let is_name =
            |one: &PodName| is_dns_subdomain(&one.namespace) && is_dns_subdomain(&one.name);
        let name = name.filter(is_name);
        let Some(PodName { namespace, name }) = name else { return Ok(None) };
        let configs: Api<ShardingConfig> = Api::namespaced(self.client.clone(), &namespace);
        let this = ListParams::default().fields(&format!("metadata.name={name}"));
        let found = configs.list_metadata(&this).await?.items;
        Ok(found.first().map(|one| version(&one.metadata)))
    }
}

// === impl Answer ===

impl Answer {
    /// Compares it with `snapshot`, for each of `doubts` about pods of `subject`.
    pub fn compare(
        &self,
        doubts: &[Doubt],
        subject: &Subject,
        snapshot: &Snapshot,
    ) -> Vec<Compared> {
        let here = Here::of(doubts, subject, snapshot);
        doubts.iter().map(|doubt| self.compare_one(doubt, &here)).collect()
    }

    fn compare_one(&self, doubt: &Doubt, here: &Here<'_>) -> Compared {
        let is_known = here.members.get(&doubt.pod).copied() == self.members.get(&doubt.pod);
        let is_as_new = |operator: &String| {
            let Some(there) = self.versions.get(operator) else { return false };
            let here = parts(operator).and_then(|parts| here.versions.get(&parts).copied());
            here.is_some() == there.is_some() && here >= *there
        };
        if !is_known || !doubt.operators.iter().all(is_as_new) {
            return Compared::Behind;
        }
        // Where all of them are older than what the proxy was told by, or gone, etcd was put back.
        let is_older = |newer: u64| {
            let there = |operator| self.versions.get(operator).copied().flatten();
            doubt.operators.iter().all(|operator| there(operator).is_none_or(|there| there < newer))
        };
        if doubt.newer.is_none_or(is_older) { Compared::Settled } else { Compared::Unwritten }
    }
}

/// What is known here of what is in doubt.
struct Here<'a> {
    members: HashMap<&'a PodName, &'a Member>,
    /// By namespace and name.
    versions: HashMap<(&'a str, &'a str), u64>,
}

impl<'a> Here<'a> {
    fn of(doubts: &'a [Doubt], subject: &Subject, snapshot: &'a Snapshot) -> Self {
        let pods: HashSet<&PodName> = doubts.iter().map(|doubt| &doubt.pod).collect();
        let is_its = |member: &&Member| match subject {
            Subject::Node(node) => member.node.as_ref() == Some(node),
            Subject::Pod(..) => true,
        };
        let members = snapshot.members.iter().filter(|one| pods.contains(&one.name));
        let members = members.filter(is_its).map(|member| (&member.name, member)).collect();
        let operators = doubts.iter().flat_map(|doubt| &doubt.operators);
        let operators: HashSet<(&str, &str)> = operators.filter_map(|one| parts(one)).collect();
        let versions = snapshot.configs.iter().filter_map(|config| {
            let meta = &config.metadata;
            let name = (meta.namespace.as_deref()?, meta.name.as_deref()?);
            operators.contains(&name).then(|| (name, version(meta)))
        });
        Self { members, versions: versions.collect() }
    }
}

/// A `NAMESPACE/NAME`.
fn parts(full_name: &str) -> Option<(&str, &str)> {
    full_name.split_once('/')
}

fn version(meta: &ObjectMeta) -> u64 {
    meta.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::ShardingConfigSpec;

    use super::*;

    fn member(uid: &str, node: &str) -> Member {
        Member {
            name: "ops/a".parse().unwrap(),
            uid: uid.to_owned(),
            node: Some(node.to_owned()),
            ..Member::default()
        }
    }

    /// What is known here: the pod, and the version of its ShardingConfig.
    fn known(member: Option<Member>, version: Option<u64>) -> Snapshot {
        let config = version.map(|version| {
            let mut config = ShardingConfig::new("op", ShardingConfigSpec::default());
            config.metadata.namespace = Some("ops".to_owned());
            config.metadata.resource_version = Some(version.to_string());
            config
        });
        Snapshot {
            configs: config.into_iter().collect(),
            members: member.into_iter().collect(),
            ..Snapshot::default()
        }
    }

    fn answer(member: Option<Member>, version: Option<u64>) -> Answer {
        Answer {
            members: member.map(|member| (member.name.clone(), member)).into_iter().collect(),
            versions: [("ops/op".to_owned(), version)].into(),
        }
    }

    fn compare(answer: &Answer, newer: Option<u64>, known: &Snapshot) -> Compared {
        let operators = vec!["ops/op".to_owned()];
        let doubt = Doubt { pod: "ops/a".parse().unwrap(), operators, newer };
        answer.compare(&[doubt], &Subject::Node("n".to_owned()), known)[0]
    }

    fn settles(answer: &Answer, newer: Option<u64>, known: &Snapshot) -> bool {
        compare(answer, newer, known) == Compared::Settled
    }

    #[test]
    fn a_pod_is_known_as_the_api_server_knows_it() {
        let (one, other) = (member("1", "n"), member("2", "n"));
        let answer = |member| answer(member, None);
        assert!(settles(&answer(None), None, &known(None, None)), "it is gone");
        assert!(!settles(&answer(Some(one.clone())), None, &known(None, None)), "not seen yet");
        assert!(settles(&answer(Some(one.clone())), None, &known(Some(one.clone()), None)));
        assert!(!settles(&answer(Some(one.clone())), None, &known(Some(other), None)), "another");
        assert!(!settles(&answer(None), None, &known(Some(one.clone()), None)), "its end, neither");
        let unbound = Member { node: None, ..one.clone() };
        assert!(!settles(&answer(Some(one)), None, &known(Some(unbound), None)), "its node");
    }

    #[test]
    fn a_sharding_config_is_known_in_no_older_version() {
        for (there, here, holds) in [
            (None, None, true),
            (Some(5), None, false),
            (None, Some(5), false),
            (Some(5), Some(4), false),
            (Some(5), Some(5), true),
            (Some(5), Some(6), true),
        ] {
            assert_eq!(
                settles(&answer(None, there), None, &known(None, here)),
                holds,
                "{there:?} {here:?}"
            );
        }
        let not_asked = Answer::default();
        assert!(!settles(&not_asked, None, &known(None, None)));
    }

    #[test]
    fn what_is_of_an_older_version_than_the_proxy_was_told_by_holds_only_where_etcd_was_put_back() {
        let known = known(None, Some(5));
        let told_by = |newer| compare(&answer(None, Some(5)), Some(newer), &known);
        assert_eq!(told_by(5), Compared::Unwritten, "its epoch is not written yet");
        assert_eq!(told_by(9), Compared::Settled);
        let later = compare(&answer(None, Some(6)), Some(9), &known);
        assert_eq!(later, Compared::Behind, "what was put back is not seen yet");
    }
}
