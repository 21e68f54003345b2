//! Remembers admitted pods until the watch shows them.
//!
//! The watch lags behind admission. Without this, pods of a Deployment that are created together would all get the
//! shard that lacked one, and be moved later.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ctrlmesh_common::names::label;

use crate::rules::pod::{Member, PodName};
use crate::rules::shared::Shared;

/// One that another webhook refused is never seen.
const SEEN_WITHIN: Duration = Duration::from_secs(5);

/// Remembered pods. More come together only where shards have several pods each, and then no shard is empty for long.
const MAX: usize = 256;

#[derive(Debug, Default)]
pub struct RecentPods {
    pods: Vec<AdmittedPod>,
    number: u64,
}

#[derive(Debug)]
struct AdmittedPod {
    at: Instant,
    pod: Member,
    /// Pods of the same owner that existed before: the new pod is none of these.
    before: BTreeSet<PodName>,
}

impl RecentPods {
    /// Those that are not among `members`, the known pods at `now`.
    pub(super) fn unseen(&mut self, members: &[Shared<Member>], now: Instant) -> Vec<Shared<Member>> {
        let mut seen = BTreeSet::new();
        self.pods.retain(|admitted| {
            let found = members.iter().find(|member| {
                is_kin(member, &admitted.pod)
                    && member.labelled_shard() == admitted.pod.labelled_shard()
                    && !admitted.before.contains(&member.name)
                    && !seen.contains(&member.name)
            });
            seen.extend(found.map(|member| member.name.clone()));
            found.is_none() && now.saturating_duration_since(admitted.at) < SEEN_WITHIN
        });
        self.pods.iter().map(|admitted| admitted.pod.clone().into()).collect()
    }

    /// Whether all of them must have been seen by `now`.
    pub fn is_over(&self, now: Instant) -> bool {
        self.pods.iter().all(|admitted| now.saturating_duration_since(admitted.at) >= SEEN_WITHIN)
    }

    /// Remembers that `pod`, which may have no name yet, got `shard` beside `members`.
    pub(super) fn admitted(&mut self, pod: &Member, shard: &str, members: &[Shared<Member>], now: Instant) {
        if self.pods.len() >= MAX {
            self.pods.remove(0);
        }
        let mut pod = pod.clone();
        pod.labels.insert(label::SHARDING_CONFIG_INJECTED.to_owned(), shard.to_owned());
        // No pod can have this name. Without it, unnamed pods would count as one.
        self.number += 1;
        pod.name.name = format!("admitted/{}", self.number);
        let kin = members.iter().filter(|member| is_kin(member, &pod));
        let before = kin.map(|member| member.name.clone()).collect();
        self.pods.push(AdmittedPod { at: now, pod, before });
    }
}

/// Whether both have the same owner.
fn is_kin(one: &Member, other: &Member) -> bool {
    one.name.namespace == other.name.namespace && one.owner.is_some() && one.owner == other.owner
}
