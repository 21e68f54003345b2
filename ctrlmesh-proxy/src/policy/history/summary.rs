//! What is remembered of policies that are not remembered one by one?

use std::sync::Arc;

use ctrlmesh_common::policy::{LOCK_RESOURCES, Limit, Policy};
use ctrlmesh_common::resource::ResourceMatch;
use serde::{Deserialize, Serialize};

use super::InForce;
use super::reads::{Known, Reads, Unread};

/// How many resources are remembered of which those policies said different things.
const MAX_CHANGED: usize = 256;

/// Policies that are not remembered one by one.
#[derive(Debug)]
pub(super) struct Past {
    /// The first of them.
    first: Arc<Policy>,
    /// The resources of which another said something else; of any, where that is too much to remember.
    changed: Option<Vec<ResourceMatch>>,
    /// Whether another named another lock.
    relocked: bool,
    /// Those that somebody still reads under.
    read: Vec<Arc<Reads>>,
    /// How far was read under all of them.
    reads: Arc<Reads>,
}

/// The same as it is written down.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    first: Policy,
    changed: Option<Vec<ResourceMatch>>,
    relocked: bool,
    until: Vec<Known>,
}

impl Past {
    /// A past of which nothing is known: every resource may have been limited in another way.
    pub(super) fn unknown() -> Self {
        let reads = Arc::new(Reads::of_all(Vec::new()));
        Self { first: Arc::default(), changed: None, relocked: true, read: Vec::new(), reads }
    }

    pub(super) fn of(first: &InForce) -> Self {
        let reads = Reads::default();
        reads.add(&first.reads);
        Self {
            first: first.policy.clone(),
            changed: Some(Vec::new()),
            relocked: false,
            read: vec![first.reads.clone()],
            reads: reads.into(),
        }
    }

    pub(super) fn add(&mut self, next: &InForce) {
        self.reads.add(&next.reads);
        self.take_in();
        self.read.push(next.reads.clone());
        let first = self.first.clone();
        self.relocked |= next.lock != first.lock;
        if next.mode != first.mode {
            self.changed = None;
        }
        let not_in = |others: &Policy, limit: &Limit| {
            !others.limits.iter().any(|other| other.means_the_same(limit))
        };
        for limit in next.limits.iter().filter(|limit| not_in(&first, limit)) {
            self.change(limit);
        }
        for limit in first.limits.iter().filter(|limit| not_in(next, limit)) {
            self.change(limit);
        }
    }

    fn change(&mut self, limit: &Limit) {
        let Some(changed) = &mut self.changed else { return };
        for resources in &limit.relate_resources {
            if !changed.contains(resources) {
                changed.push(resources.clone());
            }
        }
        if limit.relate_resources.is_empty() || changed.len() > MAX_CHANGED {
            self.changed = None;
        }
    }

    /// Whether one of them, under which a client may have read up to `version`, may have said something else of a
    /// resource than `now` does.
    pub(super) fn is_suspect(
        &mut self,
        now: &Policy,
        (group, resource): (&str, &str),
        version: u64,
    ) -> bool {
        self.take_in();
        let read = self.all().any(|reads| {
            reads.is_read(group, resource) || !reads.until(group, resource).is_before(version)
        });
        read && self.differs(now, group, resource)
    }

    fn differs(&self, now: &Policy, group: &str, resource: &str) -> bool {
        let covered = |all: &[ResourceMatch]| all.iter().any(|one| one.covers(group, resource));
        self.changed.as_deref().is_none_or(covered)
            || self.relocked && LOCK_RESOURCES.contains(&(group, resource))
            || self.first.selector_for(group, resource) != now.selector_for(group, resource)
            || self.first.lock_for(group, resource) != now.lock_for(group, resource)
    }

    /// Of which of them a version is to be asked: none, as long as somebody reads the resource under one.
    pub(super) fn unread(&mut self, group: &str, resource: &str) -> Vec<Unread> {
        self.take_in();
        if self.all().any(|reads| reads.is_read(group, resource)) {
            return Vec::new();
        }
        self.all().filter_map(|reads| Reads::unread(reads, group, resource)).collect()
    }

    /// How far was read under all of them, and under those that somebody still reads under.
    fn all(&self) -> impl Iterator<Item = &Arc<Reads>> {
        self.read.iter().chain([&self.reads])
    }

    /// Keeps apart only those that somebody still reads under.
    fn take_in(&mut self) {
        let Self { read, reads, .. } = self;
        read.retain(|one| {
            let goes_on = one.are_read();
            if !goes_on {
                // It may have been answered since it was taken in.
                reads.add(one);
            }
            goes_on
        });
    }

    /// What is written down of them. Who read under them is gone when that is read.
    pub(super) fn written(&self) -> Written {
        let mut until = self.reads.known();
        until.retain(|known| self.read.iter().all(|one| one.is_within(known)));
        Written {
            first: self.first.as_ref().clone(),
            changed: self.changed.clone(),
            relocked: self.relocked,
            until,
        }
    }
}

impl From<Written> for Past {
    fn from(written: Written) -> Self {
        Self {
            first: written.first.into(),
            changed: written.changed,
            relocked: written.relocked,
            read: Vec::new(),
            reads: Reads::of_all(written.until).into(),
        }
    }
}
