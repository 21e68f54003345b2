//! The ownership tables of a root, in the order of their versions, and what each says of an object and a pod.

use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::{NamespaceHash, Slot};
use jiff::Timestamp;
use serde::Deserialize as _;

use super::event::{Author, Object, Write};

/// All tables.
#[derive(Clone, Debug)]
pub(super) struct Tables {
    all: Vec<Table>,
    hash: NamespaceHash,
}

/// What the root said from one of its versions on.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// The UID of the root: one that is made again counts its epochs from the start.
    root: String,
    /// The version of the root that said it first.
    version: u64,
    /// It was written between these.
    received: Timestamp,
    pub(super) answered: Timestamp,
    /// None where there is no root any more: then nothing is anybody's.
    pub(super) says: Option<Ownership>,
}

/// Whom an object belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner<'a> {
    /// To this one.
    One(&'a str),
    /// To nobody. It was taken from this one, where that is known, and what this one began may still come about.
    Nobody(Option<&'a str>),
}

impl Tables {
    /// Of the writes to the root. Those that change nothing of the table make none.
    pub(super) fn of(roots: &[Write], hash: NamespaceHash) -> Self {
        let mut all: Vec<Table> = roots.iter().filter_map(table).collect();
        // The answer to whoever let a root go has the version of before, which another may have passed meanwhile.
        for at in 0..all.len() {
            if all[at].says.is_none() {
                let of_root = all.iter().filter(|table| table.root == all[at].root);
                all[at].version = of_root.map(|table| table.version).max().unwrap_or_default();
            }
        }
        // The answer to whoever changed nothing has the version of before: the first one to have it wrote it.
        all.sort_by_key(|table| (table.version, table.says.is_none(), table.answered));
        all.dedup_by(|later, earlier| later.says == earlier.says);
        Self { all, hash }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Table> {
        self.all.iter()
    }

    /// The one in force when this version was written; none before the first.
    pub(super) fn at(&self, version: u64) -> Option<&Table> {
        let after = self.all.partition_point(|table| table.version <= version);
        after.checked_sub(1).map(|last| &self.all[last])
    }

    /// All that may have been in force at some moment of a span.
    pub(super) fn during(&self, from: Timestamp, until: Timestamp) -> impl Iterator<Item = &Table> {
        let next = self.all.iter().skip(1).map(Some).chain([None]);
        let spans = self.all.iter().zip(next);
        let meet = move |(table, next): &(&Table, Option<&Table>)| {
            table.received <= until && next.is_none_or(|next| next.answered >= from)
        };
        spans.filter(meet).map(|(table, _)| table)
    }

    /// Those before this one.
    pub(super) fn before(&self, this: &Table) -> impl Iterator<Item = &Table> {
        self.all.iter().take_while(move |table| table.version < this.version)
    }

    /// Whom an object belongs to; `label` is the slot that it says itself.
    pub(super) fn owner<'a>(&self, table: &'a Ownership, object: &Object, label: Option<Slot>) -> Owner<'a> {
        let revoked = table.revoked.as_ref();
        let namespace = Some(object.namespace.as_str()).filter(|namespace| !namespace.is_empty());
        if let Some(former) = namespace.and_then(|namespace| revoked?.namespaces.get(namespace)) {
            return Owner::Nobody(Some(former));
        }
        if let Some(pinned) = namespace.and_then(|namespace| table.namespaces.get(namespace)) {
            return Owner::One(pinned);
        }
        let Some(slot) = namespace.map(|namespace| self.hash.slot(namespace)).or(label) else {
            return Owner::Nobody(None);
        };
        match table.slots.get(&slot) {
            Some(owner) => Owner::One(owner),
            None => Owner::Nobody(revoked.and_then(|revoked| revoked.slots.get(&slot)).map(String::as_str)),
        }
    }
}

impl Table {
    /// Whom a pod writes for. Of a pod that changes its owner, what it began may still come about.
    pub(super) fn writes_for(&self, author: &Author) -> Option<&str> {
        let table = self.says.as_ref()?;
        let revoked = || table.revoked.as_ref()?.pod_uids.get(&author.uid);
        let by_uid = table.pod_uids.get(&author.uid).or_else(revoked).map(String::as_str);
        // An operator that is not fenced has no UIDs.
        if table.pod_uids.is_empty() { by_uid.or_else(|| table.shard_of(&author.pod)) } else { by_uid }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.says.as_ref().map_or(0, |table| table.epoch)
    }

    /// The epoch, of which root.
    pub(super) fn epoch_of_root(&self) -> (&str, u64) {
        (&self.root, self.epoch())
    }
}

fn table(write: &Write) -> Option<Table> {
    let Write { made, received, answered, .. } = write;
    let version = write.version?;
    let meta = &made["metadata"];
    let root = meta["uid"].as_str().unwrap_or_default().to_owned();
    let of = |version, says| Table { root, version, received: *received, answered: *answered, says };
    let has_finalizers = meta["finalizers"].as_array().is_some_and(|all| !all.is_empty());
    if meta["deletionTimestamp"].is_string() && !has_finalizers {
        return Some(of(version, None));
    }
    let says = Ownership::deserialize(&made["status"]["ownership"]).ok()?;
    Some(of(version, Some(says)))
}
