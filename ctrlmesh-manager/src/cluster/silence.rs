//! Knows which nodes are silent: the proxies of all their pods have been away for a while. It does while this replica
//! leads.
//!
//! kube-controller-manager says so of a node after 50 s by default, and ends its pods 5 minutes later. Here it costs
//! less to be wrong: the shares of a silent node's pods move, and come back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::{self, Instant};
use tracing::{info, warn};

use crate::cluster::plan::Plans;
use crate::leader::lease::Leadership;
use crate::rules::pod::Member;
use crate::rules::shared::Shared;

/// How long proxies have to be away: at least for as long as it takes until all are known to be away that are cut off
/// at once. One that lost its manager tries others within that.
const AWAY_FOR: Duration = Duration::from_secs(10);

/// Who begins to lead waits for so long: the other replicas tell it first of whom they have heard.
const LEARNS_FOR: Duration = Duration::from_secs(30);

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// Where more than so many percent of the nodes are away, the managers are cut off rather than they. From
/// kube-controller-manager, `--unhealthy-zone-threshold`.
const MOST_PERCENT: usize = 55;

/// What is known of the proxy of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyContact {
    Connected,
    /// It has left the replica that it was connected to.
    Left,
    /// The leader does not hear the replica any more that it was connected to. It may still be.
    Lost,
}

/// Gives `take` the UIDs of all pods on silent nodes, again and again.
pub struct SilenceFollower<Contacts, Take> {
    pub plans: Plans,
    /// By the UID of the pod.
    pub contacts: Contacts,
    pub take: Take,
    pub leadership: Leadership,
}

/// Which proxies are away, and which nodes are silent.
#[derive(Debug, Default)]
struct Absences {
    /// By the UID of the pod.
    left_at: BTreeMap<String, Instant>,
    silent: BTreeSet<String>,
    are_too_many: bool,
}

/// The pods of one node, and what is known of those of which something was ever heard.
#[derive(Debug, Default)]
struct NodePods<'a> {
    uids: BTreeSet<&'a str>,
    heard: usize,
    connected: usize,
    left_for_long: usize,
}

impl NodePods<'_> {
    fn is_away(&self) -> bool {
        self.heard > 0 && self.connected == 0
    }

    fn is_away_for_long(&self) -> bool {
        self.is_away() && self.left_for_long == self.heard
    }
}

impl<Contacts, Take> SilenceFollower<Contacts, Take>
where
    Contacts: Fn() -> BTreeMap<String, ProxyContact> + Send + Sync,
    Take: Fn(BTreeSet<String>) + Send + Sync,
{
    pub async fn run(self) {
        let unknown = || (self.take)(BTreeSet::new());
        self.leadership.clone().while_held(|| self.lead(), unknown).await;
    }

    async fn lead(&self) {
        time::sleep(LEARNS_FOR).await;
        let mut absences = Absences::default();
        let mut ticks = time::interval(PERIOD);
        ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let plan = self.plans.borrow().clone();
            let Some(plan) = plan else { continue };
            let silent = absences.follow(&plan.snapshot.members, &(self.contacts)(), Instant::now());
            (self.take)(silent.into_iter().map(str::to_owned).collect());
        }
    }
}

impl Absences {
    /// The pods of silent nodes.
    fn follow<'a>(
        &mut self,
        members: &'a [Shared<Member>],
        contacts: &BTreeMap<String, ProxyContact>,
        now: Instant,
    ) -> BTreeSet<&'a str> {
        self.left_at.retain(|uid, _| contacts.get(uid) == Some(&ProxyContact::Left));
        let mut nodes = BTreeMap::<&str, NodePods<'_>>::new();
        for pod in members.iter().filter(|pod| pod.enrolled() && !pod.terminating) {
            let Some(node) = &pod.node else { continue };
            let pods = nodes.entry(node).or_default();
            pods.uids.insert(&pod.uid);
            let Some(contact) = contacts.get(&pod.uid) else { continue };
            pods.heard += 1;
            match contact {
                ProxyContact::Connected => pods.connected += 1,
                ProxyContact::Left => {
                    let since = *self.left_at.entry(pod.uid.clone()).or_insert(now);
                    pods.left_for_long += usize::from(now.saturating_duration_since(since) >= AWAY_FOR);
                }
                ProxyContact::Lost => {}
            }
        }
        self.decide(&nodes);
        let silent = nodes.into_iter().filter(|(node, _)| self.silent.contains(*node));
        silent.flat_map(|(_, pods)| pods.uids).collect()
    }

    /// Where too many are away, those that were silent before stay so, and no other one becomes so.
    fn decide(&mut self, nodes: &BTreeMap<&str, NodePods<'_>>) {
        let heard = nodes.values().filter(|pods| pods.heard > 0).count();
        let away = nodes.values().filter(|pods| pods.is_away()).count();
        let are_too_many = away * 100 > heard * MOST_PERCENT;
        if are_too_many && !self.are_too_many {
            warn!(away, heard, "too many nodes are away: no other one counts as silent");
        }
        self.are_too_many = are_too_many;
        let for_long = nodes.iter().filter(|(_, pods)| pods.is_away_for_long()).map(|(node, _)| *node);
        let silent = for_long.filter(|node| !are_too_many || self.silent.contains(*node)).map(str::to_owned).collect();
        for node in BTreeSet::difference(&silent, &self.silent) {
            warn!(node, "this node is silent: its pods count as away");
        }
        for node in self.silent.difference(&silent) {
            info!(node, "this node is not silent any more");
        }
        self.silent = silent;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ctrlmesh_common::names::label;
    use tokio::sync::watch;

    use super::*;
    use crate::cluster::cache::Snapshot;
    use crate::cluster::plan::Plan;
    use crate::drain::Drain;

    const HERE: ProxyContact = ProxyContact::Connected;
    const LEFT: ProxyContact = ProxyContact::Left;
    const LOST: ProxyContact = ProxyContact::Lost;

    fn pod(uid: &str, node: &str) -> Member {
        let labels = [(label::ENABLE_PROXY.to_owned(), "true".to_owned())].into();
        let name = format!("ops/{uid}").parse().unwrap();
        Member { name, uid: uid.to_owned(), node: Some(node.to_owned()), labels, ready: true, ..Member::default() }
    }

    /// Two nodes: one with the pods `a` and `b`, and one with `c`.
    struct Case {
        members: Vec<Shared<Member>>,
        absences: Absences,
        start: Instant,
    }

    impl Case {
        fn new() -> Self {
            Self::of(vec![pod("a", "one"), pod("b", "one"), pod("c", "two")])
        }

        fn of(members: Vec<Member>) -> Self {
            let members = members.into_iter().map(Shared::from).collect();
            Self { members, absences: Absences::default(), start: Instant::now() }
        }

        /// The contacts are those of the first pods.
        fn at(&mut self, seconds: u64, contacts: &[ProxyContact]) -> Vec<&str> {
            let now = self.start + Duration::from_secs(seconds);
            let uids = self.members.iter().map(|pod| pod.uid.clone());
            let contacts = uids.zip(contacts.iter().copied()).collect();
            self.absences.follow(&self.members, &contacts, now).into_iter().collect()
        }
    }

    #[test]
    fn a_node_is_silent_once_all_its_proxies_were_away_for_long() {
        let mut case = Case::new();
        assert_eq!(case.at(0, &[HERE; 3]), [""; 0]);
        assert_eq!(case.at(1, &[LEFT, HERE, HERE]), [""; 0]);
        assert_eq!(case.at(11, &[LEFT, HERE, HERE]), [""; 0], "of the other pod one hears");
        assert_eq!(case.at(12, &[LEFT, LEFT, HERE]), [""; 0]);
        assert_eq!(case.at(21, &[LEFT, LEFT, HERE]), [""; 0]);
        assert_eq!(case.at(22, &[LEFT, LEFT, HERE]), ["a", "b"]);
        assert_eq!(case.at(23, &[LEFT, HERE, HERE]), [""; 0], "it is there again");
        assert_eq!(case.at(24, &[LEFT, LEFT, HERE]), [""; 0]);
        assert_eq!(case.at(34, &[LEFT, LEFT, HERE]), ["a", "b"]);
    }

    #[test]
    fn proxies_of_a_replica_that_is_not_heard_may_be_connected() {
        let mut case = Case::new();
        for seconds in [0, 60] {
            assert_eq!(case.at(seconds, &[HERE, HERE, LOST]), [""; 0]);
            assert_eq!(case.at(seconds + 1, &[LEFT, LOST, HERE]), [""; 0]);
        }
        assert_eq!(case.at(62, &[LEFT, LEFT, HERE]), [""; 0], "of one it is known only now");
        assert_eq!(case.at(72, &[LEFT, LEFT, HERE]), ["a", "b"]);
    }

    #[test]
    fn where_most_nodes_are_away_no_other_one_becomes_silent() {
        let mut case = Case::new();
        assert_eq!(case.at(0, &[LEFT; 3]), [""; 0]);
        assert_eq!(case.at(60, &[LEFT; 3]), [""; 0]);
        assert_eq!(case.at(61, &[HERE, HERE, LEFT]), ["c"], "it was away all the time");
        assert_eq!(case.at(62, &[LEFT, LEFT, LEFT]), ["c"], "it was silent before");
        assert_eq!(case.at(90, &[LEFT, LEFT, LEFT]), ["c"]);
        assert_eq!(case.at(91, &[LEFT, LEFT, HERE]), ["a", "b"]);
    }

    #[test]
    fn nodes_that_are_away_only_just_count_as_away() {
        for (away, all, silent) in [(5, 9, 0), (6, 11, 1), (11, 20, 1)] {
            let mut case = Case::of((0..all).map(|at| pod(&format!("pod-{at:02}"), &format!("node-{at}"))).collect());
            let contacts = |away: usize| [vec![LEFT; away], vec![HERE; all - away]].concat();
            assert_eq!(case.at(0, &contacts(1)), [""; 0]);
            assert_eq!(case.at(10, &contacts(away)).len(), silent, "{away} of {all}");
            let mut lost = contacts(1);
            lost[1..away].fill(LOST);
            assert_eq!(case.at(11, &lost).len(), silent, "whether they left or were lost");
        }
    }

    #[test]
    fn all_pods_of_a_silent_node_are_away() {
        let mut case = Case::new();
        case.members.push(pod("new", "one").into());
        case.members.push(Member { terminating: true, ..pod("ending", "one") }.into());
        case.members.push(pod("alone", "three").into());
        for (seconds, silent) in [(0, vec![]), (10, vec!["a", "b", "new"])] {
            assert_eq!(case.at(seconds, &[LEFT, LEFT, HERE]), silent, "of those nothing was ever heard");
        }
        assert_eq!(case.at(11, &[LEFT, LEFT, HERE, HERE]), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_ends_calls_no_node_silent() {
        let members = [pod("a", "one"), pod("b", "two")].map(Shared::from).into();
        let snapshot = Snapshot { members, ..Snapshot::default() };
        let (_plans, plans) = watch::channel(Some(Arc::new(Plan { snapshot: Arc::new(snapshot), ..Plan::default() })));
        let (lead, leadership) = Leadership::by_hand();
        let (sender, mut taken) = watch::channel(BTreeSet::<String>::new());
        let take = move |silent| {
            sender.send_if_modified(|last| std::mem::replace(last, silent) != *last);
        };
        let contacts = || BTreeMap::from([("a".to_owned(), LEFT), ("b".to_owned(), HERE)]);
        Drain::default().spawn(SilenceFollower { plans, contacts, take, leadership }.run());
        for _ in 0..2 {
            let begun = Instant::now();
            lead(true);
            taken.changed().await.unwrap();
            assert!(begun.elapsed() >= LEARNS_FOR + AWAY_FOR, "it learns first who is away");
            assert!(taken.borrow_and_update().contains("a"));
            lead(false);
            taken.changed().await.unwrap();
            assert!(taken.borrow_and_update().is_empty());
        }
    }
}
