//! Which pods were admitted a moment ago, and are not seen yet?
//!
//! What is known of the cluster lags behind what was admitted. Pods of a Deployment that are made together would all be
//! given the shard that the first of them lacked, and be moved once they work.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ctrlmesh_common::names::label;

use crate::rules::pod::{Member, PodName};

/// How long an admitted pod may take to be seen. One that another webhook refused never is.
const SEEN_WITHIN: Duration = Duration::from_secs(5);

/// Most pods that are remembered; more come together only where shards have several pods each, of which none is empty
/// for long.
const MAX: usize = 256;

/// The pods that were admitted a moment ago.
#[derive(Debug, Default)]
pub struct Recent {
    seats: Vec<Seat>,
    /// How many there have been.
    number: u64,
}

/// A pod that was admitted.
#[derive(Debug)]
struct Seat {
    at: Instant,
    pod: Member,
    /// The pods of the same owner that were there: it is none of them.
    before: BTreeSet<PodName>,
}

// === impl Recent ===

impl Recent {
    /// Those of them that are not among `members`, which are what is known at `now`.
    pub(super) fn unseen(&mut self, members: &[Member], now: Instant) -> Vec<Member> {
        let mut seen = BTreeSet::new();
        self.seats.retain(|seat| {
            let found = members.iter().find(|member| {
                is_kin(member, &seat.pod)
                    && member.recorded() == seat.pod.recorded()
                    && !seat.before.contains(&member.name)
                    && !seen.contains(&member.name)
            });
            seen.extend(found.map(|member| member.name.clone()));
            found.is_none() && now.saturating_duration_since(seat.at) < SEEN_WITHIN
        });
        self.seats.iter().map(|seat| seat.pod.clone()).collect()
    }

    /// Whether all of them must have been seen at `now`.
    pub fn is_over(&self, now: Instant) -> bool {
        self.seats.iter().all(|seat| now.saturating_duration_since(seat.at) >= SEEN_WITHIN)
    }

    /// Remembers that `pod`, which may have no name yet, was given `shard` beside `members`.
    pub(super) fn admitted(&mut self, pod: &Member, shard: &str, members: &[Member], now: Instant) {
        if self.seats.len() >= MAX {
            self.seats.remove(0);
        }
        let mut pod = pod.clone();
        pod.labels.insert(label::SHARDING_CONFIG_INJECTED.to_owned(), shard.to_owned());
        // No pod can be called so: those without a name would count as one.
        self.number += 1;
        pod.name.name = format!("admitted/{}", self.number);
        let kin = members.iter().filter(|member| is_kin(member, &pod));
        let before = kin.map(|member| member.name.clone()).collect();
        self.seats.push(Seat { at: now, pod, before });
    }
}

/// Whether the same makes and replaces both.
fn is_kin(one: &Member, other: &Member) -> bool {
    one.name.namespace == other.name.namespace && one.owner.is_some() && one.owner == other.owner
}
