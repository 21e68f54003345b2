//! Whether everything gets an owner again, from wherever the world is: under a fair schedule, while one manager lives.

use std::sync::PoisonError;

use crate::model::{Action, Handover, State};
use crate::setup::{Fence, OBJECTS, OWNERS};

/// In which a fair schedule ends: a revocation, its proof and its grant, after two ticks each where only proxies fence.
const ROUNDS: usize = 8;

/// Whether the last goal is reached, and nothing is revoked.
pub(crate) fn is_reached(model: &Handover, state: &State) -> bool {
    let (truth, goal) = (model.facts(state, state.newest()), model.setup.goals.last());
    let Some(goal) = goal else { return false };
    let owners = [goal.slots[0], goal.pin.unwrap_or(goal.slots[0]), goal.slots[1]];
    let reached = |object| truth.owner(object).map(|owner| OWNERS[usize::from(owner)]) == Some(owners[object]);
    truth.revoked == 0 && (0..OBJECTS.len()).all(reached)
}

/// Whether the last goal is reached from `state`, with proxies that answer and with proxies that never do again.
pub(crate) fn recovers(model: &Handover, state: &State) -> bool {
    let begin = begin(model, state);
    let recovered = || model.recovered.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = recovered().get(&begin).copied() {
        return known;
    }
    let recovers = [true, false].into_iter().all(|answering| {
        let mut state = begin.clone();
        (0..ROUNDS).any(|_| {
            round(model, &mut state, answering);
            is_reached(model, &state)
        })
    });
    recovered().insert(begin, recovers);
    recovers
}

/// One manager lives. What was under way has arrived.
fn begin(model: &Handover, state: &State) -> State {
    let mut state = state.clone();
    state.managers.truncate(1);
    state.goal = u8::try_from(model.setup.goals.len()).expect("few goals") - 1;
    for action in [Action::Lead(0), Action::Read(0)] {
        state = model.apply(&state, action).unwrap_or(state);
    }
    let newest = state.newest();
    state.servers.fill(newest);
    for pod in &mut state.pods {
        pod.land();
    }
    state.canonical()
}

/// Everything that lives acts once.
fn round(model: &Handover, state: &mut State, answering: bool) {
    let newest = state.newest();
    state.servers.fill(newest);
    let mut act = |action| {
        if let Some(after) = model.apply(state, action) {
            *state = after;
        }
    };
    act(Action::Read(0));
    let proxy_only = model.fences_by(Fence::Proxy);
    for (at, pod) in model.setup.pods.iter().enumerate() {
        if pod.has_proxy && answering {
            act(Action::Push(0, at));
            act(Action::Confirm(0, at));
            act(Action::Acknowledge(at));
        }
        if proxy_only && !pod.has_proxy {
            // The rollout ends it.
            act(Action::End(at));
        }
    }
    act(Action::Decide(0));
    if proxy_only {
        act(Action::Tick);
    }
}
