//! Finds out whether this replica's view of the cluster is stale.
//!
//! A watch may be late, or wait after a failure, without a sign. A stale replica must not send a proxy older policies,
//! nor remove its pods. So where the local state would take something from a proxy, the API server is asked for the
//! pods and ShardingConfigs in question. Consistent lists show the newest versions. The local state is trusted once it
//! is as new as these.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::is_dns_subdomain;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time;

use crate::cluster::cache::Snapshot;
use crate::cluster::plan::Plans;
use crate::push::policy_store::Subject;
use crate::rules::object_name::resource_version;
use crate::rules::pod::{self, Member, PodName};
use crate::rules::shared::each;

/// For all requests of one question, and for the wait before it.
const DEADLINE: Duration = Duration::from_secs(5);

/// Concurrent questions, so that ten thousand reconnecting proxies do not flood the API server.
const AT_ONCE: usize = 16;

/// A pod of which a proxy may have a newer policy than this replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaleCandidate {
    pub pod: PodName,
    /// ShardingConfigs that decide whether the local policy is stale, as `NAMESPACE/NAME`.
    pub operators: Vec<String>,
    /// Version of the ShardingConfig that the proxy has, where the local one is older.
    pub newer: Option<u64>,
}

#[derive(Clone)]
pub struct StalenessCheck {
    client: Client,
    own: String,
    /// The plan of the stored policies; for a moment, it may be an older one.
    published: Plans,
    room: Arc<Semaphore>,
}

#[derive(Clone, Debug, Default)]
pub struct ServerState {
    members: BTreeMap<PodName, Member>,
    /// resourceVersions of ShardingConfigs; none for one that does not exist.
    versions: BTreeMap<String, Option<u64>>,
}

#[derive(Debug, thiserror::Error)]
pub enum StalenessError {
    #[error("ask the API server what it knows of the proxy's pods")]
    Ask(#[from] kube::Error),
    #[error("the API server did not say within {DEADLINE:?} what it knows of the proxy's pods")]
    Late,
    /// Too many other questions are under way.
    #[error("for {DEADLINE:?} it was asked about the pods of {AT_ONCE} other proxies at once")]
    Busy,
}

/// How the local state of one pod compares with the API server's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Staleness {
    /// The local state is no older.
    UpToDate,
    /// The local state is the newest, but the policy that the proxy has is in no known status. It is not written yet,
    /// or its ShardingConfig cannot be compiled now.
    Unwritten,
    Behind,
}

impl StalenessCheck {
    /// `own` is the manager's namespace, `published` the plan of the stored policies.
    pub fn new(client: Client, own: String, published: Plans) -> Self {
        Self { client, own, published, room: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// The plan of the stored policies.
    pub fn published(&self) -> Plans {
        self.published.clone()
    }

    /// Asks for the enrolled pods of `subject`, and for the ShardingConfigs of `candidates`.
    ///
    /// # Errors
    /// Where there is no answer.
    pub async fn ask(&self, subject: &Subject, candidates: &[StaleCandidate]) -> Result<ServerState, StalenessError> {
        let answer = async {
            let mut answer = ServerState { members: self.members(subject).await?, ..ServerState::default() };
            for operator in candidates.iter().flat_map(|candidate| &candidate.operators) {
                if !answer.versions.contains_key(operator) {
                    let version = self.version(operator).await?;
                    answer.versions.insert(operator.clone(), version);
                }
            }
            Ok(answer)
        };
        self.in_turn(Box::pin(answer)).await
    }

    /// The newest resourceVersion of one ShardingConfig; none where it does not exist.
    ///
    /// # Errors
    /// Where there is no answer.
    pub async fn newest(&self, operator: &str) -> Result<Option<u64>, StalenessError> {
        self.in_turn(Box::pin(self.version(operator))).await
    }

    /// Waits for a place, and then for the answer.
    async fn in_turn<T>(&self, answer: impl Future<Output = kube::Result<T>>) -> Result<T, StalenessError> {
        let room = time::timeout(DEADLINE, self.room.acquire()).await;
        // It is never closed.
        let _room = room.map_err(|_elapsed| StalenessError::Busy)?;
        let answer = time::timeout(DEADLINE, answer).await;
        Ok(answer.map_err(|_elapsed| StalenessError::Late)??)
    }

    async fn members(&self, subject: &Subject) -> kube::Result<BTreeMap<PodName, Member>> {
        let (pods, its): (Api<Pod>, _) = match subject {
            Subject::Node(node) => (Api::all(self.client.clone()), format!("spec.nodeName={node}")),
            Subject::Pod(pod, _) => {
                (Api::namespaced(self.client.clone(), &pod.namespace), format!("metadata.name={}", pod.name))
            }
        };
        let (labels, elsewhere) = pod::watch_selectors(&self.own);
        let these = ListParams::default().labels(&labels).fields(&format!("{its},{elsewhere}"));
        let pods = pods.list(&these).await?.items;
        Ok(pods.iter().map(Member::from).map(|member| (member.name.clone(), member)).collect())
    }

    /// resourceVersion of a ShardingConfig; none for an impossible name.
    async fn version(&self, operator: &str) -> kube::Result<Option<u64>> {
        let name = operator.parse::<PodName>().ok();
        let is_name = |one: &PodName| is_dns_subdomain(&one.namespace) && is_dns_subdomain(&one.name);
        let name = name.filter(is_name);
        let Some(PodName { namespace, name }) = name else { return Ok(None) };
        let configs: Api<ShardingConfig> = Api::namespaced(self.client.clone(), &namespace);
        let this = ListParams::default().fields(&format!("metadata.name={name}"));
        let found = configs.list_metadata(&this).await?.items;
        Ok(found.first().map(|one| resource_version(&one.metadata)))
    }
}

impl ServerState {
    /// Compares it with `snapshot`, for each of the `candidates` among the pods of `subject`.
    pub fn compare(&self, candidates: &[StaleCandidate], subject: &Subject, snapshot: &Snapshot) -> Vec<Staleness> {
        let here = LocalState::of(candidates, subject, snapshot);
        candidates.iter().map(|candidate| self.compare_one(candidate, &here)).collect()
    }

    fn compare_one(&self, candidate: &StaleCandidate, here: &LocalState<'_>) -> Staleness {
        let is_known = match (here.members.get(&candidate.pod), self.members.get(&candidate.pod)) {
            // Whether it is ready, proxies know sooner than the API server.
            (Some(here), Some(there)) => Member { ready: there.ready, ..(*here).clone() } == *there,
            (here, there) => here.is_none() && there.is_none(),
        };
        let is_as_new = |operator: &String| {
            let Some(there) = self.versions.get(operator) else { return false };
            let here = parts(operator).and_then(|parts| here.versions.get(&parts).copied());
            here.is_some() == there.is_some() && here >= *there
        };
        if !is_known || !candidate.operators.iter().all(is_as_new) {
            return Staleness::Behind;
        }
        // If all versions are older than the proxy's, or gone, etcd was restored from a backup.
        let is_older = |newer: u64| {
            let there = |operator| self.versions.get(operator).copied().flatten();
            candidate.operators.iter().all(|operator| there(operator).is_none_or(|there| there < newer))
        };
        if candidate.newer.is_none_or(is_older) { Staleness::UpToDate } else { Staleness::Unwritten }
    }
}

/// The local state of the pods and ShardingConfigs in question.
struct LocalState<'a> {
    members: HashMap<&'a PodName, &'a Member>,
    /// By namespace and name.
    versions: HashMap<(&'a str, &'a str), u64>,
}

impl<'a> LocalState<'a> {
    fn of(candidates: &'a [StaleCandidate], subject: &Subject, snapshot: &'a Snapshot) -> Self {
        let pods: HashSet<&PodName> = candidates.iter().map(|candidate| &candidate.pod).collect();
        let is_its = |member: &&Member| match subject {
            Subject::Node(node) => member.node.as_ref() == Some(node),
            Subject::Pod(..) => true,
        };
        let members = each(&snapshot.members).filter(|one| pods.contains(&one.name));
        let members = members.filter(is_its).map(|member| (&member.name, member)).collect();
        let operators = candidates.iter().flat_map(|candidate| &candidate.operators);
        let operators: HashSet<(&str, &str)> = operators.filter_map(|one| parts(one)).collect();
        let versions = snapshot.configs.iter().filter_map(|config| {
            let meta = &config.metadata;
            let name = (meta.namespace.as_deref()?, meta.name.as_deref()?);
            operators.contains(&name).then(|| (name, resource_version(meta)))
        });
        Self { members, versions: versions.collect() }
    }
}

/// Splits `NAMESPACE/NAME`.
fn parts(full_name: &str) -> Option<(&str, &str)> {
    full_name.split_once('/')
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::ShardingConfigSpec;

    use super::*;
    use crate::rules::shared::Shared;

    fn member(uid: &str, node: &str) -> Member {
        Member { name: "ops/a".parse().unwrap(), uid: uid.to_owned(), node: Some(node.to_owned()), ..Member::default() }
    }

    /// The local state: a pod, and the version of its ShardingConfig.
    fn known(member: Option<Member>, version: Option<u64>) -> Snapshot {
        let config = version.map(|version| {
            let mut config = ShardingConfig::new("op", ShardingConfigSpec::default());
            config.metadata.namespace = Some("ops".to_owned());
            config.metadata.resource_version = Some(version.to_string());
            config
        });
        let (configs, members) = (config.map(Shared::from), member.map(Shared::from));
        Snapshot { configs: Vec::from_iter(configs), members: Vec::from_iter(members), ..Snapshot::default() }
    }

    fn answer(member: Option<Member>, version: Option<u64>) -> ServerState {
        ServerState {
            members: member.map(|member| (member.name.clone(), member)).into_iter().collect(),
            versions: [("ops/op".to_owned(), version)].into(),
        }
    }

    fn compare(answer: &ServerState, newer: Option<u64>, known: &Snapshot) -> Staleness {
        let operators = vec!["ops/op".to_owned()];
        let candidate = StaleCandidate { pod: "ops/a".parse().unwrap(), operators, newer };
        answer.compare(&[candidate], &Subject::Node("n".to_owned()), known)[0]
    }

    fn settles(answer: &ServerState, newer: Option<u64>, known: &Snapshot) -> bool {
        compare(answer, newer, known) == Staleness::UpToDate
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
            assert_eq!(settles(&answer(None, there), None, &known(None, here)), holds, "{there:?} {here:?}");
        }
        let not_asked = ServerState::default();
        assert!(!settles(&not_asked, None, &known(None, None)));
    }

    #[test]
    fn an_older_version_holds_only_after_etcd_was_restored() {
        let known = known(None, Some(5));
        let proxy_has = |newer| compare(&answer(None, Some(5)), Some(newer), &known);
        assert_eq!(proxy_has(5), Staleness::Unwritten, "its epoch is not written yet");
        assert_eq!(proxy_has(9), Staleness::UpToDate);
        let later = compare(&answer(None, Some(6)), Some(9), &known);
        assert_eq!(later, Staleness::Behind, "what was put back is not seen yet");
    }
}
