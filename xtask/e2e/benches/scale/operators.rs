//! All operators of the benchmark: which pods they have, and what is in force there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::slots::Slot;
use ctrlmesh_common::wire::PodId;
use ctrlmesh_testbed::holders::{Holders, Violation};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Operators in one namespace.
const IN_ONE: usize = 10;

/// A policy that a proxy has put in force.
#[derive(Clone, Debug)]
pub(crate) struct Applied {
    /// When it came.
    pub(crate) at: Instant,
    /// Of the pod.
    pub(crate) uid: String,
    pub(crate) slots: BTreeMap<Slot, String>,
}

/// All of them, by their numbers.
#[derive(Debug)]
pub(crate) struct Operators {
    all: Vec<Mutex<Operator>>,
    violations: Mutex<Vec<Violation>>,
    /// Policies that were put in force.
    applied: AtomicUsize,
    /// Pods of each.
    pub(crate) replicas: usize,
}

#[derive(Debug, Default)]
struct Operator {
    holders: Holders,
    observer: Option<mpsc::UnboundedSender<Applied>>,
}

/// The namespace of an operator.
pub(crate) fn namespace(number: usize) -> String {
    format!("ops-{}", number / IN_ONE)
}

/// The name of an operator's root and StatefulSet.
pub(crate) fn name(number: usize) -> String {
    format!("op-{number}")
}

/// The number of the operator, and of its replica, that a pod's name says.
pub(crate) fn numbers(pod: &str) -> Option<(usize, usize)> {
    let (operator, replica) = pod.strip_prefix("op-")?.split_once('-')?;
    Some((operator.parse().ok()?, replica.parse().ok()?))
}

impl Operators {
    pub(crate) fn new(count: usize, replicas: usize) -> Self {
        let all = (0..count).map(|_| Mutex::default()).collect();
        Self { all, violations: Mutex::default(), applied: AtomicUsize::new(0), replicas }
    }

    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    /// Looks at what one holds, or changes it.
    pub(crate) fn with<T>(&self, number: usize, look: impl FnOnce(&mut Holders) -> T) -> T {
        look(&mut self.operator(number).holders)
    }

    fn operator(&self, number: usize) -> MutexGuard<'_, Operator> {
        self.all[number].lock().unwrap()
    }

    /// A proxy puts a policy in force that came at `at`. Returns whether the pod waits for a confirmation then.
    pub(crate) fn apply(&self, pod: &PodId, policy: Policy, at: Instant) -> bool {
        let Some((number, _)) = numbers(&pod.name) else { return false };
        let mut operator = self.operator(number);
        if let Some(observer) = &operator.observer {
            let slots = policy.fence.iter().flat_map(|fence| fence.slots.clone()).collect();
            // Whoever observed it may have seen enough.
            drop(observer.send(Applied { at, uid: pod.uid.clone(), slots }));
        }
        self.applied.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        self.note(operator.holders.apply(&pod.uid, policy, now));
        operator.holders.get(&pod.uid).is_some_and(|replica| replica.awaits_confirmation(now))
    }

    /// The manager has confirmed the policy of a pod.
    pub(crate) fn confirm(&self, pod: &PodId, asked: Instant) {
        if let Some((number, _)) = numbers(&pod.name) {
            self.note(self.operator(number).holders.confirm(&pod.uid, asked, Instant::now()));
        }
    }

    fn note(&self, result: Result<(), Violation>) {
        if let Err(violation) = result {
            eprintln!("{violation}");
            self.violations.lock().unwrap().push(violation);
        }
    }

    /// What proxies of this operator put in force from now on.
    pub(crate) fn observe(&self, number: usize) -> mpsc::UnboundedReceiver<Applied> {
        let (observer, seen) = mpsc::unbounded_channel();
        self.operator(number).observer = Some(observer);
        seen
    }

    /// How many pods of this round are ready.
    pub(crate) fn ready(&self, round: u32) -> usize {
        self.all.iter().map(|one| one.lock().unwrap().holders.ready(round)).sum()
    }

    /// How many have pods of this round only, which own all, evenly.
    pub(crate) fn even(&self, round: u32) -> usize {
        let now = Instant::now();
        let is_even = |one: &&Mutex<Operator>| one.lock().unwrap().holders.are_even(self.replicas, round, now);
        self.all.iter().filter(is_even).count()
    }

    pub(crate) fn is_even(&self, number: usize, round: u32) -> bool {
        self.operator(number).holders.are_even(self.replicas, round, Instant::now())
    }

    /// How many policies were put in force so far, and how often two pods could write the same then.
    pub(crate) fn checked(&self) -> (usize, usize) {
        (self.applied.load(Ordering::Relaxed), self.violations.lock().unwrap().len())
    }

    /// # Panics
    /// Where two pods held the same at any time.
    pub(crate) fn assert_no_violation(&self) {
        let violations = self.violations.lock().unwrap().clone();
        assert!(violations.is_empty(), "{} violations; the first one: {}", violations.len(), violations[0]);
    }
}
