//! What is written next?
//!
//! Pure: takes what has to be written, gives one write after the other, first what proxies wait for; for that there is
//! always room. No object is written in one way more than once a second, and never twice at once. What failed is tried
//! again later and later, by itself: one object that can never be written holds no other up. What has to be written is
//! asked for again when something has changed, or when something is due that could not be written before.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Observations, Write};
use crate::cluster::plan::Plan;

/// How many writes are under way at once.
const CONCURRENT: usize = 8;

/// How many of them at most may be such as proxies do not wait for.
const LATER: usize = 6;

/// What a pod's label is, in a word.
const LABEL: &str = "label";

/// How long an object is left alone after it was written.
const PERIOD: Duration = Duration::from_secs(1);

/// How much longer for each pod of a status, before what nobody waits for is said: each time all of it is written, stored
/// and sent to whoever watches.
const EACH_POD: Duration = Duration::from_millis(1);

/// How long is waited after a write that failed, at first and at most. At first as long as after any: one whose answer was
/// lost may stand there.
const RETRY: (Duration, Duration) = (PERIOD, Duration::from_secs(30));

/// How often it is looked where nothing has changed: time itself changes what is said of proxies that are away.
const LOOK_AGAIN: Duration = Duration::from_mins(1);

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It stands there.
    Written,
    /// What it was decided by is no longer so.
    Outdated,
    /// It could not be written.
    Failed,
}

/// What waits to be written.
#[derive(Default)]
pub(super) struct WriteQueue {
    first: VecDeque<Write>,
    later: VecDeque<Write>,
    /// What is under way, and whether proxies wait for it.
    busy: BTreeMap<Key, bool>,
    paces: BTreeMap<Key, Pace>,
    /// By what it was decided last.
    decided: Option<(Arc<Plan>, Observations)>,
    /// When something is due that was left out then.
    due: Option<Instant>,
}

/// What is done to which object.
type Key = (&'static str, String);

/// When one object may be written.
struct Pace {
    failures: u32,
    not_before: Instant,
    /// How much longer what nobody waits for is left.
    longer: Duration,
}

// === impl WriteQueue ===

impl WriteQueue {
    /// Whether nothing waits.
    pub(super) fn is_idle(&self) -> bool {
        self.first.is_empty() && self.later.is_empty()
    }

    /// Whether it has to be told what is to be written by `plan` and what was `observed` beside it.
    pub(super) fn asks(&self, plan: &Arc<Plan>, observed: &Observations, now: Instant) -> bool {
        let decided = self.decided.as_ref();
        let same = decided.is_some_and(|(by, said)| Arc::ptr_eq(by, plan) && said == observed);
        !same || self.due.is_some_and(|due| now >= due)
    }

    /// Takes what has to be written, in the place of what it has.
    pub(super) fn take(
        &mut self,
        plan: Arc<Plan>,
        observed: Observations,
        writes: Vec<Write>,
        now: Instant,
    ) {
        let keys: BTreeSet<Key> = writes.iter().map(key).collect();
        // What need not be written any more is not remembered either.
        self.paces.retain(|key, pace| keys.contains(key) || now < pace.ends(false));
        (self.decided, self.due) = (Some((plan, observed)), Some(now + LOOK_AGAIN));
        self.first.clear();
        // Which shard a pod is of is decided by the labels of the others: while some are on their way, no others are given.
        let labels =
            self.later.iter().any(is_label) || self.busy.keys().any(|(what, _)| *what == LABEL);
        self.later.retain(|write| labels && is_label(write));
        for write in writes.into_iter().filter(|write| !(labels && is_label(write))) {
            let key = key(&write);
            let later = self.paces.get(&key).map(|pace| pace.ends(write.decides()));
            match later.filter(|later| now < *later) {
                // When it is done, it is looked again.
                _ if self.busy.contains_key(&key) => {}
                Some(later) => self.look_again(later),
                None if write.decides() => self.first.push_back(write),
                None => self.later.push_back(write),
            }
        }
    }

    /// The next write, as long as there is room for one; it is under way until it is done.
    pub(super) fn next(&mut self) -> Option<Write> {
        if self.busy.len() >= CONCURRENT {
            return None;
        }
        let later = self.busy.values().filter(|decides| !**decides).count();
        let write = match self.first.pop_front() {
            None if later < LATER => self.later.pop_front(),
            first => first,
        }?;
        self.busy.insert(key(&write), write.decides());
        Some(write)
    }

    /// Says what became of `write`.
    pub(super) fn done(&mut self, write: &Write, outcome: Outcome, now: Instant) {
        let key = key(write);
        self.busy.remove(&key);
        let failures = self.paces.get(&key).map_or(0, |pace| pace.failures);
        let (failures, wait) = match outcome {
            Outcome::Written | Outcome::Outdated => (0, PERIOD),
            Outcome::Failed => {
                let wait = RETRY.0.saturating_mul(1 << failures.min(16)).min(RETRY.1);
                (failures.saturating_add(1), wait)
            }
        };
        let longer =
            if outcome == Outcome::Written { EACH_POD * pods(write) } else { Duration::ZERO };
        self.paces.insert(key, Pace { failures, not_before: now + wait, longer });
        // Even what was written is looked at again: something else may have had to be written meanwhile.
        self.look_again(now + wait);
    }

    /// Forgets what waits.
    pub(super) fn clear(&mut self) {
        self.first.clear();
        self.later.clear();
        self.decided = None;
    }

    fn look_again(&mut self, at: Instant) {
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }
}

// === impl Pace ===

impl Pace {
    fn ends(&self, decides: bool) -> Instant {
        if decides { self.not_before } else { self.not_before + self.longer }
    }
}

/// Of how many pods it says something.
fn pods(write: &Write) -> u32 {
    let Write::Status { config, .. } = write else { return 0 };
    let pods = config.status.as_ref().map_or(0, |status| status.pods.len());
    u32::try_from(pods).unwrap_or(u32::MAX)
}

fn is_label(write: &Write) -> bool {
    write.what() == LABEL
}

fn key(write: &Write) -> Key {
    (write.what(), write.object())
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::{
        PodStatus, ShardingConfig, ShardingConfigSpec, ShardingConfigStatus,
    };

    use super::*;
    use crate::rules::pod::PodName;
    use crate::status::compute::Contact;

    fn config(name: &str) -> Box<ShardingConfig> {
        let mut config = ShardingConfig::new(name, ShardingConfigSpec::default());
        config.metadata.namespace = Some("ns".to_owned());
        Box::new(config)
    }

    fn write(shard: &str) -> Write {
        Write::Remove { config: config(shard) }
    }

    fn label(pod: &str) -> Write {
        let pod: PodName = format!("ns/{pod}").parse().unwrap();
        Write::Label { pod, uid: String::new(), shard: "shard".to_owned() }
    }

    fn decision(shard: &str) -> Write {
        Write::Status { config: config(shard), decides: true, events: Vec::new() }
    }

    /// Those that are given out, once `names` have to be written.
    fn given(queue: &mut WriteQueue, names: &[&str], now: Instant) -> Vec<Write> {
        let writes = names.iter().map(|name| write(name)).collect();
        queue.take(Arc::default(), Observations::default(), writes, now);
        std::iter::from_fn(|| queue.next()).collect()
    }

    #[test]
    fn one_that_cannot_be_written_is_tried_later_and_later_and_holds_no_other_up() {
        let (mut queue, mut now) = (WriteQueue::default(), Instant::now());
        let (mut bad, mut good) = (Vec::new(), 0);
        for half_second in 0..400 {
            for given in given(&mut queue, &["bad", "good"], now) {
                let is_bad = given == write("bad");
                if is_bad {
                    bad.push(half_second);
                } else {
                    good += 1;
                }
                let outcome = if is_bad { Outcome::Failed } else { Outcome::Written };
                queue.done(&given, outcome, now);
            }
            now += PERIOD / 2;
        }
        assert_eq!(good, 200, "once a second");
        assert_eq!(bad, [0, 2, 6, 14, 30, 62, 122, 182, 242, 302, 362]);
        now += RETRY.1;
        assert_eq!(given(&mut queue, &["bad"], now).len(), 1);
        queue.done(&write("bad"), Outcome::Written, now);
        now += PERIOD;
        assert_eq!(given(&mut queue, &["bad"], now).len(), 1);
        queue.done(&write("bad"), Outcome::Failed, now);
        assert_eq!(given(&mut queue, &["bad"], now + RETRY.0).len(), 1, "from the beginning");
    }

    #[test]
    fn nothing_is_written_twice_at_once() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        assert_eq!(given(&mut queue, &["slow"], now), [write("slow")]);
        let later = now + RETRY.1;
        assert_eq!(given(&mut queue, &["slow", "other"], later), [write("other")]);
        queue.done(&write("slow"), Outcome::Outdated, later);
        assert_eq!(given(&mut queue, &["slow"], later + PERIOD), [write("slow")]);
    }

    #[test]
    fn what_proxies_wait_for_is_written_first_and_finds_room_beside_what_is_slow() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let slow: Vec<String> = (0..400).map(|pod| format!("slow-{pod}")).collect();
        let names: Vec<&str> = slow.iter().map(String::as_str).collect();
        assert_eq!(given(&mut queue, &names, now).len(), LATER);
        let both = || vec![write("other"), decision("a"), decision("b"), decision("c")];
        queue.take(Arc::default(), Observations::default(), both(), now);
        let given: Vec<Write> = std::iter::from_fn(|| queue.next()).collect();
        assert_eq!(given, [decision("a"), decision("b")]);
        queue.done(&given[0], Outcome::Written, now);
        assert_eq!(queue.next(), Some(decision("c")), "and nothing else");
        assert_eq!(queue.next(), None);
        queue.done(&decision("b"), Outcome::Written, now);
        assert_eq!(queue.next(), None, "room is kept");
        queue.done(&write("slow-0"), Outcome::Written, now);
        assert_eq!(queue.next(), Some(write("other")));
    }

    #[test]
    fn what_nobody_waits_for_is_said_of_many_pods_less_often() {
        let status = |pods: usize, decides| {
            let mut config = config("many");
            let pod =
                PodStatus { name: "p".to_owned(), node: None, epoch: None, last_contact: None };
            let pods = vec![pod; pods];
            config.status = Some(ShardingConfigStatus { pods, ..ShardingConfigStatus::default() });
            Write::Status { config, decides, events: Vec::new() }
        };
        let next = |queue: &mut WriteQueue, write: Write, now| {
            queue.take(Arc::default(), Observations::default(), vec![write], now);
            queue.next()
        };
        let begins = Instant::now();
        for (pods, after) in [(0, PERIOD), (5000, PERIOD + EACH_POD * 5000)] {
            for decides in [true, false] {
                let mut queue = WriteQueue::default();
                assert!(next(&mut queue, status(pods, true), begins).is_some());
                queue.done(&status(pods, true), Outcome::Written, begins);
                let after = if decides { PERIOD } else { after };
                let early = begins + after - Duration::from_millis(1);
                assert_eq!(next(&mut queue, status(pods, decides), early), None);
                assert_eq!(queue.due, Some(begins + after), "it is looked again");
                assert!(next(&mut queue, status(pods, decides), begins + after).is_some());
            }
        }
    }

    #[test]
    fn no_other_labels_are_given_before_those_that_were_decided_together_are_written() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let take = |queue: &mut WriteQueue, writes: &[Write], now| {
            queue.take(Arc::default(), Observations::default(), writes.to_vec(), now);
        };
        take(&mut queue, &[label("a"), label("b")], now);
        assert_eq!(queue.next(), Some(label("a")));
        take(&mut queue, &[label("c"), write("shard")], now);
        assert_eq!((queue.next(), queue.next()), (Some(label("b")), Some(write("shard"))));
        assert_eq!(queue.next(), None);
        for done in [label("a"), label("b"), write("shard")] {
            queue.done(&done, Outcome::Written, now);
        }
        take(&mut queue, &[label("c")], now);
        assert_eq!(queue.next(), Some(label("c")));
    }

    #[test]
    fn it_asks_when_something_has_changed_or_is_due_and_not_otherwise() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let (plan, observed) = (Arc::new(Plan::default()), Observations::default());
        assert!(queue.asks(&plan, &observed, now), "nothing is known yet");
        queue.take(Arc::clone(&plan), observed.clone(), vec![write("a")], now);
        assert!(!queue.asks(&plan, &observed, now + RETRY.1));
        assert!(queue.asks(&Arc::default(), &observed, now), "another plan");
        let contacts = BTreeMap::from([("ns/a".parse().unwrap(), Contact::default())]);
        let said = Observations { contacts: Arc::new(contacts), ..Observations::default() };
        assert!(queue.asks(&plan, &said, now), "a proxy has said something");
        assert_eq!(queue.next(), Some(write("a")));
        queue.done(&write("a"), Outcome::Failed, now);
        assert!(!queue.asks(&plan, &observed, now));
        assert!(queue.asks(&plan, &observed, now + RETRY.0), "it may be tried again");
        queue.clear();
        assert!(queue.asks(&plan, &observed, now), "another replica may have written meanwhile");
    }
}
