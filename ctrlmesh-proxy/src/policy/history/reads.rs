//! Who reads under a policy, and how far was read?

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use ctrlmesh_common::wire;
use ctrlmesh_runtime::sync::lock;
use serde::{Deserialize, Serialize};

/// How many resources are remembered one by one that were read.
const MAX_READ: usize = 1024;

/// By how many resources readers are told apart. Two that are taken for one keep each other uncleared, which is safe.
const TOLD_APART: usize = 256;

/// Of what somebody reads, as far as readers are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOf(u8);

/// Who reads under policies that mean the same, and how far was read.
#[derive(Debug, Default)]
pub(in crate::policy) struct Reads {
    readers: Readers,
    extent: Mutex<Extent>,
}

/// Who reads: all of them, and those of each resource.
#[derive(Debug)]
struct Readers {
    all: AtomicUsize,
    of: [AtomicU32; TOLD_APART],
}

/// How far was read of what.
#[derive(Clone, Debug, Default)]
struct Extent {
    /// The resources, by group and name, that were read; a version, if one is known, is newer than what was.
    read: HashMap<(String, String), Option<u64>>,
    /// Whether every other may have been, too.
    all: bool,
    /// How often the policy came into force: what was asked for before counts no more.
    times: u64,
}

/// How far one resource was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// Not at all.
    Unread,
    /// At most to this version.
    Version(u64),
    /// Nobody knows.
    Unknown,
}

/// A version that is newer than what was read of a resource, as it is written down.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Known {
    group: String,
    resource: String,
    version: u64,
}

/// Of whom a version is to be asked that is newer than what was read.
#[derive(Debug)]
pub struct Unread {
    reads: Arc<Reads>,
    times: u64,
}

impl ReadOf {
    /// Somebody reads this resource.
    pub fn resource(group: &str, resource: &str) -> Self {
        let [group, resource] = [group, resource].map(|text| wire::digest(text.as_bytes()));
        let mixed = (group.rotate_left(32) ^ resource).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(mixed.to_be_bytes()[0])
    }
}

impl Default for Readers {
    fn default() -> Self {
        Self { all: AtomicUsize::new(0), of: [const { AtomicU32::new(0) }; TOLD_APART] }
    }
}

impl Reads {
    /// Of a policy under which anything may have been read, up to versions of which some are known.
    pub(super) fn of_all(known: Vec<Known>) -> Self {
        let read = known.into_iter().map(|it| ((it.group, it.resource), Some(it.version)));
        let extent = Extent { read: read.collect(), all: true, times: 0 };
        Self { readers: Readers::default(), extent: Mutex::new(extent) }
    }

    /// The versions that are known of what nobody reads: who does may read what is newer.
    pub(super) fn known(&self) -> Vec<Known> {
        let known = self.extent().read.clone().into_iter().filter_map(|((group, resource), it)| {
            it.map(|version| Known { group, resource, version })
        });
        let mut known: Vec<Known> = known.collect();
        known.retain(|known| !self.is_read(&known.group, &known.resource));
        known.sort();
        known
    }

    /// One reader more.
    pub(super) fn begin(&self, of: ReadOf) {
        self.readers.all.fetch_add(1, Ordering::SeqCst);
        self.readers.of[usize::from(of.0)].fetch_add(1, Ordering::SeqCst);
    }

    /// One reader less.
    pub(super) fn end(&self, of: ReadOf) {
        self.readers.of[usize::from(of.0)].fetch_sub(1, Ordering::SeqCst);
        self.readers.all.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether somebody reads anything.
    pub(super) fn are_read(&self) -> bool {
        self.readers.all.load(Ordering::SeqCst) > 0
    }

    /// Whether somebody reads a resource.
    pub(super) fn is_read(&self, group: &str, resource: &str) -> bool {
        let of = ReadOf::resource(group, resource);
        self.readers.of[usize::from(of.0)].load(Ordering::SeqCst) > 0
    }

    /// Whether nobody ever was answered.
    pub(super) fn is_empty(&self) -> bool {
        let extent = self.extent();
        extent.read.is_empty() && !extent.all
    }

    /// Says that somebody was answered who reads a resource.
    pub(super) fn answered(&self, group: &str, resource: &str) {
        let mut extent = self.extent();
        if extent.read.len() >= MAX_READ {
            extent.all = true;
        } else if !extent.all || extent.until(group, resource) != Until::Unknown {
            extent.read.insert((group.to_owned(), resource.to_owned()), None);
        }
    }

    /// Says that somebody may have been answered who reads anything.
    pub(super) fn answered_all(&self) {
        let mut extent = self.extent();
        extent.all = true;
        extent.read.clear();
    }

    /// How far a resource was read.
    pub(super) fn until(&self, group: &str, resource: &str) -> Until {
        self.extent().until(group, resource)
    }

    /// Whether nothing newer was read than what another says, and nobody reads it.
    pub(super) fn is_within(&self, known: &Known) -> bool {
        let (group, resource) = (known.group.as_str(), known.resource.as_str());
        let beyond = known.version.saturating_add(1);
        !self.is_read(group, resource) && self.until(group, resource).is_before(beyond)
    }

    /// Whom a version is to be asked for: nobody reads the resource, and of what was read none is known. Asked once
    /// another policy is in force.
    pub(super) fn unread(this: &Arc<Self>, group: &str, resource: &str) -> Option<Unread> {
        let (until, times) = {
            let extent = this.extent();
            (extent.until(group, resource), extent.times)
        };
        let unread = until == Until::Unknown && !this.is_read(group, resource);
        unread.then(|| Unread { reads: this.clone(), times })
    }

    /// Says that the policy came into force again: what was known of it is known no more.
    pub(super) fn again(&self) {
        let mut extent = self.extent();
        extent.times += 1;
        extent.read.values_mut().for_each(|version| *version = None);
    }

    /// Takes in what was read elsewhere: what is not known of both is not known.
    pub(super) fn add(&self, other: &Self) {
        let other = other.extent().clone();
        let mut extent = self.extent();
        extent.times += 1;
        let keys: Vec<_> = extent.read.keys().chain(other.read.keys()).cloned().collect();
        let all = extent.all || other.all;
        let of = |key: (String, String)| {
            let until = extent.until(&key.0, &key.1).and(other.until(&key.0, &key.1));
            let version = if let Until::Version(version) = until { Some(version) } else { None };
            (key, version)
        };
        let read: HashMap<_, _> = keys.into_iter().map(of).collect();
        extent.all = all || read.len() > MAX_READ;
        extent.read = read;
    }

    fn extent(&self) -> MutexGuard<'_, Extent> {
        lock(&self.extent)
    }
}

impl Extent {
    fn until(&self, group: &str, resource: &str) -> Until {
        match self.read.get(&(group.to_owned(), resource.to_owned())) {
            Some(Some(version)) => Until::Version(*version),
            Some(None) => Until::Unknown,
            None if self.all => Until::Unknown,
            None => Until::Unread,
        }
    }
}

impl Until {
    /// Whether what goes on from `version` cannot go on from what was read.
    pub(super) fn is_before(self, version: u64) -> bool {
        match self {
            Self::Unread => true,
            Self::Version(until) => until < version,
            Self::Unknown => false,
        }
    }

    /// What is known of both.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Unread, other) | (other, Self::Unread) => other,
            (Self::Version(one), Self::Version(other)) => Self::Version(one.max(other)),
            _ => Self::Unknown,
        }
    }
}

impl Unread {
    /// Says that what was read of a resource is of `version` at most, which the API server gave after this was found.
    pub fn was_read_until(&self, (group, resource): (&str, &str), version: u64) {
        let mut extent = self.reads.extent();
        if extent.times == self.times {
            extent.read.insert((group.to_owned(), resource.to_owned()), Some(version));
        }
    }
}
