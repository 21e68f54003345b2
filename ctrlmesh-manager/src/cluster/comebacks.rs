//! Knows which pods have come back only just, or again and again.
//!
//! What a pod lost while it was away comes back to it once it has stayed: each move costs the others work. A pod that
//! is seen for the first time is not held back. A manager that begins anew does not know how often a pod was away.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ctrlmesh_common::api::{LONGEST_SETTLE, Root, ShardingConfig};
use tokio::time::Instant;

use crate::rules::object_name::namespace;
use crate::rules::pod::Member;
use crate::rules::shared::Shared;

/// What is known of one pod.
#[derive(Clone, Copy, Debug, Default)]
struct Attendance {
    /// `None` while it does not serve.
    serves_since: Option<Instant>,
    /// How often it has stopped to serve.
    absences: u32,
}

/// The pods of elastic roots, by UID.
#[derive(Debug, Default)]
pub(super) struct Comebacks(BTreeMap<String, Attendance>);

impl Comebacks {
    /// Takes down which pods serve now. Returns the UIDs of those that serve and are held back, and when that changes
    /// by time alone.
    pub(super) fn follow(
        &mut self,
        configs: &[Shared<ShardingConfig>],
        members: &[Shared<Member>],
        now: Instant,
    ) -> (BTreeSet<String>, Option<Instant>) {
        let mut roots: BTreeMap<&str, Vec<(&Root, Duration)>> = BTreeMap::new();
        for config in configs {
            let Some(root) = &config.spec.root else { continue };
            let Some(auto) = root.auto.as_ref().filter(|auto| auto.is_elastic()) else { continue };
            roots.entry(namespace(&config.metadata)).or_default().push((root, auto.settle()));
        }
        let settle = |pod: &Member| {
            let near = roots.get(pod.name.namespace.as_str()).map_or(&[][..], Vec::as_slice);
            near.iter().find(|(root, _)| pod.is_of_target(root)).map(|(_, settle)| *settle)
        };
        let enrolled = members.iter().filter(|pod| pod.enrolled() && !pod.uid.is_empty());
        let followed: Vec<_> = enrolled.filter_map(|pod| Some((pod, settle(pod)?))).collect();
        let there: BTreeSet<&String> = followed.iter().map(|(pod, _)| &pod.uid).collect();
        self.0.retain(|uid, _| there.contains(uid));
        let (mut held, mut due) = (BTreeSet::new(), None);
        for (pod, settle) in followed {
            let attendance = self.0.entry(pod.uid.clone()).or_default();
            if let Some(until) = attendance.follow(pod.serves(), settle, now) {
                held.insert(pod.uid.clone());
                due = due.into_iter().chain([until]).min();
            }
        }
        (held, due)
    }
}

impl Attendance {
    /// Until when the pod is held back. It has to be ready for `settle` after it was away once, and for twice as long
    /// after each further time.
    fn follow(&mut self, serves: bool, settle: Duration, now: Instant) -> Option<Instant> {
        match self.serves_since {
            None if serves => self.serves_since = Some(now),
            Some(since) if !serves => {
                // It was there for as long as any has to be.
                let is_new = now.saturating_duration_since(since) >= LONGEST_SETTLE;
                self.absences = if is_new { 1 } else { self.absences.saturating_add(1) };
                self.serves_since = None;
            }
            _ => {}
        }
        let doublings = self.absences.checked_sub(1)?;
        let settle = settle.saturating_mul(1_u32.checked_shl(doublings).unwrap_or(u32::MAX)).min(LONGEST_SETTLE);
        let until = self.serves_since? + settle;
        (until > now).then_some(until)
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::read_sharding_configs;
    use ctrlmesh_common::names::label;

    use super::*;
    use crate::rules::pod::Owner;

    /// A pod of a StatefulSet.
    fn pod(set: &str, ready: bool) -> Member {
        let labels = [(label::ENABLE_PROXY.to_owned(), "true".to_owned())].into();
        let name = format!("ops/{set}-0").parse().unwrap();
        let owner = Some(Owner { kind: "StatefulSet".to_owned(), name: set.to_owned() });
        Member { name, uid: set.to_owned(), owner, ready, labels, ..Member::default() }
    }

    /// Elastic roots of the sets `a` and `b`, and of `slow` with another time, and one of `even`.
    fn roots() -> Vec<Shared<ShardingConfig>> {
        let root = |set: &str, more: &str| {
            format!(
                "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\n\
                 metadata: {{name: {set}, namespace: ops}}\n\
                 spec: {{root: {{prefix: {set}, targetStatefulSet: {set}, auto: {{shardingSize: 4{more}}}}}}}\n"
            )
        };
        let all = [
            root("a", ""),
            root("b", ""),
            root("slow", ", elastic: {settle: 2m}"),
            root("even", ", everyShardReplicas: 1"),
        ];
        read_sharding_configs(&all.join("---\n")).unwrap().into_iter().map(Shared::from).collect()
    }

    #[test]
    fn a_pod_that_comes_back_has_to_stay_longer_each_time() {
        let (mut comebacks, start) = (Comebacks::default(), Instant::now());
        let mut at = |seconds: u64, ready: bool| {
            let now = start + Duration::from_secs(seconds);
            let (held, due) = comebacks.follow(&roots(), &[pod("a", ready).into(), pod("b", true).into()], now);
            assert!(!held.contains("b") && held.is_empty() == due.is_none());
            due.map(|due| due.duration_since(start).as_secs())
        };
        assert_eq!(at(0, false), None);
        assert_eq!(at(1, true), None, "it has never been there before");
        assert_eq!(at(5, false), None);
        assert_eq!((at(6, true), at(35, true), at(36, true)), (Some(36), Some(36), None));
        assert_eq!((at(40, false), at(41, true), at(101, true)), (None, Some(101), None));
        assert_eq!((at(102, false), at(103, true)), (None, Some(223)));
        for round in 0..40 {
            assert_eq!(at(300 + 2 * round, false), None);
            at(301 + 2 * round, true);
        }
        assert_eq!(at(379, true), Some(379 + 600));
        // It stayed for as long as any has to.
        assert_eq!((at(979, true), at(980, false), at(981, true)), (None, None, Some(1011)));
    }

    #[test]
    fn another_pod_of_that_name_begins_anew() {
        let (mut comebacks, now) = (Comebacks::default(), Instant::now());
        for (uid, ready, held) in
            [("x", true, false), ("x", false, false), ("x", true, true), ("y", true, false), ("x", true, false)]
        {
            let pod = Member { uid: uid.to_owned(), ..pod("a", ready) };
            assert_eq!(!comebacks.follow(&roots(), &[pod.into()], now).0.is_empty(), held, "{uid}");
        }
    }

    #[test]
    fn a_root_says_how_long() {
        let (mut comebacks, now) = (Comebacks::default(), Instant::now());
        let mut at = |ready| comebacks.follow(&roots(), &[pod("slow", ready).into(), pod("even", ready).into()], now);
        assert_eq!([at(true).0.len(), at(false).0.len()], [0, 0]);
        assert_eq!(at(true), (["slow".to_owned()].into(), Some(now + Duration::from_mins(2))));
    }
}
