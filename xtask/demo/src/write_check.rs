//! Checks that only replicas of the owning shard changed an object.
//!
//! Pure: asks the history, of the objects in the namespaces that have work: those that an operator keeps for itself, as
//! its lock, say nothing of the work. Events say nothing of it either.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use jiff::Timestamp;

use crate::audit::Object;
use crate::history::{AuditHistory, Conflict, Span, Write};
use crate::view::{Table, World};

/// The groups that serve Events. An Event records what was done before, and belongs to no share, so that no fence
/// refuses it. client-go's recorder sends it from a queue: it may arrive after the object has moved.
const EVENT_GROUPS: [&str; 2] = ["", "events.k8s.io"];

/// Which shard each replica is of.
pub(crate) type Shards = BTreeMap<String, String>;

/// Who changed what of the work.
#[derive(Clone, Debug)]
pub(crate) struct WriteCheck<'a> {
    history: &'a AuditHistory,
    spaces: BTreeSet<&'a str>,
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
    let replicas = table.replicas.iter();
    replicas.filter_map(|(pod, one)| Some((pod.clone(), one.shard.clone()?))).collect()
}

impl<'a> WriteCheck<'a> {
    /// Of the work that there is in `world`, or ever was.
    pub(crate) fn of(world: &'a World, history: &'a AuditHistory) -> Self {
        Self { history, spaces: world.spaces.iter().map(String::as_str).collect() }
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
        !is_event && self.spaces.contains(object.namespace.as_str())
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
        let mut strange = self.writes(span).filter(|write| {
            let shards = shards_of(&write.object.namespace);
            !replicas.get(&write.pod).is_some_and(|shard| shards.contains(shard))
        });
        let (first, more) = (strange.next(), strange.count());
        ensure!(
            first.is_none(),
            "changed by a replica whose it was not: {first:?}, and {more} more; replicas {replicas:?}"
        );
        Ok(())
    }

    /// That while namespaces move, each from the first to the second of the shards that `owners` gives, no replica of a
    /// third one changed anything there; and that what a replica changed after the next one had, or once all proxies
    /// had `acknowledged` the last epoch, is no more than it was at work on when it was taken away, one namespace for
    /// each of its workers. That much can happen as long as only proxies hold writes back, which let what has begun
    /// come to its end; what would refuse it, a fence in the API server, is planned.
    pub(crate) fn moved(
        &self,
        span: &Span,
        acknowledged: Timestamp,
        replicas: &Shards,
        owners: impl Fn(&str) -> [String; 2],
        workers: usize,
    ) -> Result<String> {
        self.own(span, replicas, |space| owners(space).to_vec())?;
        let both = self.conflicts(|history| history.shared(span));
        let is_to_stay = |conflict: &&Conflict| {
            let [old, new] = owners(&conflict.object.namespace);
            old == new
        };
        let strange: Vec<Conflict> = both.iter().filter(is_to_stay).cloned().collect();
        none("that did not move were changed by two replicas", &strange)?;
        let late = self.conflicts(|history| history.shared(&(acknowledged..span.end)));
        let again = self.conflicts(|history| history.returned(span));
        let mut unfinished: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let back = again.iter().flat_map(|conflict| conflict.returned().map(move |pod| (conflict, pod)));
        let after = late.iter().flat_map(|conflict| conflict.turns.iter().map(move |(_, pod)| (conflict, &**pod)));
        for (conflict, pod) in back.chain(after) {
            let [old, _] = owners(&conflict.object.namespace);
            if replicas.get(pod) == Some(&old) {
                unfinished.entry(pod).or_default().insert(&conflict.object.namespace);
            }
        }
        ensure!(
            unfinished.values().all(|spaces| spaces.len() <= workers),
            "changed by the old owner after the new one, and more than {workers} workers were at: {again:?}; when all proxies \
             knew the last epoch: {late:?}"
        );
        Ok(format!(
            "{} objects were changed by both their owners while they moved: {} by the old one after the new one, which was at \
             it already, {} when all proxies had acknowledged the last epoch (no fence refuses that yet)",
            both.len(),
            again.len(),
            late.len()
        ))
    }
}

/// That there are no such objects.
pub(crate) fn none(what: &str, conflicts: &[Conflict]) -> Result<()> {
    let shown = conflicts.iter().take(3).map(|conflict| format!("\n  {}: {:?}", conflict.object, conflict.turns));
    ensure!(conflicts.is_empty(), "{} objects {what}:{}", conflicts.len(), shown.collect::<String>());
    Ok(())
}

#[cfg(test)]
mod tests;
