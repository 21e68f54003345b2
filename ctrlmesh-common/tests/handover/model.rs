//! The world around the protocol: managers, API servers, proxies, pods, and what can happen to them.
//!
//! - **Messages** are lost, doubled and late. A policy can reach a proxy from either manager, whatever that one has
//!   seen so far. An acknowledgement or a probe is a fact: a manager acts on it at any time after, or never.
//! - **Managers** decide at any time, both as if they led; one that died never acts again. Each sees tables late. A
//!   write over a version that is not the newest is refused. One at a time leads: it confirms policies, and it waits by
//!   its own clock. Whoever begins to lead has read the newest table. What a former leader has waited, it still decides
//!   by.
//! - **API servers** admit a write by the table that each sees by then.
//! - **Proxies** restart, pause (they just do nothing), are cut off, or are bypassed.
//! - **Time**, where only proxies fence, comes in ticks. The leader confirms the policy that it wants for a pod by its
//!   table, and no other. A confirmation is valid for one tick, also for policies that come after. A tick after its
//!   policy has expired, or a new policy does not let a write pass, a proxy has no such write in flight any more. So a
//!   proxy has lapsed two ticks after the leader has confirmed it last, has begun to lead, or has seen the revocation,
//!   whichever is the latest.
//!
//! Where a proxy restarts, its writes in flight have ended before it acknowledges anything.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stateright::{Model, Property};

use crate::invariants;
use crate::setup::{Bug, Fence, Setup};
use crate::tables::{Facts, Id, Question, Tables};

/// Ticks for which a confirmation is valid.
const VALID: u8 = 1;

/// Ticks after which a proxy has lapsed that the leader has not confirmed: one more, for the writes in flight.
const LAPSE: u8 = VALID + 1;

/// The most pods of a scenario.
const PODS: usize = 2;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// As they were written, without those that nobody can see any more.
    pub(crate) tables: Vec<Id>,
    /// How many were written.
    pub(crate) written: u8,
    pub(crate) goal: u8,
    /// Which table each API server sees.
    pub(crate) servers: Vec<u8>,
    pub(crate) managers: Vec<Manager>,
    pub(crate) pods: Vec<PodState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Manager {
    /// Which table it sees.
    view: u8,
    leads: bool,
    /// Of each pod, ticks since it has seen the revocation, has begun to lead, and has confirmed the pod's policy.
    waited: [u8; PODS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PodState {
    ended: bool,
    /// Which table its proxy enforces.
    policy: Option<u8>,
    /// The newest epoch that it has acknowledged.
    acknowledged: Option<u8>,
    /// The object, and the owner for which it is written.
    in_flight: Option<(u8, u8)>,
    /// Ticks for which the policy is valid, whichever it is.
    valid: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The managers want the next goal.
    Learn,
    /// A manager sees the next table.
    Advance(usize),
    /// A manager reads the newest table.
    Read(usize),
    /// A manager begins to lead.
    Lead(usize),
    /// A manager decides, with all that is shown.
    Decide(usize),
    /// An API server sees the next table.
    Catch(usize),
    /// A manager's policy reaches a pod's proxy.
    Push(usize, usize),
    /// A manager confirms the policy of a pod's proxy.
    Confirm(usize, usize),
    Write(usize, usize),
    Land(usize),
    Acknowledge(usize),
    Restart(usize),
    End(usize),
    Tick,
}

pub(crate) struct Handover {
    pub(crate) setup: Setup,
    tables: Mutex<Tables>,
    /// Whether everything recovers, by state at the begin of a fair schedule.
    pub(crate) recovered: Mutex<HashMap<State, bool>>,
}

impl Handover {
    pub(crate) fn new(setup: Setup) -> Self {
        Self { setup, tables: Mutex::default(), recovered: Mutex::default() }
    }

    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn facts(&self, state: &State, index: u8) -> Facts {
        self.tables().facts(state.tables[usize::from(index)])
    }

    pub(crate) fn is(&self, bug: Bug) -> bool {
        self.setup.bug == bug
    }

    pub(crate) fn fences_by(&self, fence: Fence) -> bool {
        self.setup.fence == fence
    }

    /// The owners for which a write of `object` can pass by now.
    pub(crate) fn writers(&self, state: &State, object: usize) -> Vec<u8> {
        let mut owners = Vec::new();
        for (at, (pod, fixed)) in state.pods.iter().zip(self.setup.pods).enumerate().filter(|(_, (pod, _))| !pod.ended)
        {
            let in_flight = pod.in_flight.filter(|(written, _)| usize::from(*written) == object);
            owners.extend(in_flight.map(|(_, owner)| owner));
            match self.setup.fence {
                Fence::Server => {
                    let views = state.servers.iter().map(|view| self.facts(state, *view).lets(at, object));
                    owners.extend(views.flatten());
                }
                Fence::Proxy if !fixed.has_proxy => owners.push(2),
                Fence::Proxy => owners.extend(self.proxy_lets(state, at, object)),
            }
        }
        owners
    }

    /// The owner for which the pod's proxy lets a write of `object` pass.
    fn proxy_lets(&self, state: &State, pod: usize, object: usize) -> Option<u8> {
        let PodState { policy, valid, .. } = state.pods[pod];
        let expired = self.fences_by(Fence::Proxy) && valid == 0;
        self.facts(state, policy.filter(|_| !expired)?).lets(pod, object)
    }

    fn can_write(&self, state: &State, pod: usize, object: usize) -> Option<u8> {
        let owner = self.proxy_lets(state, pod, object)?;
        let admits = |view: &u8| self.facts(state, *view).lets(pod, object) == Some(owner);
        let passes = self.fences_by(Fence::Proxy) || state.servers.iter().any(admits);
        passes.then_some(owner)
    }

    /// Whether the proxy has nothing in flight that its policy does not let pass.
    fn is_drained(&self, state: &State, pod: usize, policy: u8) -> bool {
        let facts = self.facts(state, policy);
        let in_flight = state.pods[pod].in_flight;
        in_flight.is_none_or(|(object, owner)| facts.lets(pod, usize::from(object)) == Some(owner))
    }

    fn decide(&self, state: &mut State, manager: usize) -> Option<()> {
        let Manager { view, waited, .. } = state.managers[manager];
        if view != state.newest() && !self.is(Bug::AnyVersion) {
            return None;
        }
        let fences = self.fences_by(Fence::Server);
        let epochs = state.servers.iter().map(|view| self.facts(state, *view).epoch);
        let enforced = if self.is(Bug::OneServer) { epochs.max() } else { epochs.min() };
        let lapse = if self.is(Bug::SilenceIsLapse) { 0 } else { LAPSE };
        let pods = state.pods.iter().zip(waited).map(|(pod, waited)| {
            // Where the server fences, a manager waits for as long as a write can be in flight.
            let lapsed = if fences { pod.in_flight.is_none() } else { waited >= lapse };
            (pod.acknowledged, pod.ended, lapsed)
        });
        let question = Question {
            table: state.tables[usize::from(view)],
            goal: state.goal,
            ended: state.pods.iter().map(|pod| pod.ended).collect(),
            server: enforced.filter(|_| fences),
            pods: pods.collect(),
        };
        let before = question.table;
        let after = self.tables().next(question, &self.setup);
        if before == after {
            return None;
        }
        state.tables.push(after);
        state.written += 1;
        self.sees(state, manager, state.newest());
        Some(())
    }

    /// A manager sees a table; what it has waited counts for one revocation only.
    fn sees(&self, state: &mut State, manager: usize, view: u8) {
        let before = self.facts(state, state.managers[manager].view).revoked;
        let after = self.facts(state, view).revoked;
        let manager = &mut state.managers[manager];
        manager.view = view;
        if before != after {
            manager.waited = [0; PODS];
        }
    }

    fn lead(&self, state: &mut State, manager: usize) {
        if !self.is(Bug::StaleConfirmation) {
            self.sees(state, manager, state.newest());
        }
        for (at, one) in state.managers.iter_mut().enumerate() {
            one.leads = at == manager;
        }
        state.managers[manager].waited = [0; PODS];
    }

    fn push(&self, state: &mut State, manager: usize, pod: usize) -> Option<()> {
        let Manager { view, .. } = state.managers[manager];
        let policy = &mut state.pods[pod].policy;
        let later = policy.is_none_or(|policy| view > policy) || self.is(Bug::OlderPolicy);
        later.then(|| *policy = Some(view))
    }

    fn confirm(&self, state: &mut State, manager: usize, pod: usize) -> Option<()> {
        let Manager { view, leads, waited } = state.managers[manager];
        let confirms = leads || self.is(Bug::FollowerConfirms);
        let has_lapsed = self.is(Bug::LapsedConfirmation) && waited[pod] >= LAPSE;
        if !confirms || state.pods[pod].policy != Some(view) && !has_lapsed {
            return None;
        }
        state.pods[pod].valid = VALID;
        if leads {
            state.managers[manager].waited[pod] = 0;
        }
        Some(())
    }

    fn tick(&self, state: &mut State) -> Option<()> {
        let before = state.clone();
        for (at, pod) in state.pods.iter_mut().enumerate() {
            let drained = pod.policy.is_none_or(|policy| self.is_drained(&before, at, policy));
            if pod.valid == 0 || !drained {
                pod.land();
            }
            pod.valid = pod.valid.saturating_sub(1);
        }
        for manager in &mut state.managers {
            let waits = manager.leads && self.facts(&before, manager.view).revoked > 0;
            for waited in manager.waited.iter_mut().filter(|_| waits) {
                *waited = LAPSE.min(*waited + 1);
            }
        }
        (*state != before).then_some(())
    }

    /// What `action` makes of `state`; `None` if nothing.
    pub(crate) fn apply(&self, state: &State, action: Action) -> Option<State> {
        let mut after = state.clone();
        let newest = state.newest();
        match action {
            Action::Learn => after.goal += 1,
            Action::Advance(manager) => self.sees(&mut after, manager, state.managers[manager].view + 1),
            Action::Read(manager) => self.sees(&mut after, manager, newest),
            Action::Lead(manager) => self.lead(&mut after, manager),
            Action::Decide(manager) => self.decide(&mut after, manager)?,
            Action::Catch(server) => after.servers[server] += 1,
            Action::Push(manager, pod) => self.push(&mut after, manager, pod)?,
            Action::Confirm(manager, pod) => self.confirm(&mut after, manager, pod)?,
            Action::Write(pod, object) => {
                let owner = self.can_write(state, pod, object)?;
                after.pods[pod].in_flight = Some((u8::try_from(object).ok()?, owner));
            }
            Action::Land(pod) => after.pods[pod].land(),
            Action::Acknowledge(pod) => {
                let policy = state.pods[pod].policy?;
                let epoch = self.facts(state, policy).epoch;
                let drained = self.is(Bug::AcknowledgeBeforeDrain) || self.is_drained(state, pod, policy);
                if !drained || state.pods[pod].acknowledged >= Some(epoch) {
                    return None;
                }
                after.pods[pod].acknowledged = Some(epoch);
            }
            Action::Restart(pod) => {
                let pod = &mut after.pods[pod];
                (pod.in_flight, pod.valid) = (None, 0);
                if self.is(Bug::ForgetfulProxy) {
                    pod.policy = None;
                }
            }
            Action::End(pod) => {
                let PodState { acknowledged, .. } = state.pods[pod];
                after.pods[pod] = PodState { ended: true, policy: None, acknowledged, in_flight: None, valid: 0 };
            }
            Action::Tick => self.tick(&mut after)?,
        }
        (after != *state).then(|| after.canonical())
    }
}

impl PodState {
    /// What is in flight has ended.
    pub(crate) fn land(&mut self) {
        self.in_flight = None;
    }
}

impl State {
    pub(crate) fn newest(&self) -> u8 {
        u8::try_from(self.tables.len()).expect("few tables") - 1
    }

    /// Without the tables that nobody can see any more. Managers are alike, and so are API servers.
    pub(crate) fn canonical(mut self) -> Self {
        let views = self.managers.iter().map(|manager| manager.view).chain(self.servers.iter().copied());
        let least = views.chain(self.pods.iter().filter_map(|pod| pod.policy)).min().unwrap_or_default();
        self.tables.drain(..usize::from(least));
        self.managers.iter_mut().for_each(|manager| manager.view -= least);
        self.servers.iter_mut().for_each(|view| *view -= least);
        self.pods.iter_mut().filter_map(|pod| pod.policy.as_mut()).for_each(|policy| *policy -= least);
        self.managers.sort_unstable();
        self.servers.sort_unstable();
        self
    }
}

impl Model for Handover {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let first = self.tables().first(&self.setup);
        let epoch = self.tables().facts(first).epoch;
        let manager = |leads| Manager { view: 0, leads, waited: [0; PODS] };
        let pods = self.setup.pods.iter().map(|pod| PodState {
            ended: false,
            policy: pod.has_proxy.then_some(0),
            acknowledged: pod.has_proxy.then_some(epoch),
            in_flight: None,
            valid: if pod.has_proxy && self.fences_by(Fence::Proxy) { VALID } else { 0 },
        });
        let servers = if self.fences_by(Fence::Server) { vec![0; 2] } else { Vec::new() };
        vec![State {
            tables: vec![first],
            written: 1,
            goal: 0,
            servers,
            managers: vec![manager(false), manager(true)],
            pods: pods.collect(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let newest = state.newest();
        let proxy_only = self.fences_by(Fence::Proxy);
        if usize::from(state.goal) + 1 < self.setup.goals.len() {
            actions.push(Action::Learn);
        }
        for (at, manager) in state.managers.iter().enumerate() {
            actions.push(Action::Decide(at));
            if manager.view < newest {
                actions.push(Action::Advance(at));
            }
            if proxy_only {
                actions.push(if manager.leads { Action::Read(at) } else { Action::Lead(at) });
            }
        }
        let late = state.servers.iter().enumerate().filter(|(_, view)| **view < newest);
        actions.extend(late.map(|(at, _)| Action::Catch(at)));
        for (at, (pod, fixed)) in state.pods.iter().zip(self.setup.pods).enumerate().filter(|(_, (pod, _))| !pod.ended)
        {
            actions.push(Action::End(at));
            if fixed.has_proxy {
                actions.extend((0..state.managers.len()).map(|manager| Action::Push(manager, at)));
                if proxy_only {
                    actions.extend((0..state.managers.len()).map(|manager| Action::Confirm(manager, at)));
                }
                actions.extend([Action::Acknowledge(at), Action::Restart(at), Action::Land(at)]);
                if pod.in_flight.is_none() {
                    actions.extend(self.setup.written.iter().map(|object| Action::Write(at, *object)));
                }
            }
        }
        if proxy_only {
            actions.push(Action::Tick);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let bounded = matches!(action, Action::Decide(_)) && state.written == self.setup.tables;
        self.apply(state, action).filter(|_| !bounded)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        invariants::all()
    }
}
