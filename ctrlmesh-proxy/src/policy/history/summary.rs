//! Summarizes the policies that are not remembered one by one.

use std::sync::Arc;

use ctrlmesh_common::policy::{LOCK_RESOURCES, Limit, Policy};
use ctrlmesh_common::resource::{ResourceKey, ResourceMatch};
use serde::{Deserialize, Serialize};

use super::InForce;
use super::reads::{PendingVersions, ReadVersion, Reads};

/// Resources that are remembered because those policies limited them in different ways.
const MAX_CHANGED: usize = 256;

/// Policies that are not remembered one by one.
#[derive(Debug)]
pub(super) struct ForgottenPolicies {
    /// The first of these policies.
    first: Arc<Policy>,
    /// The resources that a later one limited in another way; `None` for any resource.
    changed: Option<Vec<ResourceMatch>>,
    /// Whether a later one named another lock.
    relocked: bool,
    /// Whether a later one had other members, or showed others.
    has_other_members: bool,
    /// The reads of those with readers.
    read: Vec<Arc<Reads>>,
    /// The reads of all others.
    reads: Arc<Reads>,
}

/// The summary in the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredSummary {
    first: Policy,
    changed: Option<Vec<ResourceMatch>>,
    relocked: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    has_other_members: bool,
    until: Vec<ReadVersion>,
}

impl ForgottenPolicies {
    /// For an unknown history: every resource may have been limited in another way.
    pub(super) fn unknown() -> Self {
        let reads = Arc::new(Reads::of_all(Vec::new()));
        Self { first: Arc::default(), changed: None, relocked: true, has_other_members: true, read: Vec::new(), reads }
    }

    pub(super) fn of(first: &InForce) -> Self {
        let reads = Reads::default();
        reads.add(&first.reads);
        Self {
            first: first.policy.clone(),
            changed: Some(Vec::new()),
            relocked: false,
            has_other_members: false,
            read: vec![first.reads.clone()],
            reads: reads.into(),
        }
    }

    pub(super) fn add(&mut self, next: &InForce) {
        self.reads.add(&next.reads);
        self.merge_unread();
        self.read.push(next.reads.clone());
        let first = self.first.clone();
        self.relocked |= next.lock != first.lock;
        self.has_other_members |= next.members() != first.members();
        if next.mode != first.mode {
            self.changed = None;
        }
        let not_in = |others: &Policy, limit: &Limit| !others.limits.iter().any(|other| other.means_the_same(limit));
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

    /// Whether a client may have read a resource up to `version` under one of them that limited it in another way than
    /// `now` does.
    pub(super) fn is_suspect(&mut self, now: &Policy, of: ResourceKey<'_>, version: u64) -> bool {
        self.merge_unread();
        let read = self.all().any(|reads| reads.is_read(of) || !reads.until(of).is_before(version));
        read && self.differs(now, of)
    }

    fn differs(&self, now: &Policy, of: ResourceKey<'_>) -> bool {
        let covered = |all: &[ResourceMatch]| all.iter().any(|one| one.covers(of.group, of.resource));
        let changed = match of.member {
            Some(_) => self.has_other_members,
            None => {
                self.changed.as_deref().is_none_or(covered)
                    || self.relocked && LOCK_RESOURCES.contains(&(of.group, of.resource))
            }
        };
        changed || self.first.selector_of(of) != now.selector_of(of) || self.first.lock_of(of) != now.lock_of(of)
    }

    /// The reads for which a version is to be asked for: none while the resource has readers under one of them.
    pub(super) fn unread(&mut self, of: ResourceKey<'_>) -> Vec<PendingVersions> {
        self.merge_unread();
        if self.all().any(|reads| reads.is_read(of)) {
            return Vec::new();
        }
        self.all().filter_map(|reads| Reads::unread(reads, of)).collect()
    }

    /// The reads of all of them.
    fn all(&self) -> impl Iterator<Item = &Arc<Reads>> {
        self.read.iter().chain([&self.reads])
    }

    /// Merges the reads of policies without readers.
    fn merge_unread(&mut self) {
        let Self { read, reads, .. } = self;
        read.retain(|one| {
            let goes_on = one.are_read();
            if !goes_on {
                // Its readers may have been answered since it was added.
                reads.add(one);
            }
            goes_on
        });
    }

    /// The summary for the file. Readers of now will be gone when it is read.
    pub(super) fn written(&self) -> StoredSummary {
        let mut until = self.reads.known();
        until.retain(|known| self.read.iter().all(|one| one.is_within(known)));
        StoredSummary {
            first: self.first.as_ref().clone(),
            changed: self.changed.clone(),
            relocked: self.relocked,
            has_other_members: self.has_other_members,
            until,
        }
    }
}

impl From<StoredSummary> for ForgottenPolicies {
    fn from(written: StoredSummary) -> Self {
        Self {
            first: written.first.into(),
            changed: written.changed,
            relocked: written.relocked,
            has_other_members: written.has_other_members,
            read: Vec::new(),
            reads: Reads::of_all(written.until).into(),
        }
    }
}
