//! Decides how ownership moves: revoke, prove, grant.
//!
//! [`next`] takes the ownership table as it stands, the table that is wanted, and what is proved about the writers. It
//! returns the next table to write, and what the rest waits for. It is pure. The caller writes the table only over the
//! version that it read: the API server refuses a write over a newer one.
//!
//! **Revoke.**
//! - A slot, a pin or a pod whose owner changes is taken out of the table. It goes into `revoked`, with its former
//!   owner. `revoked.epoch` becomes the epoch of that table. One table revokes all that moves.
//! - A pin that appears or goes moves one namespace out of its slot, or into it. The namespace is revoked from the
//!   owner that it has. A pin that changes no owner is entered or removed at once. A pin whose owner is to get the slot
//!   stays until the slot has come.
//! - A namespace in `revoked.namespaces` belongs to nobody, whatever its slot.
//! - In a table that was never written nothing is revoked: all is granted at once. But where the operator's pods may
//!   have worked by another table ([`Desired::taken_up`]), each slot is revoked from every owner ([`EVERY_OWNER`]). So
//!   is a slot that a table which was written before does not have.
//! - What stands in the table and in `revoked` at once, or is revoked in an epoch that the table has not reached, is
//!   revoked again.
//!
//! **Prove.** A move is proved when its former owner cannot write any more. Silence is no proof.
//! - Where no pod is left, nobody can write.
//! - Where the API server fences, each of its endpoints enforces `revoked.epoch` or a later one. The former owner's
//!   proxies have acknowledged such an epoch, too, so that no write is in flight; or they are gone or have lapsed. The
//!   unsharded pods have no proxy to acknowledge anything, and need none here.
//! - Where it does not, each pod of the former owner has acknowledged such an epoch, is gone or has lapsed. An
//!   unsharded pod must be gone.
//! - A pod whose own move is not proved counts for its former owner.
//! - A pod that writes for the new owner is not asked. So what returns to its former owner waits for no pod.
//!
//! **Grant.** What is proved leaves `revoked`, and enters the table for the owner that is wanted by now.
//!
//! **Pods.** A new pod is entered at once: nobody loses anything. So is one that stood by ([`STANDBY`]). A pod leaves
//! the table only when it is gone. So enter a pod when it runs, and not before: a move from its owner waits for it.
//!
//! [`STANDBY`]: crate::ownership::STANDBY
//!
//! **Epochs.** The epoch grows exactly when the content of the table changes. It becomes greater than every epoch that
//! the table or [`Desired`] names.

use std::collections::BTreeMap;

use crate::ownership::{MAX_EPOCH, Ownership};
use crate::slots::{NamespaceHash, Slot};

mod draft;
mod proof;

use draft::Draft;

/// The former owner of what any owner may have had.
pub const EVERY_OWNER: &str = "";

/// The ownership that is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// The owner of each slot. A slot that is missing shall belong to nobody.
    pub slots: BTreeMap<Slot, String>,
    /// The owner of each pinned namespace.
    pub namespaces: BTreeMap<String, String>,
    /// The shard of each pod, by the pod's name. It follows at once: nobody writes by it.
    pub pods: BTreeMap<String, String>,
    /// The owner of each pod that is not gone, by UID.
    pub pod_uids: BTreeMap<String, String>,
    /// The newest epoch that the operator has used. 0: it never had a table.
    pub epoch: u64,
    /// Whether its pods may have worked before, by a table that is not there any more.
    pub taken_up: bool,
}

/// How far the API server's own fence is proved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Server {
    /// The API server does not fence.
    #[default]
    None,
    /// Every endpoint of the API server has shown that it enforces at least this epoch; 0: not every one has.
    Enforces(u64),
}

/// What is known of one pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodEvidence {
    /// The newest epoch that its proxy has acknowledged: no write of the pod to what it does not own in that epoch is
    /// in flight or will pass, even if the proxy restarts.
    pub acknowledged: Option<u64>,
    /// All its containers have ended. It never writes again.
    pub gone: bool,
    /// Its proxy lets no write through until it gets a later table than the one that it had, and cannot be
    /// given an older one: its policy lapses, the leader has not confirmed it for [`LAPSED_AFTER`], and confirms none
    /// of an earlier epoch any more. Where the API server fences: its proxy has kept silent for as long as the caller
    /// waits.
    ///
    /// [`LAPSED_AFTER`]: crate::policy::fence::LAPSED_AFTER
    pub lapsed: bool,
}

/// What is known of the writers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Of the API server.
    pub server: Server,
    /// By UID. A pod that is missing has shown nothing.
    pub pods: BTreeMap<String, PodEvidence>,
}

/// What a move waits for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waiting {
    /// Every endpoint of the API server has to enforce this epoch.
    Server {
        /// Of the table that revoked.
        epoch: u64,
    },
    /// The pod's proxy has to acknowledge `epoch`, or the pod has to go.
    Pod {
        /// Of the pod.
        uid: String,
        /// For which it may write yet.
        owner: String,
        /// Of the table that revoked.
        epoch: u64,
    },
    /// The pod has to go: it has no proxy that could acknowledge anything, or no owner is wanted for it.
    PodEnd {
        /// Of the pod.
        uid: String,
        /// For which it may write yet.
        owner: String,
    },
    /// The table has to change, and no epoch is left for another. Only a table that was written by hand can be there.
    Epoch,
}

/// The next table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// To be written if it differs from the present one.
    pub table: Ownership,
    /// What has to be shown before all that `table` revokes can be granted; sorted, each once.
    pub waiting: Vec<Waiting>,
}

/// The table that follows `current` on the way to `desired`.
///
/// The same input gives the same table. The caller writes the table, and asks again when it is written: a table that
/// revokes may wait for nothing. A table that revokes nothing anew is followed by itself until more is shown.
pub fn next(current: &Ownership, desired: &Desired, hash: NamespaceHash, evidence: &Evidence) -> Step {
    let revoked = current.revoked.as_ref().map_or(0, |revoked| revoked.epoch);
    let used = current.epoch.max(desired.epoch).max(revoked);
    let epoch = used.saturating_add(1);
    let draft = Draft::new(current, desired, hash).step(epoch, evidence);
    let waiting = draft.waiting(evidence);
    match draft.into_table(current, epoch) {
        Some(_) if used >= MAX_EPOCH => Step { table: current.clone(), waiting: vec![Waiting::Epoch] },
        Some(table) => Step { table, waiting },
        None => Step { table: current.clone(), waiting },
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
