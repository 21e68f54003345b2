//! Computes which replica owns which object right now.
//!
//! Pure: takes what the API server has (pods, locks, objects of work) and what it saw (the history), and gives the
//! table. An object is owned by a replica that works and watches it. A replica works where it is ready and holds the
//! lock of its shard; where the operator has no lock, every ready replica works.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::selector::Labels;

use crate::audit::Resource;
use crate::history::{AuditHistory, Span};

/// How often a client got which answer.
pub type Answers = BTreeMap<String, f64>;

/// What the API server has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct World {
    /// The operator's pods that are not on their way out, by name.
    pub pods: BTreeMap<String, Pod>,
    /// The addresses that its pods have, those on their way out too, or ever had.
    pub addresses: BTreeSet<String>,
    /// Who holds which of the operator's locks: the lock's name, the pod. None where the operator has no lock.
    pub locks: Option<BTreeMap<String, String>>,
    /// The kind of the work.
    pub resource: Resource,
    /// The objects of work.
    pub work: Vec<Work>,
    /// The namespaces that have work, or ever had.
    pub spaces: BTreeSet<String>,
    /// The shards that each pod is of, or ever was.
    pub shards: BTreeMap<String, BTreeSet<String>>,
    /// Whether [`Work::done`] may be said before everything is made: as
    /// [`Operator::settles`](crate::operator::Operator).
    pub settles: bool,
    /// The epoch of the operator; none before there is a ShardingConfig.
    pub epoch: Option<i64>,
    /// The epoch that each pod's proxy has acknowledged.
    pub acknowledged: BTreeMap<String, i64>,
}

/// A pod of the operator.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pod {
    /// Its shard.
    pub shard: Option<String>,
    /// Whether it is ready.
    pub ready: bool,
    /// How often its containers were started again.
    pub restarts: u64,
    /// How many reconciles it counts itself; none where it did not answer.
    pub reconciles: Option<f64>,
    /// How many bytes it received; none where it does not count them.
    pub received: Option<f64>,
    /// How often its client got which answer from the API server, by status, or by what it calls a broken connection;
    /// empty where it did not say.
    pub answers: Answers,
}

/// An object of work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: Labels,
    /// Whether the operator has done all that it asks for.
    pub done: bool,
}

/// The table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// By pod.
    pub replicas: BTreeMap<String, Replica>,
    /// Whether the operator has a lock.
    pub locked: bool,
    /// How many namespaces have work.
    pub namespaces: usize,
    /// How many objects there are.
    pub objects: usize,
    /// How many of them are not as they should be yet; one at least where that is not known of one.
    pub pending: usize,
    /// How many of them no replica works on.
    pub unowned: usize,
    /// How many of them several replicas work on.
    pub twice: usize,
    /// As in [`World::epoch`].
    pub epoch: Option<i64>,
}

/// A line of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replica {
    /// Its shard.
    pub shard: Option<String>,
    /// Whether it is ready.
    pub ready: bool,
    /// How often its containers were started again.
    pub restarts: u64,
    /// Whether it works.
    pub works: bool,
    /// The namespaces with work that it watches.
    pub namespaces: usize,
    /// The objects that it watches.
    pub objects: usize,
    /// Changes that it made in the span, a second.
    pub writes: f64,
    /// Reconciles that it counts itself, a second; none where that is not known.
    pub reconciles: Option<f64>,
    /// The epoch that its proxy has acknowledged.
    pub epoch: Option<i64>,
}

impl World {
    /// Keeps of what was `before` what is said of all time.
    pub fn remember(&mut self, before: &Self) {
        self.addresses.extend(before.addresses.iter().cloned());
        self.spaces.extend(before.spaces.iter().cloned());
        for (pod, shards) in &before.shards {
            self.shards.entry(pod.clone()).or_default().extend(shards.iter().cloned());
        }
    }

    /// Whether a pod works.
    pub fn works(&self, name: &str) -> bool {
        let Some(pod) = self.pods.get(name).filter(|pod| pod.ready) else { return false };
        let Some(locks) = &self.locks else { return true };
        let ending = pod.shard.as_ref().map(|shard| ctrlmesh_common::names::lock("", shard));
        locks.iter().any(|(lock, holder)| {
            let fits = match &ending {
                Some(ending) => lock.ends_with(ending.as_str()),
                None => !lock.contains(ctrlmesh_common::names::LOCK_SEPARATOR),
            };
            holder == name && fits
        })
    }

    /// The pods that work and watch this object, by name.
    pub fn owners<'a>(&'a self, work: &'a Work, history: &'a AuditHistory) -> impl Iterator<Item = &'a str> {
        let pods = self.pods.keys().map(String::as_str).filter(|pod| self.works(pod));
        pods.filter(|pod| history.sees(pod, &self.resource, &work.namespace, &work.labels))
    }

    /// The table; changes are counted in `span`.
    pub fn table(&self, history: &AuditHistory, span: &Span) -> Table {
        let seconds = span.end.duration_since(span.start).as_secs_f64().max(0.001);
        let mut writes: BTreeMap<&str, u32> = BTreeMap::new();
        for write in history.writes(span) {
            *writes.entry(&write.pod).or_default() += 1;
        }
        let line = |(name, pod): (&String, &Pod)| {
            let is_seen = |work: &&Work| history.sees(name, &self.resource, &work.namespace, &work.labels);
            let seen: Vec<&Work> = self.work.iter().filter(is_seen).collect();
            let namespaces: BTreeSet<&str> = seen.iter().map(|work| work.namespace.as_str()).collect();
            let writes = writes.get(name.as_str()).copied().unwrap_or_default();
            let replica = Replica {
                shard: pod.shard.clone(),
                ready: pod.ready,
                restarts: pod.restarts,
                works: self.works(name),
                namespaces: namespaces.len(),
                objects: seen.len(),
                writes: f64::from(writes) / seconds,
                reconciles: None,
                epoch: self.acknowledged.get(name).copied(),
            };
            (name.clone(), replica)
        };
        let owners: Vec<usize> = self.work.iter().map(|work| self.owners(work, history).count()).collect();
        let namespaces: BTreeSet<&str> = self.work.iter().map(|work| work.namespace.as_str()).collect();
        let undone = self.work.iter().filter(|work| !work.done).count();
        let settling = self.settles && !writes.is_empty();
        Table {
            replicas: self.pods.iter().map(line).collect(),
            locked: self.locks.is_some(),
            namespaces: namespaces.len(),
            objects: self.work.len(),
            pending: undone.max(usize::from(settling)),
            unowned: owners.iter().filter(|owners| **owners == 0).count(),
            twice: owners.iter().filter(|owners| **owners > 1).count(),
            epoch: self.epoch,
        }
    }
}

impl Table {
    /// Whether each object is worked on by exactly one replica.
    pub fn is_divided(&self) -> bool {
        self.unowned == 0 && self.twice == 0
    }

    /// Whether each object is worked on by exactly one replica, and is as it should be.
    pub fn is_whole(&self) -> bool {
        self.is_divided() && self.pending == 0
    }

    /// Whether every replica's proxy has acknowledged the operator's epoch.
    pub fn is_acknowledged(&self) -> bool {
        self.epoch.is_some() && self.replicas.values().all(|replica| replica.epoch == self.epoch)
    }
}

#[cfg(test)]
mod tests;
