//! What is to be done in the cluster by a rollout's status, one object at a time.

use std::collections::BTreeSet;
use std::time::Duration;

use ctrlmesh_common::api::TrialPhase;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use jiff::Timestamp;
use kube::Client;
use tokio::time;
use tracing::{info, warn};

use super::gate::{self, GateState};
use super::workload::{self, RollBack};
use crate::cluster::plan::Plan;
use crate::cluster::write_error::{WriteError, within};
use crate::rules::object_name::namespace;
use crate::rules::pod::{DELETED_FIRST, DeletionCost, Member, PodName};
use crate::rules::rollout::{WantedGate, Workload, differs};
use crate::rules::shard::{self, Share};
use crate::rules::shared::each;
use crate::telemetry;

/// Limit for one action.
const DEADLINE: Duration = Duration::from_secs(10);

/// Longest message in the condition of a pod, in characters.
const MAX_MESSAGE: usize = 1000;

/// What is done, and the object.
pub(super) type Key = (&'static str, String);

/// One write.
#[derive(Clone, Debug)]
pub(super) enum Action {
    Gate { pod: PodName, uid: String, state: GateState },
    Cost { pod: PodName, uid: String, cost: Option<i32> },
    Replace { pod: PodName, uid: String },
    RollBack { root: String, namespace: String, workload: workload::Workload, from: String, to: String },
}

/// What came of an action.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) key: Key,
    /// Of a template that was to be put back: the root, and why it was not.
    pub(super) roll_back: Option<(String, Option<String>)>,
}

/// What brings pods and workload to what the status says.
pub(super) fn of(workload: &Workload<'_>, plan: &Plan) -> Vec<Action> {
    let now = Timestamp::now().as_second();
    let deleted_first = workload.deleted_first(now);
    let mut actions = costs(workload, &deleted_first);
    let are_marked = workload.are_marked(&deleted_first);
    let shares = if workload.is_promoting() { shares(workload, plan) } else { Vec::new() };
    let staying = workload.pods.iter().filter(|pod| !pod.terminating);
    actions.extend(staying.filter_map(|pod| gate_of(pod, workload.gate(pod, &shares, are_marked))));
    let update_revision = workload.rule.target_stateful_set.as_deref().and_then(|set| {
        let name = format!("{}/{set}", namespace(&workload.root.metadata));
        plan.snapshot.update_revisions.get(&name).map(String::as_str)
    });
    let stuck = workload.stuck(update_revision, now);
    actions.extend(stuck.into_iter().map(|pod| Action::Replace { pod: pod.name.clone(), uid: pod.uid.clone() }));
    actions.extend(roll_back(workload));
    actions
}

/// Lets pods be Ready that have the gate, and no root any more. Takes our mark from others that have none.
pub(super) fn of_others(plan: &Plan, workloads: &[Workload<'_>]) -> Vec<Action> {
    let waits = |pod: &Member| pod.gate.as_ref().is_some_and(|gate| gate.holds != Some(true));
    let is_marked = |pod: &Member| pod.deletion_cost == DeletionCost::DeletedFirst;
    let touched = |pod: &&Member| (waits(pod) || is_marked(pod)) && !pod.terminating;
    let known: BTreeSet<&str> = workloads.iter().flat_map(|one| &one.pods).map(|pod| pod.uid.as_str()).collect();
    let others = each(&plan.snapshot.members).filter(touched).filter(|pod| !known.contains(pod.uid.as_str()));
    let wanted = || WantedGate { holds: true, reason: "NoRollout", message: "it has no root".to_owned() };
    let unmark = |pod: &Member| Action::Cost { pod: pod.name.clone(), uid: pod.uid.clone(), cost: None };
    let actions = |pod: &Member| [gate_of(pod, Some(wanted())), is_marked(pod).then(|| unmark(pod))];
    others.flat_map(actions).flatten().collect()
}

fn costs(workload: &Workload<'_>, deleted_first: &BTreeSet<&str>) -> Vec<Action> {
    if workload.rule.target_deployment.is_none() {
        return Vec::new();
    }
    let cost = |pod: &&Member| {
        let cost = match (deleted_first.contains(pod.uid.as_str()), pod.deletion_cost) {
            (true, DeletionCost::None) => Some(DELETED_FIRST),
            (false, DeletionCost::DeletedFirst) => None,
            _ => return None,
        };
        Some(Action::Cost { pod: pod.name.clone(), uid: pod.uid.clone(), cost })
    };
    workload.pods.iter().filter(|pod| !pod.terminating).filter_map(cost).collect()
}

fn gate_of(pod: &Member, wanted: Option<WantedGate>) -> Option<Action> {
    let (gate, mut wanted) = (pod.gate.as_ref()?, wanted?);
    wanted.message = wanted.message.chars().take(MAX_MESSAGE).collect();
    if !differs(gate, &wanted) {
        return None;
    }
    let WantedGate { holds, reason, message } = wanted;
    let state = GateState { holds, reason: reason.to_owned(), message };
    Some(Action::Gate { pod: pod.name.clone(), uid: pod.uid.clone(), state })
}

fn roll_back(workload: &Workload<'_>) -> Option<Action> {
    let status = workload.status().filter(|_| workload.has_rollout())?;
    let trial = status.trial.as_ref().filter(|trial| trial.phase == TrialPhase::RollingBack)?;
    let rule = workload.rule;
    let target = match (&rule.target_deployment, &rule.target_stateful_set) {
        (Some(deployment), _) => workload::Workload::Deployment(deployment.clone()),
        (None, set) => workload::Workload::StatefulSet(set.clone()?),
    };
    Some(Action::RollBack {
        root: workload.name(),
        namespace: namespace(&workload.root.metadata).to_owned(),
        workload: target,
        from: trial.revision.clone(),
        to: status.promoted.clone(),
    })
}

/// The shares of the root's division; none where it cannot be divided.
fn shares(workload: &Workload<'_>, plan: &Plan) -> Vec<Share> {
    let snapshot = &plan.snapshot;
    let siblings: Vec<_> = each(&snapshot.configs).collect();
    let divided = shard::divide(workload.root, &snapshot.scheme.in_force, &snapshot.namespaces, &siblings);
    let shards = divided.ok().flatten().unwrap_or_default();
    shards.into_iter().map(|shard| shard.share).collect()
}

impl Action {
    pub(super) fn key(&self) -> Key {
        match self {
            Self::Gate { uid, .. } => ("gate", uid.clone()),
            Self::Cost { uid, .. } => ("deletion cost", uid.clone()),
            Self::Replace { uid, .. } => ("replacement", uid.clone()),
            Self::RollBack { root, from, .. } => ("template", format!("{root} {from}")),
        }
    }

    /// Never fails: what is not done is decided again.
    pub(super) fn carry_out(self, client: &Client) -> BoxFuture<'static, Done> {
        let client = client.clone();
        let key = self.key();
        async move {
            let roll_back = Box::pin(self.write(&client)).await;
            Done { key, roll_back }
        }
        .boxed()
    }

    async fn write(self, client: &Client) -> Option<(String, Option<String>)> {
        let (what, _) = self.key();
        match self {
            Self::Gate { pod, uid, state } => {
                log_failure(&pod, what, within(DEADLINE, gate::set(client, &pod, &uid, &state)).await);
            }
            Self::Cost { pod, uid, cost } => {
                let set = gate::set_deletion_cost(client, &pod, &uid, cost);
                log_failure(&pod, what, within(DEADLINE, set).await);
            }
            Self::Replace { pod, uid } => {
                info!(%pod, "replace a pod of a revision that its StatefulSet does not have any more");
                log_failure(&pod, what, within(DEADLINE, workload::replace_stuck(client, &pod, &uid)).await);
            }
            Self::RollBack { root, namespace, workload, from, to } => {
                let put_back = workload::roll_back(client, &namespace, &workload, &from, &to);
                let error = match time::timeout(DEADLINE, put_back).await {
                    Ok(Ok(RollBack::NotCurrent)) => None,
                    Ok(Ok(RollBack::RolledBack)) => {
                        info!(root, %workload, to, "template put back");
                        None
                    }
                    Ok(Err(error)) => Some(telemetry::chain(&error)),
                    Err(_elapsed) => Some(format!("the API server did not answer within {DEADLINE:?}")),
                };
                if let Some(error) = &error {
                    warn!(root, %workload, error, "template not put back");
                }
                return Some((root, error));
            }
        }
        None
    }
}

fn log_failure(pod: &PodName, what: &str, done: Result<(), WriteError>) {
    if let Err(error) = done {
        warn!(%pod, what, error = &error as &dyn std::error::Error, "not written; tried again");
    }
}
