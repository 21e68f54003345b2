//! Finds what has to be shown before something that is revoked can be granted.

use std::collections::{BTreeMap, BTreeSet};

use super::draft::{Item, Move};
use super::{EVERY_OWNER, Evidence, PodEvidence, Server, Waiting};
use crate::ownership::{Ownership, Revoked, UNSHARDED};

/// What the evidence proves about the owners of one table.
pub(super) struct Proof<'a> {
    evidence: &'a Evidence,
    /// From which on a proof counts.
    epoch: u64,
    /// Each pod, and an owner for which it may write.
    pods: Vec<(String, String)>,
    /// What is missing, by former and new owner: a batch has few of them.
    by_owners: BTreeMap<(String, Option<String>), BTreeSet<Waiting>>,
    /// Of the pod that was looked at last.
    of_pod: BTreeSet<Waiting>,
}

impl<'a> Proof<'a> {
    pub(super) fn new(table: &Ownership, revoked: &Revoked, evidence: &'a Evidence) -> Self {
        let pods = table.pod_uids.iter().chain(&revoked.pod_uids);
        let pods = pods.map(|(uid, owner)| (uid.clone(), owner.clone())).collect();
        Self { evidence, epoch: revoked.epoch, pods, by_owners: BTreeMap::new(), of_pod: BTreeSet::new() }
    }

    /// Whether it is proved that only the new owner can write.
    pub(super) fn covers(&mut self, one: &Move) -> bool {
        self.missing(one).is_empty()
    }

    pub(super) fn missing(&mut self, one: &Move) -> &BTreeSet<Waiting> {
        if let Item::Pod(uid) = &one.item {
            self.of_pod = self.missing_of_pod(uid, one);
            return &self.of_pod;
        }
        let owners = (one.former.clone(), one.new.clone());
        if !self.by_owners.contains_key(&owners) {
            let missing = self.missing_of_owner(&one.former, one.new.as_deref());
            self.by_owners.insert(owners.clone(), missing);
        }
        &self.by_owners[&owners]
    }

    fn missing_of_pod(&self, uid: &str, one: &Move) -> BTreeSet<Waiting> {
        let pod = match &one.new {
            // It stays what it was.
            Some(new) if *new == one.former => None,
            Some(_) => self.missing_at(uid, &one.former),
            None => Some(Waiting::PodEnd { uid: uid.to_owned(), owner: one.former.clone() }),
        };
        self.missing_at_server().into_iter().chain(pod).collect()
    }

    fn missing_of_owner(&self, former: &str, new: Option<&str>) -> BTreeSet<Waiting> {
        let writers = self.pods.iter().filter(|(_, owner)| {
            let may_be_former = [owner, former].contains(&EVERY_OWNER) || owner == former;
            may_be_former && Some(owner.as_str()) != new
        });
        let pods = writers.filter_map(|(uid, owner)| self.missing_at(uid, owner));
        pods.chain(self.missing_at_server()).collect()
    }

    fn missing_at_server(&self) -> Option<Waiting> {
        match self.evidence.server {
            // Nobody is left who could write.
            _ if self.pods.is_empty() => None,
            Server::Enforces(epoch) if epoch < self.epoch => Some(Waiting::Server { epoch: self.epoch }),
            Server::Enforces(_) | Server::None => None,
        }
    }

    fn missing_at(&self, uid: &str, owner: &str) -> Option<Waiting> {
        let PodEvidence { acknowledged, gone, lapsed } = self.evidence.pods.get(uid).copied().unwrap_or_default();
        let (uid, owner, epoch) = (uid.to_owned(), owner.to_owned(), self.epoch);
        match self.evidence.server {
            _ if gone => None,
            Server::Enforces(_) if owner == UNSHARDED => None,
            Server::None if owner == UNSHARDED => Some(Waiting::PodEnd { uid, owner }),
            _ if lapsed || acknowledged >= Some(epoch) => None,
            _ => Some(Waiting::Pod { uid, owner, epoch }),
        }
    }
}
