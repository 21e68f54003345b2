//! Plans which labels objects carry, also while they are migrated to others.
//!
//! Pure. Flags say which labels are wanted. The `ManagerState` says which are in force: every replica sees it
//! there, and a new leader continues a migration. A migration goes in steps, so that no shard ever selects by
//! labels that objects lack:
//!
//! 1. Objects get the *next* labels besides those in force. Shards select by those in force.
//! 2. When every object has both, the next labels come into force and the others are *former*. Objects keep
//!    both, because some proxies get the new policies later.
//! 3. When no proxy uses the former labels, they are *leftover* and are removed.
//!
//! A key has one value. If a key is to change its meaning (by another hash function), objects are migrated
//! twice: to spare keys first, then to the wanted ones.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{LabelKeys, LabelsStatus};
use ctrlmesh_common::names::label;
use ctrlmesh_common::selector::{KeyError, check_key};
use ctrlmesh_common::slots::{NamespaceHash, UnknownHash};

use crate::rules::shard::Labelling;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scheme {
    /// What shards select by.
    pub in_force: Labelling,
    /// What objects get besides, to come into force when all have it.
    pub next: Option<Labelling>,
    /// What was in force before; some proxies may still use it.
    pub former: Option<Labelling>,
    /// Keys that nobody uses; no other key is among them.
    pub leftover: BTreeSet<String>,
}

/// What the value of a key means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    Slot(NamespaceHash),
    /// For objects of cluster scope, what stands for their slot.
    Namespace(NamespaceHash),
    /// Whether a controller of ours shards the object.
    Control,
}

/// Input of [`Scheme::step`].
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// From the flags.
    pub wanted: &'a Labelling,
    /// Whether every object has all labels that it should have, and no leftover.
    pub labelled: bool,
    /// Whether no proxy uses the former labels any more.
    pub left: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Objects get the next labels.
    Begun,
    /// The next labels are not wanted any more.
    GivenUp,
    /// Shards select by the next labels.
    Switched,
    /// No proxy uses the former labels.
    Left,
    /// The leftover labels are gone.
    Removed,
}

/// A `ManagerState` that no manager wrote.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchemeError {
    #[error("status.labels.{field}")]
    Key { field: String, source: KeyError },
    #[error("status.labels.{field}.hash")]
    Hash { field: &'static str, source: UnknownHash },
    #[error("status.labels: a key stands for two things")]
    Ambiguous,
}

impl Scheme {
    /// Without a migration.
    pub fn settled(labelling: Labelling) -> Self {
        Self { in_force: labelling, ..Self::default() }
    }

    /// Labels that objects carry, those in force first.
    pub fn carried(&self) -> impl Iterator<Item = &Labelling> {
        [&self.in_force].into_iter().chain(&self.next).chain(&self.former)
    }

    /// Keys to remove from objects now: none while a migration is under way.
    pub fn removed(&self) -> impl Iterator<Item = &str> {
        let settled = self.next.is_none() && self.former.is_none();
        self.leftover.iter().filter(move |_| settled).map(String::as_str)
    }

    pub fn is_settled(&self) -> bool {
        self.next.is_none() && self.former.is_none() && self.leftover.is_empty()
    }

    /// Keys that only the former labels have.
    pub fn former_keys(&self) -> BTreeSet<&str> {
        let keys = self.former.iter().flat_map(Labelling::keys);
        keys.filter(|key| !self.in_force.keys().contains(key)).collect()
    }

    /// The next state, if the conditions for it hold.
    pub fn step(&self, facts: Facts<'_>) -> Option<(Self, Step)> {
        let mut after = self.clone();
        let step = match (&self.next, &self.former) {
            (Some(next), _) if *next != toward(&self.in_force, facts.wanted) => {
                after.drop_next();
                after.begin(facts.wanted);
                Step::GivenUp
            }
            (Some(next), _) => {
                if !facts.labelled {
                    return None;
                }
                after.former = Some(std::mem::replace(&mut after.in_force, next.clone()));
                after.next = None;
                Step::Switched
            }
            // All objects have both: going back is short.
            (None, Some(former)) if former == facts.wanted => {
                after.next = after.former.take();
                Step::Begun
            }
            (None, Some(_)) => {
                if !facts.left {
                    return None;
                }
                let left: Vec<String> = self.former_keys().into_iter().map(str::to_owned).collect();
                after.leftover.extend(left);
                after.former = None;
                // A leftover key may be wanted again, so it is not removed between two migrations.
                after.begin(facts.wanted);
                Step::Left
            }
            (None, None) if self.in_force != *facts.wanted => {
                after.begin(facts.wanted);
                Step::Begun
            }
            (None, None) => {
                if self.leftover.is_empty() || !facts.labelled {
                    return None;
                }
                after.leftover.clear();
                Step::Removed
            }
        };
        let carried: BTreeSet<String> = after.carried().flat_map(Labelling::keys).map(str::to_owned).collect();
        after.leftover.retain(|key| !carried.contains(key));
        Some((after, step))
    }

    fn begin(&mut self, wanted: &Labelling) {
        if self.in_force != *wanted {
            self.next = Some(toward(&self.in_force, wanted));
        }
    }

    fn drop_next(&mut self) {
        if let Some(next) = self.next.take() {
            self.leftover.extend(next.keys().map(str::to_owned));
        }
    }

    /// Reads the status of the `ManagerState`.
    ///
    /// # Errors
    /// If no manager could have written it.
    pub fn read(status: &LabelsStatus) -> Result<Self, SchemeError> {
        let some = |field, keys: &Option<LabelKeys>| keys.as_ref().map(|keys| read(field, keys)).transpose();
        for key in &status.leftover {
            let failed = |source| SchemeError::Key { field: "leftover".to_owned(), source };
            check_key(key).map_err(failed)?;
        }
        let scheme = Self {
            in_force: read("inForce", &status.in_force)?,
            next: some("next", &status.next)?,
            former: some("former", &status.former)?,
            leftover: status.leftover.iter().cloned().collect(),
        };
        let all: Vec<&Labelling> = scheme.carried().collect();
        let agree = all.iter().all(|one| all.iter().all(|other| agree(one, other)));
        let carried: BTreeSet<&str> = all.iter().flat_map(|one| one.keys()).collect();
        let apart = !scheme.leftover.iter().any(|key| carried.contains(key.as_str()));
        if agree && apart { Ok(scheme) } else { Err(SchemeError::Ambiguous) }
    }

    /// The status of the `ManagerState`.
    pub fn written(&self) -> LabelsStatus {
        LabelsStatus {
            in_force: written(&self.in_force),
            next: self.next.as_ref().map(written),
            former: self.former.as_ref().map(written),
            leftover: self.leftover.iter().cloned().collect(),
        }
    }
}

/// The next labels on the way from `from` to `to`: `to` itself, unless a key has another meaning in `from`.
fn toward(from: &Labelling, to: &Labelling) -> Labelling {
    let before = meanings(from);
    let taken: BTreeSet<&str> = from.keys().into_iter().chain(to.keys()).collect();
    let mut spare = to.clone();
    let keys = [&mut spare.hash_key, &mut spare.namespace_key, &mut spare.control_key];
    for ((key, meaning), name) in keys.into_iter().zip(listed(to)).zip(["sharding-hash", "namespace", "control"]) {
        if before.get(key.as_str()).is_some_and(|before| *before != meaning.1) {
            *key = unused(name, &taken);
        }
    }
    spare
}

fn unused(name: &str, taken: &BTreeSet<&str>) -> String {
    let mut key = format!("{}{name}", label::SPARE);
    while taken.contains(key.as_str()) {
        key.push_str("-2");
    }
    key
}

/// Whether an object can carry both.
fn agree(one: &Labelling, other: &Labelling) -> bool {
    let meanings = meanings(one);
    listed(other).iter().all(|(key, what)| meanings.get(key).is_none_or(|one| one == what))
}

fn meanings(labelling: &Labelling) -> BTreeMap<&str, Meaning> {
    listed(labelling).into()
}

fn listed(labelling: &Labelling) -> [(&str, Meaning); 3] {
    let Labelling { hash_key, namespace_key, control_key, hash } = labelling;
    [(hash_key, Meaning::Slot(*hash)), (namespace_key, Meaning::Namespace(*hash)), (control_key, Meaning::Control)]
}

fn read(field: &'static str, keys: &LabelKeys) -> Result<Labelling, SchemeError> {
    let LabelKeys { sharding_hash, namespace, control, hash } = keys;
    for (name, key) in [("shardingHash", sharding_hash), ("namespace", namespace), ("control", control)] {
        let failed = |source| SchemeError::Key { field: format!("{field}.{name}"), source };
        check_key(key).map_err(failed)?;
    }
    let labelling = Labelling {
        hash_key: sharding_hash.clone(),
        namespace_key: namespace.clone(),
        control_key: control.clone(),
        hash: hash.parse().map_err(|source| SchemeError::Hash { field, source })?,
    };
    if labelling.is_ambiguous() { Err(SchemeError::Ambiguous) } else { Ok(labelling) }
}

fn written(labelling: &Labelling) -> LabelKeys {
    LabelKeys {
        sharding_hash: labelling.hash_key.clone(),
        namespace: labelling.namespace_key.clone(),
        control: labelling.control_key.clone(),
        hash: labelling.hash.to_string(),
    }
}

#[cfg(test)]
mod tests;
