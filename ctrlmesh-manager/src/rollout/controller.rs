//! Follows the rollouts of all roots, while this replica leads.
//!
//! It decides what a rollout's status says next, which the cluster writer writes. By the status that is written it
//! promotes pods, marks those that are in the way, and puts templates back.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_common::api::{Rollout, RolloutStatus, Trial, TrialPhase};
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::rollout::{self, Observed, SlotLoads};
use ctrlmesh_common::slots::Slot;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use kube::Client;
use tokio::sync::watch;
use tokio::time;
use tracing::info;

use super::action::{self, Action, Done, Key};
use super::metrics::{Outcome, Progress, Round};
use super::shadow;
use super::telemetry::{RolloutMetrics, Seen};
use super::window::{PodCounts, VersionCounts, Window};
use crate::cluster::plan::{Plan, Plans};
use crate::drain::Drain;
use crate::labels::ObjectCounts;
use crate::leader::lease::Leadership;
use crate::push::policy_store::{PodTraffic, PolicyStore};
use crate::rules::metric::Placeholders;
use crate::rules::object_name::namespace;
use crate::rules::pod::{Member, PodName};
use crate::rules::rollout::{Decision, Decisions, Workload, workloads};
use crate::rules::shard::has_second_name;

type TrafficByPod = BTreeMap<PodName, PodTraffic>;

/// Interval of looks.
const PERIOD: Duration = Duration::from_millis(250);

/// Between two attempts to write the same thing.
const RETRY: Duration = Duration::from_secs(2);

pub struct RolloutController {
    pub client: Client,
    pub plans: Plans,
    pub store: Arc<PolicyStore>,
    pub objects: ObjectCounts,
    pub decisions: watch::Sender<Arc<Decisions>>,
    pub leadership: Leadership,
    pub metrics: RolloutMetrics,
    /// Runs the queries of metrics.
    pub drain: Drain,
}

/// What one term of leadership remembers; a new leader begins without it.
#[derive(Default)]
struct Memory {
    /// By `NAMESPACE/NAME` of the root.
    windows: BTreeMap<String, Window>,
    /// Queries that run, by `NAMESPACE/NAME` of the root.
    rounds: BTreeMap<String, Round>,
    roll_back_errors: BTreeMap<String, String>,
    /// By what has been counted.
    seen: Seen,
    /// When something was last attempted; `None` while it is under way.
    attempts: BTreeMap<Key, Option<Instant>>,
}

impl RolloutController {
    pub async fn run(self) {
        let ended = || {
            self.decisions.send_replace(Arc::default());
            self.metrics.leave();
        };
        self.leadership.clone().while_held(|| self.lead(), ended).await;
    }

    async fn lead(&self) {
        let (mut memory, mut plans) = (Memory::default(), self.plans.clone());
        let mut under_way = FuturesUnordered::new();
        let mut ticks = time::interval(PERIOD);
        ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(done) = under_way.next() => {
                    memory.done(done);
                    continue;
                }
                _ = ticks.tick() => {}
            }
            let plan = plans.borrow_and_update().clone();
            let Some(plan) = plan else { continue };
            for action in self.follow(&plan, &mut memory) {
                under_way.push(action.carry_out(&self.client));
            }
        }
    }

    /// One look at all roots: publishes what follows, and returns what is to be done.
    fn follow(&self, plan: &Plan, memory: &mut Memory) -> Vec<Action> {
        let workloads = workloads(&plan.snapshot.configs, &plan.snapshot.members);
        let mut decisions = Decisions::new();
        let traffic = OnceCell::new();
        for workload in workloads.iter().filter(|one| one.has_rollout()) {
            if let Some(decision) = self.decide(workload, memory, &traffic) {
                decisions.insert(workload.name(), decision);
            }
        }
        self.decisions.send_if_modified(|before| {
            let differs = **before != decisions;
            if differs {
                *before = Arc::new(decisions);
            }
            differs
        });
        let with_rollout = || workloads.iter().filter(|one| one.has_rollout());
        let statuses = with_rollout().filter_map(|one| Some((one.name(), one.status()?))).collect();
        self.metrics.observe(&mut memory.seen, &statuses);
        let known: BTreeSet<String> = with_rollout().map(Workload::name).collect();
        memory.windows.retain(|root, _| known.contains(root));
        memory.rounds.retain(|root, _| known.contains(root));
        memory.roll_back_errors.retain(|root, _| known.contains(root));
        let mut wanted: Vec<Action> = workloads.iter().flat_map(|workload| action::of(workload, plan)).collect();
        wanted.extend(action::of_others(plan, &workloads));
        wanted.retain(|action| memory.may_try(action));
        wanted
    }

    /// What the status says next, if that differs. A decision that is not written yet stays.
    fn decide(
        &self,
        workload: &Workload<'_>,
        memory: &mut Memory,
        traffic: &OnceCell<TrafficByPod>,
    ) -> Option<Decision> {
        let rule = workload.rule.rollout.as_ref()?;
        let (name, status) = (workload.name(), workload.status());
        let pending = self.decisions.borrow().get(&name).filter(|one| one.base.as_ref() == status).cloned();
        if pending.is_some() {
            return pending;
        }
        let facts = workload.facts();
        let is_idle = facts.iter().all(|pod| status.is_some_and(|status| status.promoted == pod.revision));
        let loads = if is_idle { None } else { self.loads(workload) };
        let trial = status.and_then(|status| status.trial.as_ref());
        let check = trial.and_then(|trial| self.check(rule, workload, trial, memory, traffic));
        let canary = workload.rule.canary.as_ref();
        let shadow = check.as_ref().and_then(|_| shadow::report(workload, trial?, traffic.get()?));
        let observed = Observed {
            pods: &facts,
            command: workload.command(),
            check,
            loads: loads.as_ref(),
            shadow: shadow.as_ref(),
            canary: canary.map(|canary| (canary.in_shard_hash.clone(), canary.in_namespaces.clone())),
            roll_back_error: memory.roll_back_errors.get(&name).map(String::as_str),
            now: Timestamp::now(),
        };
        let next = rollout::next(rule, status, &observed).filter(|next| Some(next) != status)?;
        log(&name, status, &next);
        Some(Decision { base: status.cloned(), next })
    }

    /// The check that is due, of a version that owns something.
    fn check(
        &self,
        rule: &Rollout,
        workload: &Workload<'_>,
        trial: &Trial,
        memory: &mut Memory,
        traffic: &OnceCell<TrafficByPod>,
    ) -> Option<Outcome> {
        let owns = matches!(trial.phase, TrialPhase::Analysing | TrialPhase::Waiting | TrialPhase::Promoting);
        let (name, now) = (workload.name(), Instant::now());
        let last = memory.windows.remove(&name).filter(|_| owns);
        if !owns {
            memory.rounds.remove(&name);
            return None;
        }
        let owned = workload.owned_on_trial();
        let mut window = match last {
            Some(window) if window.is_of(trial, &owned) => window,
            last => Window::begin(trial, owned, last, now),
        };
        let [new, old] = counts(workload, traffic.get_or_init(|| self.store.traffic().newest()));
        window.observe(new.iter().chain(&old), now);
        let is_due = window.is_due(rule.interval(), now);
        if !is_due {
            memory.rounds.remove(&name);
        }
        let metrics = is_due.then(|| self.check_metrics(rule, workload, trial, memory)).flatten();
        let check = metrics.map(|metrics| {
            let second = workload.status().is_some_and(|status| status.second);
            let mut objects = [!second, second].map(|second| self.objects_of(workload, second));
            if let Some(slice) = workload.shadowed() {
                objects[0] = self.objects_where(workload, |slot, namespace| slice.has(slot, namespace));
            }
            window.check([&new, &old], objects, &metrics, now)
        });
        memory.windows.insert(name, window);
        check
    }

    /// The metrics of the check that is due. `None` while their queries run; the first call sends these.
    fn check_metrics(
        &self,
        rule: &Rollout,
        workload: &Workload<'_>,
        trial: &Trial,
        memory: &mut Memory,
    ) -> Option<Vec<Outcome>> {
        if rule.metrics().is_empty() {
            return Some(Vec::new());
        }
        let name = workload.name();
        let round = memory.rounds.remove(&name).filter(|round| round.is_of(rule.metrics(), &trial.revision));
        let round = match round.map(Round::progress) {
            Some(Progress::Done(outcomes)) => return Some(outcomes),
            Some(Progress::Running(round)) => round,
            Some(Progress::Lost) | None => Round::begin(rule.metrics(), placeholders(workload, trial), &self.drain),
        };
        memory.rounds.insert(name, round);
        None
    }

    /// How many objects the shards of a version own; 0 before all of its kinds are listed.
    fn objects_of(&self, workload: &Workload<'_>, second: bool) -> u64 {
        let Some(table) = workload.table() else { return 0 };
        let is_its = |owner: &str| has_second_name(owner) == second;
        self.objects_where(workload, |slot, namespace| table.owner(slot, namespace).is_some_and(is_its))
    }

    /// How many objects there are where `counts` says so; 0 before all kinds are listed.
    fn objects_where(&self, workload: &Workload<'_>, counts: impl Fn(Slot, Option<&str>) -> bool) -> u64 {
        let covers = |group: &str, plural: &str| is_divided(workload, group, plural);
        let mut objects = 0;
        let is_complete = self.objects.for_each(covers, |slot, namespace, count| {
            if counts(slot, namespace) {
                objects += count;
            }
        });
        if is_complete { objects } else { 0 }
    }

    /// `None` before all of its kinds are listed.
    fn loads(&self, workload: &Workload<'_>) -> Option<SlotLoads> {
        let mut loads = SlotLoads::default();
        let covers = |group: &str, plural: &str| is_divided(workload, group, plural);
        let is_complete = self.objects.for_each(covers, |slot, _, count| {
            if let Some(load) = loads.get_mut(usize::from(slot.number())) {
                *load += count;
            }
        });
        is_complete.then_some(loads)
    }
}

impl Memory {
    /// Whether it is not under way, and the last attempt was long enough ago; then this is one.
    fn may_try(&mut self, action: &Action) -> bool {
        let key = action.key();
        let last = self.attempts.get(&key);
        let may = last.is_none_or(|last| last.is_some_and(|ended_at| ended_at.elapsed() >= RETRY));
        if may {
            self.attempts.insert(key, None);
        }
        may
    }

    fn done(&mut self, Done { key, roll_back }: Done) {
        let now = Instant::now();
        self.attempts.retain(|_, ended_at| ended_at.is_none_or(|at| now.saturating_duration_since(at) < RETRY));
        self.attempts.insert(key, Some(now));
        match roll_back {
            Some((root, Some(error))) => drop(self.roll_back_errors.insert(root, error)),
            Some((root, None)) => drop(self.roll_back_errors.remove(&root)),
            None => {}
        }
    }
}

/// What stands in queries in place of placeholders.
fn placeholders(workload: &Workload<'_>, trial: &Trial) -> Placeholders {
    let metadata = &workload.root.metadata;
    let pods = workload.pods.iter().filter(|pod| workload.is_on_trial(pod) && !pod.stopped);
    let pods: Vec<&str> = pods.map(|pod| pod.name.name.as_str()).collect();
    Placeholders {
        revision: trial.revision.clone(),
        promoted: workload.status().map(|status| status.promoted.clone()).unwrap_or_default(),
        namespace: namespace(metadata).to_owned(),
        root: metadata.name.clone().unwrap_or_default(),
        pods: pods.join("|"),
    }
}

/// What the pods of the version on trial have done, and those of the promoted one.
fn counts(workload: &Workload<'_>, traffic: &TrafficByPod) -> [VersionCounts; 2] {
    let counts = |is_of: &dyn Fn(&Member) -> bool| -> VersionCounts {
        let pods = workload.pods.iter().filter(|pod| is_of(pod) && !pod.stopped);
        let pods = pods.map(|pod| {
            let known = traffic.get(&pod.name).filter(|known| known.uid == pod.uid);
            let traffic = known.map(|known| known.state.clone()).unwrap_or_default();
            (pod.uid.clone(), PodCounts { traffic, restarts: pod.restarts })
        });
        pods.collect()
    };
    [counts(&|pod| workload.is_on_trial(pod)), counts(&|pod| workload.is_promoted(pod))]
}

/// Whether the root divides the kind.
fn is_divided(workload: &Workload<'_>, group: &str, plural: &str) -> bool {
    let divided = &workload.rule.resource_selector;
    let names = |matched: &ResourceMatch| matched.covers(group, plural);
    divided.is_empty()
        || divided.iter().any(|one| {
            one.relate_resources.is_empty() || one.relate_resources.iter().any(|one| names(&ResourceMatch::from(one)))
        })
}

fn log(root: &str, before: Option<&RolloutStatus>, next: &RolloutStatus) {
    let phase =
        |status: &RolloutStatus| status.trial.as_ref().map(|trial| (trial.revision.clone(), trial.phase, trial.step));
    if before.and_then(phase) != phase(next) {
        let trial = next.trial.as_ref();
        let (revision, message) = trial.map(|trial| (trial.revision.as_str(), trial.message.as_str())).unzip();
        let phase = trial.map(|trial| format!("{:?}", trial.phase));
        info!(root, promoted = next.promoted, revision, phase, message, "rollout goes on");
    }
}
