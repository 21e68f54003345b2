//! Decides which write comes next.
//!
//! Pure. Writes that proxies wait for come first, and some room is kept for them. Each object is written at
//! most once a second, and never twice at once. A move of ownership is not held up by that. A failed write is retried
//! with a growing delay and holds no other up. What was decided by an older version than the last write made is not
//! written: the API server would refuse it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::{Observations, Write};
use crate::cluster::plan::{Changed, Plan};

/// Writes in flight.
const CONCURRENT: usize = 8;

/// Writes in flight that no proxy waits for.
const MAX_UNAWAITED: usize = 6;

const LABEL: &str = "label";

/// Least time between two writes of one object.
const PERIOD: Duration = Duration::from_secs(1);

/// More time for each pod in a status, unless proxies wait for it: each write is stored and sent to all
/// watchers in full.
const EACH_POD: Duration = Duration::from_millis(1);

/// First and longest delay after a failure. The first is no shorter than [`PERIOD`], because a write whose
/// answer was lost may have happened.
const RETRY: (Duration, Duration) = (PERIOD, Duration::from_secs(30));

/// Interval of looks at everything, without a change.
pub(super) const DECIDE_INTERVAL: Duration = Duration::from_mins(1);

/// Longest wait for a plan that knows the last write. After a restore from a backup there may never be one.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Written,
    /// The state that it was decided by has changed.
    Outdated,
    Failed,
}

#[derive(Default)]
pub(super) struct WriteQueue {
    first: VecDeque<Write>,
    later: VecDeque<Write>,
    /// Writes in flight, and whether proxies wait for them.
    busy: BTreeMap<Key, bool>,
    /// Objects of which a write was not made, because another one of the object is in flight.
    skipped: BTreeSet<String>,
    paces: BTreeMap<Key, Pace>,
    /// What the last write of an object says of its version.
    versions: BTreeMap<String, Version>,
    /// What the last decision was made from.
    decided: Option<(Arc<Plan>, Observations)>,
    /// The namespaces of what was to be written then, and when all were looked at last.
    wanted: BTreeSet<String>,
    looked_at_all: Option<Instant>,
    /// When a write is due that was postponed.
    due: Option<Instant>,
}

/// Kind of write, and object.
type Key = (&'static str, String);

/// What a write says of an object's version.
#[derive(Clone, Copy)]
struct Version {
    /// A decision by an older one waits.
    least: u64,
    /// Whether that write was decided by an object that was there. Who then decides that there is none knows more.
    was_there: bool,
    until: Instant,
}

/// When an object may be written again.
struct Pace {
    failures: u32,
    not_before: Instant,
    /// Additional delay if no proxy waits.
    longer: Duration,
}

impl WriteQueue {
    pub(super) fn is_idle(&self) -> bool {
        self.first.is_empty() && self.later.is_empty()
    }

    /// Whether a new decision is needed: something changed, or a postponed write is due.
    pub(super) fn needs_decision(&self, plan: &Arc<Plan>, observed: &Observations, now: Instant) -> bool {
        let decided = self.decided.as_ref();
        let same = decided.is_some_and(|(by, seen)| Arc::ptr_eq(by, plan) && seen == observed);
        !same || self.due.is_some_and(|due| now >= due)
    }

    /// The namespaces for which a decision is to be made: those in which something changed since the last one, or was
    /// to be written. In any other it would be the same one: that nothing is to be written. Now and then all are looked
    /// at, as time passes.
    pub(super) fn scope(&self, plan: &Plan, observed: &Observations, (now, time): (Instant, Timestamp)) -> Changed {
        let Some((by, seen)) = &self.decided else { return Changed::All };
        if self.looked_at_all.is_none_or(|at| now >= at + DECIDE_INTERVAL) {
            return Changed::All;
        }
        let mut scope = Changed::between_plans(by, plan).union(observed.changed(seen, time));
        scope.add(self.wanted.iter().map(String::as_str));
        scope
    }

    /// Replaces what waits by `writes`, which were decided for `scope`.
    pub(super) fn take(
        &mut self,
        plan: Arc<Plan>,
        observed: Observations,
        (scope, writes): (&Changed, Vec<Write>),
        now: Instant,
    ) {
        if *scope == Changed::All {
            self.looked_at_all = Some(now);
        }
        self.wanted = writes.iter().map(|write| write.namespace().to_owned()).collect();
        let keys: BTreeSet<Key> = writes.iter().map(key).collect();
        // Forget the pace of objects that need no write any more.
        self.paces.retain(|key, pace| keys.contains(key) || now < pace.ends(false));
        self.versions.retain(|_, version| now < version.until);
        let all_due = self.looked_at_all.unwrap_or(now) + DECIDE_INTERVAL;
        (self.decided, self.due) = (Some((plan, observed)), Some(all_due));
        self.first.clear();
        // Labels are decided together, because the shard of a pod depends on the others: no new ones until
        // these are written.
        let labels = self.later.iter().any(is_label) || self.busy.keys().any(|(what, _)| *what == LABEL);
        self.later.retain(|write| labels && is_label(write));
        for write in writes.into_iter().filter(|write| !(labels && is_label(write))) {
            let key = key(&write);
            let pace = self.paces.get(&key).filter(|pace| !write.is_move() || pace.failures > 0);
            let later = pace.map(|pace| pace.ends(write.is_awaited())).filter(|later| now < *later);
            match later.max(self.is_known_at(&write)) {
                _ if self.is_held_up(&write) => {}
                Some(later) => self.decide_by(later),
                None if write.is_awaited() => self.first.push_back(write),
                None => self.later.push_back(write),
            }
        }
    }

    /// The next write, if there is room. It is in flight until [`Self::done`].
    pub(super) fn next(&mut self) -> Option<Write> {
        while self.busy.len() < CONCURRENT {
            let later = self.busy.values().filter(|is_awaited| !**is_awaited).count();
            let write = match self.first.pop_front() {
                None if later < MAX_UNAWAITED => self.later.pop_front(),
                first => first,
            }?;
            if self.is_held_up(&write) {
                continue;
            }
            if let Some(until) = self.is_known_at(&write) {
                self.decide_by(until);
                continue;
            }
            self.busy.insert(key(&write), write.is_awaited());
            return Some(write);
        }
        None
    }

    /// Whether another write of the object is in flight. A decision follows when that is done: at once, but for a
    /// write of the same kind that is no move.
    fn is_held_up(&mut self, write: &Write) -> bool {
        let (kind, object) = key(write);
        let mut others = self.busy.keys().filter(|(_, other)| *other == object);
        let is_busy = others.any(|(other, _)| (*other == LABEL) == (kind == LABEL));
        let (same, is_move) = (self.busy.contains_key(&(kind, object.clone())), write.is_move());
        if is_busy && (is_move || !same) {
            self.skipped.insert(object);
        }
        is_busy
    }

    /// A write was made, after which its object has this version; `None` where it was refused for its version, or where
    /// the object is gone.
    pub(super) fn has_version(&mut self, write: &Write, version: Option<u64>, now: Instant) {
        let Some(decided_by) = write.version() else { return };
        let least = version.unwrap_or_else(|| decided_by.saturating_add(1));
        let before = self.versions.get(&write.object()).filter(|before| now < before.until);
        let least = before.map_or(least, |before| before.least.max(least));
        let version = Version { least, was_there: decided_by > 0, until: now + KNOWN_WITHIN };
        self.versions.insert(write.object(), version);
    }

    /// How long a write waits that was decided by an older version.
    fn is_known_at(&self, write: &Write) -> Option<Instant> {
        let (version, decided_by) = (self.versions.get(&write.object())?, write.version()?);
        let knows_more = decided_by == 0 && version.was_there;
        (decided_by < version.least && !knows_more).then_some(version.until)
    }

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
        let longer = if outcome == Outcome::Written { EACH_POD * pods(write) } else { Duration::ZERO };
        // Decide again even after success: another change may have come meanwhile.
        let is_skipped = self.skipped.remove(&key.1) && outcome != Outcome::Failed;
        self.decide_by(if is_skipped { now } else { now + wait });
        self.paces.insert(key, Pace { failures, not_before: now + wait, longer });
    }

    pub(super) fn clear(&mut self) {
        self.first.clear();
        self.later.clear();
        self.skipped.clear();
        self.versions.clear();
        self.decided = None;
    }

    /// Has a decision made by then.
    pub(super) fn decide_by(&mut self, at: Instant) {
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }
}

impl Pace {
    fn ends(&self, is_awaited: bool) -> Instant {
        if is_awaited { self.not_before } else { self.not_before + self.longer }
    }
}

/// How many pods are in the status.
fn pods(write: &Write) -> u32 {
    let Write::Status { config, .. } = write else { return 0 };
    let pods = config.status.as_ref().map_or(0, |status| status.pods.len());
    u32::try_from(pods).unwrap_or(u32::MAX)
}

fn is_label(write: &Write) -> bool {
    write.kind() == LABEL
}

fn key(write: &Write) -> Key {
    (write.kind(), write.object())
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::{PodStatus, ShardingConfig, ShardingConfigSpec, ShardingConfigStatus};

    use super::*;
    use crate::cluster::cache::Snapshot;
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
        Write::Status { config: config(shard), is_awaited: true, is_move: false, events: Vec::new() }
    }

    /// Queues `names` and returns all writes that may start.
    fn given(queue: &mut WriteQueue, names: &[&str], now: Instant) -> Vec<Write> {
        let writes = names.iter().map(|name| write(name)).collect();
        queue.take(Arc::default(), Observations::default(), (&Changed::All, writes), now);
        std::iter::from_fn(|| queue.next()).collect()
    }

    #[test]
    fn a_failing_write_is_retried_later_and_blocks_no_other() {
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
    fn writes_that_proxies_wait_for_come_first_and_find_room() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let slow: Vec<String> = (0..400).map(|pod| format!("slow-{pod}")).collect();
        let names: Vec<&str> = slow.iter().map(String::as_str).collect();
        assert_eq!(given(&mut queue, &names, now).len(), MAX_UNAWAITED);
        let both = || vec![write("other"), decision("a"), decision("b"), decision("c")];
        queue.take(Arc::default(), Observations::default(), (&Changed::All, both()), now);
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
    fn unawaited_statuses_of_many_pods_are_written_less_often() {
        let status = |pods: usize, is_awaited| {
            let mut config = config("many");
            let pod = PodStatus { name: "p".to_owned(), node: None, epoch: None, last_contact: None, stands_by: false };
            let pods = vec![pod; pods];
            config.status = Some(ShardingConfigStatus { pods, ..ShardingConfigStatus::default() });
            Write::Status { config, is_awaited, is_move: false, events: Vec::new() }
        };
        let next = |queue: &mut WriteQueue, write: Write, now| {
            queue.take(Arc::default(), Observations::default(), (&Changed::All, vec![write]), now);
            queue.next()
        };
        let start = Instant::now();
        for (pods, after) in [(0, PERIOD), (5000, PERIOD + EACH_POD * 5000)] {
            for is_awaited in [true, false] {
                let mut queue = WriteQueue::default();
                assert!(next(&mut queue, status(pods, true), start).is_some());
                queue.done(&status(pods, true), Outcome::Written, start);
                let after = if is_awaited { PERIOD } else { after };
                let early = start + after - Duration::from_millis(1);
                assert_eq!(next(&mut queue, status(pods, is_awaited), early), None);
                assert_eq!(queue.due, Some(start + after), "it is looked again");
                assert!(next(&mut queue, status(pods, is_awaited), start + after).is_some());
            }
        }
    }

    #[test]
    fn a_move_is_paced_only_after_a_failure() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let table = || Write::Status { config: config("a"), is_awaited: true, is_move: true, events: Vec::new() };
        let take = |queue: &mut WriteQueue, now| {
            queue.take(Arc::default(), Observations::default(), (&Changed::All, vec![table()]), now);
            queue.next()
        };
        assert!(take(&mut queue, now).is_some());
        assert_eq!(take(&mut queue, now), None, "one write of an object at a time");
        queue.done(&table(), Outcome::Written, now);
        assert_eq!(queue.due, Some(now), "it is looked again at once");
        assert!(take(&mut queue, now).is_some());
        queue.done(&table(), Outcome::Failed, now);
        assert_eq!(take(&mut queue, now), None);
        assert!(take(&mut queue, now + RETRY.0).is_some());
    }

    #[test]
    fn what_an_older_version_decided_waits_for_a_newer_one() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let by = |version: u64| {
            let mut config = config("a");
            config.metadata.resource_version = Some(version.to_string());
            Write::Status { config, is_awaited: true, is_move: true, events: Vec::new() }
        };
        let take = |queue: &mut WriteQueue, write: Write, now| {
            queue.take(Arc::default(), Observations::default(), (&Changed::All, vec![write]), now);
            let next = queue.next();
            if let Some(write) = &next {
                queue.done(write, Outcome::Written, now);
            }
            next.is_some()
        };
        assert!(take(&mut queue, by(7), now));
        queue.has_version(&by(7), Some(9), now);
        assert!(!take(&mut queue, by(7), now) && !take(&mut queue, by(8), now));
        assert_eq!(queue.due, Some(now + KNOWN_WITHIN));
        assert!(take(&mut queue, by(9), now) && take(&mut queue, by(11), now));
        assert!(take(&mut queue, by(0), now), "that it is gone is known later than that it was there");
        assert!(take(&mut queue, by(3), now + KNOWN_WITHIN), "it was restored from a backup");
        // Refused, after another write had been made.
        queue.has_version(&by(7), Some(9), now);
        queue.has_version(&by(7), None, now);
        assert!(!take(&mut queue, by(8), now) && take(&mut queue, by(9), now));
        // Made, but not seen yet.
        queue.clear();
        queue.has_version(&by(0), Some(9), now);
        assert!(!take(&mut queue, by(0), now) && take(&mut queue, by(9), now));
    }

    #[test]
    fn one_object_is_written_by_one_write_at_a_time() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let both = || vec![decision("a"), write("a"), write("b"), label("a")];
        queue.take(Arc::default(), Observations::default(), (&Changed::All, both()), now);
        let started: Vec<Write> = std::iter::from_fn(|| queue.next()).collect();
        assert_eq!(started, [decision("a"), write("b"), label("a")]);
        queue.done(&decision("a"), Outcome::Written, now);
        assert_eq!(queue.due, Some(now), "the other one is decided anew");
        queue.take(Arc::default(), Observations::default(), (&Changed::All, vec![write("a")]), now);
        assert_eq!(queue.next(), Some(write("a")));
    }

    #[test]
    fn only_what_changed_or_was_to_be_written_is_decided_again() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let plan = |account: &str| {
            let set_accounts = [("ops/op".to_owned(), account.to_owned())].into();
            Arc::new(Plan { snapshot: Arc::new(Snapshot { set_accounts, ..Snapshot::default() }), ..Plan::default() })
        };
        let contacts = Arc::new([("shop/op-0".parse::<PodName>().unwrap(), Contact::default())].into());
        let (nothing, heard) = (Observations::default(), Observations { contacts, ..Observations::default() });
        let time = Timestamp::UNIX_EPOCH;
        assert_eq!(queue.scope(&plan("a"), &nothing, (now, time)), Changed::All);
        queue.take(plan("a"), nothing.clone(), (&Changed::All, Vec::new()), now);
        let of = |queue: &WriteQueue, plan: &Plan, observed: &Observations, namespaces: &[&str]| {
            let scope = queue.scope(plan, observed, (now, time));
            assert_eq!(scope, Changed::In(namespaces.iter().map(|one| (*one).to_owned()).collect()));
            scope
        };
        of(&queue, &plan("a"), &nothing, &[]);
        let scope = of(&queue, &plan("b"), &heard, &["ops", "shop"]);
        queue.take(plan("b"), heard.clone(), (&scope, vec![write("a")]), now + PERIOD);
        let scope = of(&queue, &plan("b"), &heard, &["ns"]);
        queue.take(plan("b"), heard.clone(), (&scope, Vec::new()), now + PERIOD);
        assert_eq!(queue.due, Some(now + DECIDE_INTERVAL), "since all were looked at");
        assert_eq!(queue.scope(&plan("b"), &heard, (now + DECIDE_INTERVAL, time)), Changed::All);
        let leads = Observations { new_leader: true, ..heard.clone() };
        assert_eq!(queue.scope(&plan("b"), &leads, (now, time)), Changed::All);
        of(&queue, &plan("b"), &heard, &[]);
        queue.clear();
        assert_eq!(queue.scope(&plan("b"), &heard, (now, time)), Changed::All);
    }

    #[test]
    fn labels_decided_together_are_written_before_others() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let take = |queue: &mut WriteQueue, writes: &[Write], now| {
            queue.take(Arc::default(), Observations::default(), (&Changed::All, writes.to_vec()), now);
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
    fn a_decision_is_due_only_after_a_change_or_in_time() {
        let (mut queue, now) = (WriteQueue::default(), Instant::now());
        let (plan, observed) = (Arc::new(Plan::default()), Observations::default());
        assert!(queue.needs_decision(&plan, &observed, now), "nothing is known yet");
        queue.take(Arc::clone(&plan), observed.clone(), (&Changed::All, vec![write("a")]), now);
        assert!(!queue.needs_decision(&plan, &observed, now + RETRY.1));
        assert!(queue.needs_decision(&Arc::default(), &observed, now), "another plan");
        let contacts = BTreeMap::from([("ns/a".parse().unwrap(), Contact::default())]);
        let observations = Observations { contacts: Arc::new(contacts), ..Observations::default() };
        assert!(queue.needs_decision(&plan, &observations, now), "a proxy has reported");
        assert_eq!(queue.next(), Some(write("a")));
        queue.done(&write("a"), Outcome::Failed, now);
        assert!(!queue.needs_decision(&plan, &observed, now));
        assert!(queue.needs_decision(&plan, &observed, now + RETRY.0), "it may be tried again");
        queue.clear();
        assert!(queue.needs_decision(&plan, &observed, now), "another replica may have written meanwhile");
    }
}
