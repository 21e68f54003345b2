//! Does this replica know what the API server knows?
//!
//! A watch may be late, or wait after a failure, and nothing tells: what was seen stays, and is old. A proxy that another
//! replica told more is not to be told by that what was before, nor that its pods are gone. So where what is known here
//! would take something from a proxy, the API server itself is asked for the pods and the ShardingConfigs in question, by
//! lists that show the newest there is; it holds once what is posted here follows from that, or from what is newer.

use std::collections::BTreeMap;
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

use crate::board::Subject;
use crate::cache::Snapshot;
use crate::plan::Plans;
use crate::pod::{self, Member, PodName};

/// How long the API server may take for all of it.
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
        let answer = async {
            // It is never closed.
            let _room = self.room.acquire().await;
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
    /// Whether what follows from `snapshot` is no older than this answer, as far as the pod in `doubt` of `subject` is
    /// concerned, and does not lead back to before what its proxy was told.
    pub fn settles(&self, doubt: &Doubt, subject: &Subject, snapshot: &Snapshot) -> bool {
        let its = |member: &&Member| {
            let on_node = |node| member.node.as_ref() == Some(node);
            member.name == doubt.pod
                && match subject {
                    Subject::Node(node) => on_node(node),
                    Subject::Pod(..) => true,
                }
        };
        let known = snapshot.members.iter().find(its) == self.members.get(&doubt.pod);
        known
            && doubt.operators.iter().all(|operator| {
                let Some(there) = self.versions.get(operator) else { return false };
                // One that is there in the version that the proxy was told by will have a newer policy as soon as its epoch is
                // written; where it is older, etcd was put back.
                let put_back =
                    doubt.newer.is_none_or(|newer| there.is_none_or(|there| there < newer));
                let here = snapshot.configs.iter().map(|one| &one.metadata);
                let here = here.into_iter().find(|one| full_name(one) == *operator).map(version);
                put_back && here.is_some() == there.is_some() && here >= *there
            })
    }
}

fn full_name(meta: &ObjectMeta) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", part(&meta.namespace), part(&meta.name))
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

    fn settles(answer: &Answer, newer: Option<u64>, known: &Snapshot) -> bool {
        let operators = vec!["ops/op".to_owned()];
        let doubt = Doubt { pod: "ops/a".parse().unwrap(), operators, newer };
        answer.settles(&doubt, &Subject::Node("n".to_owned()), known)
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
        assert!(!settles(&answer(None, Some(5)), Some(5), &known), "its epoch is not written yet");
        assert!(settles(&answer(None, Some(5)), Some(9), &known));
    }
}
