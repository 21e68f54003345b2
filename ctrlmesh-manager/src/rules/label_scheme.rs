//! By which labels are objects shared out, also while other ones take their place?
//!
//! Pure. What the managers are told by flags is what is wanted; what is in force stands in the `ManagerState`, where every
//! replica sees it, whatever it was told, and a leader goes on where another has stopped. Other labels take the place of
//! those in force step by step, so that at no moment a shard asks for what objects do not carry:
//!
//! 1. objects are given the *next* labels beside those in force; shards go by those in force;
//! 2. once every object of every kind carries both, the next are in force, and those before are *former*: objects still
//!    get both, because some proxies know the new shares later than others;
//! 3. once nobody goes by the former, they are *leftover*, and are taken away.
//!
//! A key has one value. Where a key stays and means something else (the hash function was changed, and it not), objects
//! are led over by spare keys: twice the same, first to those, then to what is wanted.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{LabelKeys, LabelsStatus};
use ctrlmesh_common::names::label;
use ctrlmesh_common::selector::{KeyError, check_key};
use ctrlmesh_common::slots::{NamespaceHash, UnknownHash};

use crate::rules::shard::Labelling;

/// Which labels objects carry, and which of them count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scheme {
    /// What shards go by.
    pub in_force: Labelling,
    /// What objects are given besides, to be in force once all carry it.
    pub next: Option<Labelling>,
    /// What was in force before, and may be at some proxy still.
    pub former: Option<Labelling>,
    /// Keys that nobody goes by; none of them is a key of the others.
    pub leftover: BTreeSet<String>,
}

/// What a key's label says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// The slot.
    Slot(NamespaceHash),
    /// The namespace; of objects of cluster scope, what stands there for their slot.
    Namespace(NamespaceHash),
    /// That the object is given to shards.
    Control,
}

/// What is known when it is asked what the next step is.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// What the managers were told.
    pub wanted: &'a Labelling,
    /// Whether every object carries what it is to carry, and nothing that is left over.
    pub labelled: bool,
    /// Whether nobody goes by the former labels any more.
    pub left: bool,
}

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Objects are given other labels besides.
    Begun,
    /// It was begun, and is no longer wanted.
    GivenUp,
    /// Shards go by the next labels.
    Switched,
    /// Nobody goes by the former labels any more.
    Left,
    /// They were taken away.
    Removed,
}

/// A scheme that somebody has written who is not us.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchemeError {
    /// Not a key.
    #[error("status.labels.{field}")]
    Key {
        /// Where.
        field: String,
        /// Why.
        #[source]
        source: KeyError,
    },
    /// Not a hash function.
    #[error("status.labels.{field}.hash")]
    Hash {
        /// Where.
        field: &'static str,
        /// Why.
        #[source]
        source: UnknownHash,
    },
    /// An object cannot carry all of it.
    #[error("status.labels: a key stands for two things")]
    Ambiguous,
}

// === impl Scheme ===

impl Scheme {
    /// Where nothing is being changed.
    pub fn settled(labelling: Labelling) -> Self {
        Self { in_force: labelling, ..Self::default() }
    }

    /// What objects carry; what is in force first.
    pub fn carried(&self) -> impl Iterator<Item = &Labelling> {
        [&self.in_force].into_iter().chain(&self.next).chain(&self.former)
    }

    /// Keys whose labels are to be taken away now: none as long as anything else is to be done.
    pub fn removed(&self) -> impl Iterator<Item = &str> {
        let settled = self.next.is_none() && self.former.is_none();
        self.leftover.iter().filter(move |_| settled).map(String::as_str)
    }

    /// Whether nothing is being changed.
    pub fn is_settled(&self) -> bool {
        self.next.is_none() && self.former.is_none() && self.leftover.is_empty()
    }

    /// The keys that only the former labels have.
    pub fn former_keys(&self) -> BTreeSet<&str> {
        let keys = self.former.iter().flat_map(Labelling::keys);
        keys.filter(|key| !self.in_force.keys().contains(key)).collect()
    }

    /// What it becomes, if anything.
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
            // All carry both: the way back is short.
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
                // Of what is left over some may be wanted again: nothing is taken away between two steps.
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
        let carried: BTreeSet<String> =
            after.carried().flat_map(Labelling::keys).map(str::to_owned).collect();
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

    /// As it stands in the `ManagerState`.
    ///
    /// # Errors
    /// Where it says what no manager writes.
    pub fn read(status: &LabelsStatus) -> Result<Self, SchemeError> {
        let some = |field, keys: &Option<LabelKeys>| {
            keys.as_ref().map(|keys| read(field, keys)).transpose()
        };
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

    /// The same as it is written there.
    pub fn written(&self) -> LabelsStatus {
        LabelsStatus {
            in_force: written(&self.in_force),
            next: self.next.as_ref().map(written),
            former: self.former.as_ref().map(written),
            leftover: self.leftover.iter().cloned().collect(),
        }
    }
}

/// What can stand beside `from` on the way to `to`: `to` itself, unless a key of it stands for something else there.
fn toward(from: &Labelling, to: &Labelling) -> Labelling {
    let before = meanings(from);
    let taken: BTreeSet<&str> = from.keys().into_iter().chain(to.keys()).collect();
    let mut spare = to.clone();
    let keys = [&mut spare.hash_key, &mut spare.namespace_key, &mut spare.control_key];
    for ((key, meaning), name) in
        keys.into_iter().zip(listed(to)).zip(["sharding-hash", "namespace", "control"])
    {
        if before.get(key.as_str()).is_some_and(|before| *before != meaning.1) {
            *key = unused(name, &taken);
        }
    }
    spare
}

/// A key called so that is not `taken`.
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
    [
        (hash_key, Meaning::Slot(*hash)),
        (namespace_key, Meaning::Namespace(*hash)),
        (control_key, Meaning::Control),
    ]
}

fn read(field: &'static str, keys: &LabelKeys) -> Result<Labelling, SchemeError> {
    let LabelKeys { sharding_hash, namespace, control, hash } = keys;
    for (name, key) in
        [("shardingHash", sharding_hash), ("namespace", namespace), ("control", control)]
    {
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
