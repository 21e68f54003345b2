//! The policies that were delivered to a proxy, and its verdicts.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::wire::{
    GuardState, MAX_GUARD_STATES, MAX_REASON_BYTES, PodId, PolicySummary, Verdict, WebhookState,
};
use tokio::time::Instant;
use tracing::{info, warn};

use super::PushService;
use crate::push::policy_store::EnrolledPod;
use crate::rules::compile::CompiledPolicy;
use crate::rules::pod::PodName;

/// The last policy that a proxy was sent for one pod, and its verdict.
pub(super) struct Delivery {
    pub(super) uid: String,
    pub(super) node: Option<String>,
    pub(super) inside: bool,
    pub(super) digest: u64,
    /// Epoch in force, by the last verdict.
    pub(super) epoch: u64,
    /// Digest of the policy in force; 0 where unknown.
    pub(super) in_force: u64,
    pub(super) refused: Option<String>,
    /// Verdicts on this policy.
    verdicts: u32,
    /// What the pod's guards have done, as the proxy reported last.
    pub(super) guards: Arc<[GuardState]>,
    /// What becomes of calls to the pod's webhook, if the proxy has said it.
    pub(super) webhook: Option<WebhookState>,
    /// Reports on guards, webhook, requests and watches since then.
    state_reports: (Instant, u32),
}

/// A proxy that says the same again and again.
#[derive(Debug)]
pub(super) struct TooMany;

/// Reports on the guards, the webhook, the requests and the watches of one pod in [`STATE_REPORTS_WITHIN`]. A proxy
/// sends one of each a second at most; some may have waited.
const MOST_STATE_REPORTS: u32 = 64;

const STATE_REPORTS_WITHIN: Duration = Duration::from_secs(10);

/// Longest name of a breaker or a rule, in bytes.
const MAX_NAME_BYTES: usize = 512;

/// A policy is applied or refused, and perhaps tried again.
const MOST_VERDICTS: u32 = 16;

/// Recently removed pods: verdicts on them may still be under way.
#[derive(Debug, Default)]
pub(super) struct RemovedPods(VecDeque<PodId>);

/// Many times the pods of a node.
const MOST_GONE: usize = 1024;

impl RemovedPods {
    pub(super) fn remember(&mut self, pod: PodId) {
        if self.0.len() >= MOST_GONE {
            self.0.pop_front();
        }
        self.0.push_back(pod);
    }

    pub(super) fn has(&self, pod: &PodId) -> bool {
        self.0.contains(pod)
    }
}

impl Delivery {
    pub(super) fn of(pod: &EnrolledPod, policy: &CompiledPolicy, epoch: u64) -> Self {
        Self {
            uid: pod.uid.clone(),
            node: pod.node.clone(),
            inside: policy.is_served_inside(),
            digest: policy.digest(),
            epoch,
            in_force: 0,
            refused: None,
            verdicts: 0,
            guards: Arc::default(),
            webhook: None,
            state_reports: (Instant::now(), 0),
        }
    }

    /// For a proxy that keeps the policy of this summary.
    pub(super) fn left_with(self, known: &PolicySummary) -> Self {
        let webhook = known.webhook.clone().map(WebhookState::truncated);
        Self { digest: known.digest, in_force: known.digest, webhook, ..self }
    }

    /// What the proxy has said of guards and webhook under the last policy stays with the next.
    pub(super) fn with_states_of(self, before: Option<&Self>) -> Self {
        let Some(before) = before.filter(|before| before.uid == self.uid) else { return self };
        let (guards, webhook) = (before.guards.clone(), before.webhook.clone());
        Self { guards, webhook, state_reports: before.state_reports, ..self }
    }

    /// Takes a report on the pod's guards. Returns whether it says something new, and the proxy has said what of the
    /// last policy: until then, what is known of the one before holds.
    pub(super) fn take_guards(&mut self, mut states: Vec<GuardState>) -> Result<bool, TooMany> {
        self.count_state_report()?;
        states.truncate(MAX_GUARD_STATES);
        let longest = |state: &GuardState| state.breaker.len().max(state.rule.len()).max(state.last_refused.len());
        states.retain(|state| longest(state) <= MAX_NAME_BYTES);
        let is_new = *self.guards != *states;
        if is_new {
            self.guards = states.into();
        }
        Ok(is_new && self.has_verdict())
    }

    /// Takes a report on the pod's webhook. Returns the same as [`Self::take_guards`].
    pub(super) fn take_webhook(&mut self, state: Option<WebhookState>) -> Result<bool, TooMany> {
        self.count_state_report()?;
        let state = state.map(WebhookState::truncated);
        let is_new = self.webhook != state;
        self.webhook = state;
        // Of a pod with a sidecar, the sidecar has the verdict.
        Ok(is_new && (self.inside || self.has_verdict()))
    }

    /// Counts a report on a state, wherever the state is kept.
    pub(super) fn count_state_report(&mut self) -> Result<(), TooMany> {
        let (since, count) = &mut self.state_reports;
        if since.elapsed() >= STATE_REPORTS_WITHIN {
            (*since, *count) = (Instant::now(), 0);
        }
        *count += 1;
        if *count > MOST_STATE_REPORTS { Err(TooMany) } else { Ok(()) }
    }

    fn has_verdict(&self) -> bool {
        self.in_force != 0 || self.refused.is_some()
    }

    /// Takes a verdict. Returns whether it counts: one on an older policy does not.
    pub(super) fn take_verdict(
        &mut self,
        verdict: Verdict,
        pod: &PodName,
        push: &PushService,
    ) -> Result<bool, TooMany> {
        if self.digest != verdict.digest {
            return Ok(false);
        }
        self.verdicts = self.verdicts.saturating_add(1);
        if self.verdicts > MOST_VERDICTS {
            return Err(TooMany);
        }
        self.epoch = verdict.epoch;
        self.refused = (!verdict.refused.is_empty()).then(|| {
            let mut reason = verdict.refused;
            reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
            reason
        });
        self.in_force = if self.refused.is_some() { 0 } else { self.digest };
        if let Some(reason) = &self.refused {
            push.metrics.refused.inc();
            warn!(%pod, epoch = self.epoch, reason, "a proxy refused its policy");
        } else {
            push.metrics.applied.inc();
            info!(%pod, epoch = self.epoch, "policy in force");
        }
        Ok(true)
    }
}

/// The proxy's report, by pod.
pub(super) fn known(known: Vec<PolicySummary>) -> HashMap<PodName, PolicySummary> {
    known.into_iter().filter_map(|known| Some((known.pod.as_ref()?.pod_name(), known))).collect()
}

/// Whether the report is about this pod, and its UID, if it has one.
pub(super) fn is_of(known: &PolicySummary, pod: &EnrolledPod) -> bool {
    let same = |id: &PodId| id.pod_name() == pod.name && (id.uid.is_empty() || id.uid == pod.uid);
    known.pod.as_ref().is_some_and(same)
}
