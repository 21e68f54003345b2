//! Checks that only replicas of the owning shard changed an object.
//!
//! Pure: asks the history, of the objects in the namespaces that have work: those that an operator keeps for itself, as
//! its lock, say nothing of the work. Events say nothing of it either.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use ctrlmesh_common::ownership::UNSHARDED;
use jiff::Timestamp;

use crate::audit::{Object, Resource};
use crate::history::{AuditHistory, Conflict, Span, Write};
use crate::view::{Replica, Table, World};

/// The groups that serve Events. An Event records what was done before, and belongs to no share, so that no fence
/// refuses it. client-go's recorder sends it from a queue: it may arrive after the object has moved.
const EVENT_GROUPS: [&str; 2] = ["", "events.k8s.io"];

/// Which shard each replica is of; [`UNSHARDED`] where it is of none.
pub(crate) type Shards = BTreeMap<String, String>;

/// Who changed what of the work.
#[derive(Clone, Debug)]
pub(crate) struct WriteCheck<'a> {
    history: &'a AuditHistory,
    spaces: BTreeSet<&'a str>,
    /// Of which kinds; of all where none are named.
    kinds: BTreeSet<Resource>,
}

/// What was changed while namespaces moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MovedObjects {
    /// How many changes there were.
    pub(crate) changes: usize,
    /// Of how many objects.
    pub(crate) objects: usize,
    /// How many of these both their owners changed.
    pub(crate) both: usize,
}

/// What `ask` finds of what was from `start` until now. `settle` waits until all of it has been seen, and says until
/// when that is: what was written last is as much a part of it as the rest.
pub(crate) fn once_seen<T>(
    start: Timestamp,
    settle: impl FnOnce() -> Result<Timestamp>,
    ask: impl FnOnce(&Span) -> Result<T>,
) -> Result<T> {
    let end = settle()?;
    ask(&(start..end))
}

/// The shard of each replica of a table.
pub(crate) fn shards_of(table: &Table) -> Shards {
    let shard = |one: &Replica| one.shard.clone().unwrap_or_else(|| UNSHARDED.to_owned());
    table.replicas.iter().map(|(pod, one)| (pod.clone(), shard(one))).collect()
}

impl<'a> WriteCheck<'a> {
    /// Of the work that there is in `world`, or ever was.
    pub(crate) fn of(world: &'a World, history: &'a AuditHistory) -> Self {
        Self { history, spaces: world.spaces.iter().map(String::as_str).collect(), kinds: BTreeSet::new() }
    }

    /// Of these kinds only. Those that a root divides are fenced, and no others.
    pub(crate) fn of_kinds(self, kinds: impl IntoIterator<Item = Resource>) -> Self {
        Self { kinds: kinds.into_iter().collect(), ..self }
    }

    /// The changes in a span.
    pub(crate) fn writes(&self, span: &Span) -> impl Iterator<Item = &'a Write> {
        self.history.writes(span).filter(|write| self.is_work(&write.object))
    }

    /// The objects that `ask` finds in the history.
    pub(crate) fn conflicts(&self, ask: impl Fn(&AuditHistory) -> Vec<Conflict>) -> Vec<Conflict> {
        let mut conflicts = ask(self.history);
        conflicts.retain(|conflict| self.is_work(&conflict.object));
        conflicts
    }

    fn is_work(&self, object: &Object) -> bool {
        let resource = &object.resource;
        let is_event = resource.plural == "events" && EVENT_GROUPS.contains(&&*resource.group);
        let is_asked = self.kinds.is_empty() || self.kinds.contains(resource);
        !is_event && is_asked && self.spaces.contains(object.namespace.as_str())
    }

    /// That something was changed, and no object by two replicas, in a span in which nothing moves.
    pub(crate) fn steady(&self, span: &Span) -> Result<String> {
        none("changed by two replicas", &self.conflicts(|history| history.shared(span)))?;
        let objects: BTreeSet<_> = self.writes(span).map(|write| &write.object).collect();
        let writes = self.writes(span).count();
        ensure!(writes > 0, "nothing was changed, so nobody can tell who would have");
        Ok(format!("audit log: {writes} changes of {} objects, none by two replicas", objects.len()))
    }

    /// That every change was made by a replica of a shard that the namespace was of; `shards_of` says which those are.
    pub(crate) fn own(&self, span: &Span, replicas: &Shards, shards_of: impl Fn(&str) -> Vec<String>) -> Result<()> {
        let mut strange: BTreeMap<(&str, Vec<String>), Vec<&Write>> = BTreeMap::new();
        for write in self.writes(span) {
            let shards = shards_of(&write.object.namespace);
            if !replicas.get(&write.pod).is_some_and(|shard| shards.contains(shard)) {
                strange.entry((&write.pod, shards)).or_default().push(write);
            }
        }
        let shown = strange.iter().filter_map(|((pod, shards), writes)| {
            let (first, last) = (writes.first()?, writes.last()?);
            let others = self.writes(span).filter(|write| write.pod == *pod).count() - writes.len();
            Some(format!(
                "\n  {pod}: {} changes in namespaces of {shards:?}, from {} ({}) to {}, and {others} others",
                writes.len(),
                first.at,
                first.object,
                last.at
            ))
        });
        ensure!(
            strange.is_empty(),
            "changed by a replica whose it was not:{}\n  replicas {replicas:?}",
            shown.collect::<String>()
        );
        Ok(())
    }

    /// That while namespaces move, each from the first to the second of the owners that `owners` gives, every object
    /// was changed by its owners only and in their order: the second one's first change comes after the first one's
    /// last. While pods of the first one end, the next ones may take over; of the second one a single replica changes
    /// it. Pods without a shard may always take turns, as their lock passes. No pod comes back.
    pub(crate) fn moved(
        &self,
        span: &Span,
        replicas: &Shards,
        owners: impl Fn(&str) -> [String; 2],
    ) -> Result<MovedObjects> {
        self.own(span, replicas, |space| owners(space).to_vec())?;
        let shared = self.conflicts(|history| history.shared(span));
        let (mut out_of_turn, mut both) = (Vec::new(), 0);
        for conflict in shared {
            let by: Vec<&str> =
                conflict.turns.iter().filter_map(|(_, pod)| Some(replicas.get(pod)?.as_str())).collect();
            if !is_in_turn(&by, &owners(&conflict.object.namespace)) || conflict.returned().next().is_some() {
                out_of_turn.push(conflict);
            } else if by.first() != by.last() {
                both += 1;
            }
        }
        none("changed out of turn while they moved", &out_of_turn)?;
        let objects: BTreeSet<_> = self.writes(span).map(|write| &write.object).collect();
        Ok(MovedObjects { changes: self.writes(span).count(), objects: objects.len(), both })
    }
}

/// Whether the owners of an object, one for each turn, are those in this order. The last one has a single turn.
fn is_in_turn(turns: &[&str], [old, new]: &[String; 2]) -> bool {
    let first = turns.iter().take_while(|owner| *owner == old && old != new).count();
    let rest = &turns[first..];
    rest.iter().all(|owner| *owner == new) && (rest.len() < 2 || new == UNSHARDED)
}

/// That there are no such objects.
pub(crate) fn none(what: &str, conflicts: &[Conflict]) -> Result<()> {
    let shown = conflicts.iter().take(3).map(|conflict| format!("\n  {}: {:?}", conflict.object, conflict.turns));
    ensure!(conflicts.is_empty(), "{} objects {what}:{}", conflicts.len(), shown.collect::<String>());
    Ok(())
}

#[cfg(test)]
mod tests;
