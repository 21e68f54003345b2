//! What has a proxy been told, and what does it say that it knows?

use std::collections::{HashMap, VecDeque};

use ctrlmesh_common::wire::{Known, MAX_REASON_BYTES, PodId, Verdict};
use tracing::{info, warn};

use super::Push;
use crate::push::policy_store;
use crate::push::policy_store::Posted;
use crate::rules::pod::PodName;

/// What a proxy has been told of one pod.
pub(super) struct Told {
    pub(super) uid: String,
    pub(super) node: Option<String>,
    pub(super) inside: bool,
    pub(super) digest: u64,
    /// What is in force, and why not more, as far as the proxy has said.
    pub(super) epoch: u64,
    /// The digest of that; 0 where it is not known.
    pub(super) in_force: u64,
    pub(super) refused: Option<String>,
    /// How many verdicts there were on it.
    verdicts: u32,
}

/// How many verdicts there may be on one policy: it is put in force or refused, and perhaps tried again.
const MOST_VERDICTS: u32 = 16;

/// The pods of which a proxy was told that they are gone: what it says of them was on its way.
#[derive(Debug, Default)]
pub(super) struct Gone(VecDeque<PodId>);

/// How many of them are remembered, the newest: many times what a node has.
const MOST_GONE: usize = 1024;

// === impl Gone ===

impl Gone {
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

// === impl Told ===

impl Told {
    pub(super) fn of(posted: &Posted, said: &policy_store::Said, epoch: u64) -> Self {
        Self {
            uid: posted.uid.clone(),
            node: posted.node.clone(),
            inside: said.inside,
            digest: said.digest,
            epoch,
            in_force: 0,
            refused: None,
            verdicts: 0,
        }
    }

    /// The same where this is in force already, and stays so.
    pub(super) fn left_with(self, digest: u64) -> Self {
        Self { digest, in_force: digest, ..self }
    }

    /// Takes the verdict; false where there were too many.
    pub(super) fn judge(&mut self, verdict: Verdict, pod: &PodName, push: &Push) -> bool {
        self.verdicts = self.verdicts.saturating_add(1);
        if self.verdicts > MOST_VERDICTS {
            return false;
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
        true
    }
}

/// What a proxy need not be told again, by pod.
pub(super) fn known(known: Vec<Known>) -> HashMap<PodName, Known> {
    known.into_iter().filter_map(|known| Some((name(known.pod.as_ref()?), known))).collect()
}

/// Whether it is of that incarnation, as far as the proxy knows.
pub(super) fn is_of(known: &Known, posted: &Posted) -> bool {
    let same =
        |pod: &PodId| name(pod) == posted.pod && (pod.uid.is_empty() || pod.uid == posted.uid);
    known.pod.as_ref().is_some_and(same)
}

pub(super) fn name(pod: &PodId) -> PodName {
    PodName { namespace: pod.namespace.clone(), name: pod.name.clone() }
}

pub(super) fn id(pod: &PodName, uid: &str) -> PodId {
    PodId { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: uid.to_owned() }
}
