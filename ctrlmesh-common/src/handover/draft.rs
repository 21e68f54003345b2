//! Makes the next table out of the present one.

use std::collections::{BTreeMap, BTreeSet};

use super::proof::Proof;
use super::{Desired, EVERY_OWNER, Evidence, Waiting};
use crate::ownership::{Ownership, Revoked, STANDBY};
use crate::slots::{NamespaceHash, Slot};

/// A thing that has an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Slot(Slot),
    Namespace(String),
    Pod(String),
}

/// A thing on its way from one owner to another.
#[derive(Clone, Debug)]
pub(super) struct Move {
    pub(super) item: Item,
    pub(super) former: String,
    /// The owner that is wanted, if any.
    pub(super) new: Option<String>,
}

/// The table in the making.
pub(super) struct Draft<'a> {
    /// Without what is revoked.
    table: Ownership,
    revoked: Revoked,
    desired: &'a Desired,
    hash: NamespaceHash,
    /// Whether the table was never written.
    fresh: bool,
    /// Whether this step revokes anything.
    revokes: bool,
}

impl<'a> Draft<'a> {
    pub(super) fn new(current: &Ownership, desired: &'a Desired, hash: NamespaceHash) -> Self {
        let fresh = *current == Ownership::default() && desired.epoch == 0 && !desired.taken_up;
        let mut table = current.clone();
        let revoked = table.revoked.take().unwrap_or_default();
        Self { table, revoked, desired, hash, fresh, revokes: false }
    }

    /// Grants what is proved, and revokes what moves in the table of `epoch`.
    pub(super) fn step(mut self, epoch: u64, evidence: &Evidence) -> Self {
        self.forget_gone(evidence);
        // A namespace may follow a slot that was granted to its new owner.
        while self.grant_proved(evidence) {}
        self.revoke_again();
        // Namespaces first: one is revoked from the owner that its slot has had until now.
        self.revoke_namespaces();
        self.revoke_slots();
        self.move_pods(evidence);
        if self.revokes {
            self.revoked.epoch = epoch;
        }
        self
    }

    fn forget_gone(&mut self, evidence: &Evidence) {
        let is_gone = |uid: &String| evidence.pods.get(uid).is_some_and(|pod| pod.gone);
        self.table.pod_uids.retain(|uid, _| !is_gone(uid));
        self.revoked.pod_uids.retain(|uid, _| !is_gone(uid));
    }

    /// Whether anything was granted.
    fn grant_proved(&mut self, evidence: &Evidence) -> bool {
        if !self.has_reached_revocation() {
            return false;
        }
        let mut proof = Proof::new(&self.table, &self.revoked, evidence);
        let mut moves = self.moves();
        moves.retain(|one| !self.stands(&one.item) && proof.covers(one));
        let grants = !moves.is_empty();
        for Move { item, new, .. } in moves {
            match item {
                Item::Slot(slot) => {
                    self.revoked.slots.remove(&slot);
                    self.table.slots.extend(new.map(|owner| (slot, owner)));
                }
                Item::Namespace(name) => {
                    self.revoked.namespaces.remove(&name);
                    let pin = wanted(&self.desired.namespaces, &name).map(str::to_owned);
                    self.table.namespaces.extend(pin.map(|owner| (name, owner)));
                }
                Item::Pod(uid) => {
                    self.revoked.pod_uids.remove(&uid);
                    self.table.pod_uids.extend(new.map(|owner| (uid, owner)));
                }
            }
        }
        grants
    }

    /// Revokes again what is revoked by halves.
    fn revoke_again(&mut self) {
        let slots = remove_revoked(&mut self.table.slots, &mut self.revoked.slots);
        let namespaces = remove_revoked(&mut self.table.namespaces, &mut self.revoked.namespaces);
        let pods = remove_revoked(&mut self.table.pod_uids, &mut self.revoked.pod_uids);
        self.revokes |= slots || namespaces || pods;
        self.revokes |= !self.is_settled() && !self.has_reached_revocation();
    }

    fn revoke_namespaces(&mut self) {
        let (desired, table) = (self.desired, &self.table);
        let names: BTreeSet<&String> = desired.namespaces.keys().chain(table.namespaces.keys()).collect();
        let names: Vec<String> = names.into_iter().cloned().collect();
        for name in names {
            if self.revoked.namespaces.contains_key(&name) {
                continue;
            }
            let wanted = wanted(&desired.namespaces, &name);
            let pin = self.table.namespaces.get(&name).map(String::as_str);
            let by_slot = self.table.slots.get(&self.hash.slot(&name)).map(String::as_str);
            // A pin whose owner gets the slot goes when the slot has come.
            let follows = wanted.is_none() && pin != by_slot && pin == self.slot_goes_to(&name);
            if wanted == pin || follows {
                continue;
            }
            let stays = pin.or(by_slot).is_some_and(|owner| wanted.or(by_slot) == Some(owner));
            if !stays && !self.fresh {
                let former = pin.or(by_slot).unwrap_or_else(|| self.former_of_slot(&name)).to_owned();
                self.table.namespaces.remove(&name);
                self.revoked.namespaces.insert(name, former);
                self.revokes = true;
            } else if let Some(wanted) = wanted {
                self.table.namespaces.insert(name, wanted.to_owned());
            } else {
                self.table.namespaces.remove(&name);
            }
        }
    }

    fn slot_goes_to(&self, namespace: &str) -> Option<&str> {
        wanted(&self.desired.slots, &self.hash.slot(namespace))
    }

    fn former_of_slot(&self, namespace: &str) -> &str {
        self.revoked.slots.get(&self.hash.slot(namespace)).map_or(EVERY_OWNER, String::as_str)
    }

    fn revoke_slots(&mut self) {
        let (desired, table) = (self.desired, &self.table);
        let slots: BTreeSet<Slot> = desired.slots.keys().chain(table.slots.keys()).copied().collect();
        for slot in slots {
            let wanted = wanted(&desired.slots, &slot);
            let owner = self.table.slots.get(&slot).map(String::as_str);
            if wanted == owner || self.revoked.slots.contains_key(&slot) {
                continue;
            }
            if let (true, Some(wanted)) = (self.fresh, wanted) {
                self.table.slots.insert(slot, wanted.to_owned());
                continue;
            }
            let former = owner.unwrap_or(EVERY_OWNER).to_owned();
            self.table.slots.remove(&slot);
            self.revoked.slots.insert(slot, former);
            self.revokes = true;
        }
    }

    fn move_pods(&mut self, evidence: &Evidence) {
        self.table.pods.clone_from(&self.desired.pods);
        for uid in self.desired.pod_uids.keys() {
            let is_gone = evidence.pods.get(uid).is_some_and(|pod| pod.gone);
            let Some(wanted) = wanted(&self.desired.pod_uids, uid).filter(|_| !is_gone) else { continue };
            if self.revoked.pod_uids.contains_key(uid) {
                continue;
            }
            match self.table.pod_uids.get(uid) {
                Some(owner) if owner == wanted => {}
                Some(owner) if owner != STANDBY => {
                    self.revoked.pod_uids.extend(self.table.pod_uids.remove_entry(uid));
                    self.revokes = true;
                }
                // It loses nothing.
                Some(_) | None => {
                    self.table.pod_uids.insert(uid.clone(), wanted.to_owned());
                }
            }
        }
    }

    pub(super) fn waiting(&self, evidence: &Evidence) -> Vec<Waiting> {
        let mut proof = Proof::new(&self.table, &self.revoked, evidence);
        let missing: BTreeSet<Waiting> = self.moves().iter().flat_map(|one| proof.missing(one).clone()).collect();
        missing.into_iter().collect()
    }

    /// The table of `epoch`, if it differs from `current`.
    pub(super) fn into_table(self, current: &Ownership, epoch: u64) -> Option<Ownership> {
        let changes = self.revokes;
        let revoked = (!self.is_settled()).then_some(self.revoked);
        let table = Ownership { revoked, ..self.table };
        (changes || table != *current).then_some(Ownership { epoch, ..table })
    }

    /// All that is revoked.
    fn moves(&self) -> Vec<Move> {
        let desired = self.desired;
        let slots = self.revoked.slots.iter().map(|(slot, former)| {
            let new = wanted(&desired.slots, slot);
            (Item::Slot(*slot), former, new)
        });
        let namespaces = self.revoked.namespaces.iter().map(|(name, former)| {
            // Without a pin it goes to whoever has its slot.
            let by_slot = self.table.slots.get(&self.hash.slot(name)).map(String::as_str);
            (Item::Namespace(name.clone()), former, wanted(&desired.namespaces, name).or(by_slot))
        });
        let pods = self.revoked.pod_uids.iter().map(|(uid, former)| {
            let new = wanted(&desired.pod_uids, uid);
            (Item::Pod(uid.clone()), former, new)
        });
        let moves = slots.chain(namespaces).chain(pods);
        moves.map(|(item, former, new)| Move { item, former: former.clone(), new: new.map(str::to_owned) }).collect()
    }

    /// Whether nothing is revoked.
    fn is_settled(&self) -> bool {
        let Revoked { slots, namespaces, pod_uids, .. } = &self.revoked;
        slots.is_empty() && namespaces.is_empty() && pod_uids.is_empty()
    }

    /// Whether the epoch of the revocation can be that of a table: no proof counts for another.
    fn has_reached_revocation(&self) -> bool {
        (1..=self.table.epoch).contains(&self.revoked.epoch)
    }

    /// Whether the table gives `item` to an owner.
    fn stands(&self, item: &Item) -> bool {
        match item {
            Item::Slot(slot) => self.table.slots.contains_key(slot),
            Item::Namespace(name) => self.table.namespaces.contains_key(name),
            Item::Pod(uid) => self.table.pod_uids.contains_key(uid),
        }
    }
}

/// Nobody is called "", so nobody is meant by it.
fn wanted<'a, K: Ord>(owners: &'a BTreeMap<K, String>, item: &K) -> Option<&'a str> {
    owners.get(item).map(String::as_str).filter(|owner| !owner.is_empty())
}

/// Takes out of `owned` what is `revoked`; whether there was any.
fn remove_revoked<K: Ord>(owned: &mut BTreeMap<K, String>, revoked: &mut BTreeMap<K, String>) -> bool {
    let before = owned.len();
    owned.retain(|item, owner| match revoked.get_mut(item) {
        None => true,
        Some(former) => {
            if former != owner {
                EVERY_OWNER.clone_into(former);
            }
            false
        }
    });
    owned.len() < before
}
