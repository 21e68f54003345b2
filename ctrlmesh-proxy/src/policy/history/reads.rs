//! Counts the readers under a policy, and records up to which version they read.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use ctrlmesh_common::resource::{MemberKey, ResourceKey};
use ctrlmesh_common::wire;
use ctrlmesh_runtime::sync::lock;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

/// Resources that are remembered one by one.
const MAX_READ: usize = 1024;

/// Readers are counted in so many buckets of resources. Readers of one resource delay the clearing of another in the
/// same bucket, which is safe.
const READER_BUCKETS: usize = 256;

/// The bucket of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOf(u8);

/// The readers under policies that mean the same, and the versions up to which they read.
#[derive(Debug, Default)]
pub(in crate::policy) struct Reads {
    readers: Readers,
    extent: Mutex<Extent>,
    /// Whether somebody waits until there are no readers.
    awaited: AtomicBool,
    unread: Notify,
}

/// The number of readers, in all and in each bucket.
#[derive(Debug)]
struct Readers {
    all: AtomicUsize,
    of: [AtomicU32; READER_BUCKETS],
}

/// The resources that were read, and up to which version.
#[derive(Clone, Debug, Default)]
struct Extent {
    /// A version, if known, is newer than everything that was read.
    read: HashMap<ReadResource, Option<u64>>,
    /// Whether every other resource may have been read, too.
    all: bool,
    /// How often the policy came into force. Versions that were asked for before the last time do not count.
    times: u64,
}

/// Up to which version a resource was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// Not at all.
    Unread,
    /// At most up to this version.
    Version(u64),
    /// Not known.
    Unknown,
}

/// A version that is newer than everything read of a resource, as the file holds it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct ReadVersion {
    #[serde(flatten)]
    of: ReadResource,
    version: u64,
}

/// A resource that was read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ReadResource {
    /// Absent for a resource of the API server itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    member: Option<ReadMember>,
    group: String,
    resource: String,
}

/// Reads for which a newer version is to be asked for.
#[derive(Debug)]
pub struct PendingVersions {
    reads: Arc<Reads>,
    times: u64,
}

impl ReadOf {
    /// Mixes the names, so that resources spread over the buckets.
    pub fn resource(of: ResourceKey<'_>) -> Self {
        let digest = |text: &str| wire::digest(text.as_bytes());
        let member = of.member.map_or(0, |member| digest(member.path)).rotate_left(16);
        let names = digest(of.group).rotate_left(32) ^ digest(of.resource) ^ member;
        Self(names.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0])
    }
}

/// The member cluster of a resource that was read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
struct ReadMember {
    path: String,
    name: String,
}

impl ReadResource {
    pub fn new(of: ResourceKey<'_>) -> Self {
        let (group, resource) = (of.group.to_owned(), of.resource.to_owned());
        let member = of.member.map(|member| ReadMember { path: member.path.to_owned(), name: member.name.to_owned() });
        Self { member, group, resource }
    }

    pub fn key(&self) -> ResourceKey<'_> {
        let member = self.member.as_ref().map(|member| MemberKey { path: &member.path, name: &member.name });
        ResourceKey { member, group: &self.group, resource: &self.resource }
    }
}

impl Default for Readers {
    fn default() -> Self {
        Self { all: AtomicUsize::new(0), of: [const { AtomicU32::new(0) }; READER_BUCKETS] }
    }
}

impl Reads {
    /// For a policy under which anything may have been read; `known` holds the versions that are known.
    pub(super) fn of_all(known: Vec<ReadVersion>) -> Self {
        let read = known.into_iter().map(|it| (it.of, Some(it.version)));
        let extent = Extent { read: read.collect(), all: true, times: 0 };
        Self { extent: Mutex::new(extent), ..Self::default() }
    }

    /// The known versions of resources without readers. A reader may read newer objects.
    pub(super) fn known(&self) -> Vec<ReadVersion> {
        let read = self.extent().read.clone().into_iter();
        let known = read.filter_map(|(of, version)| Some(ReadVersion { of, version: version? }));
        let mut known: Vec<ReadVersion> = known.collect();
        known.retain(|known| !self.is_read(known.of.key()));
        known.sort();
        known
    }

    /// Adds a reader.
    pub(super) fn begin(&self, of: ReadOf) {
        self.readers.all.fetch_add(1, Ordering::SeqCst);
        self.readers.of[usize::from(of.0)].fetch_add(1, Ordering::SeqCst);
    }

    /// Removes a reader.
    pub(super) fn end(&self, of: ReadOf) {
        self.readers.of[usize::from(of.0)].fetch_sub(1, Ordering::SeqCst);
        let last = self.readers.all.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && self.awaited.load(Ordering::SeqCst) {
            self.unread.notify_waiters();
        }
    }

    /// Completes once there are no readers.
    pub(super) async fn until_unread(&self) {
        self.awaited.store(true, Ordering::SeqCst);
        loop {
            let unread = self.unread.notified();
            if !self.are_read() {
                return;
            }
            unread.await;
        }
    }

    /// Whether there are readers.
    pub(super) fn are_read(&self) -> bool {
        self.readers.all.load(Ordering::SeqCst) > 0
    }

    /// Whether a resource has readers.
    pub(super) fn is_read(&self, of: ResourceKey<'_>) -> bool {
        let of = ReadOf::resource(of);
        self.readers.of[usize::from(of.0)].load(Ordering::SeqCst) > 0
    }

    /// Whether no reader was ever answered.
    pub(super) fn is_empty(&self) -> bool {
        let extent = self.extent();
        extent.read.is_empty() && !extent.all
    }

    /// Records that a reader of a resource was answered.
    pub(super) fn answered(&self, of: ResourceKey<'_>) {
        let mut extent = self.extent();
        if extent.read.len() >= MAX_READ {
            extent.all = true;
        } else if !extent.all || extent.until(of) != Until::Unknown {
            extent.read.insert(ReadResource::new(of), None);
        }
    }

    /// Records that readers of any resource may have been answered.
    pub(super) fn answered_all(&self) {
        let mut extent = self.extent();
        extent.all = true;
        extent.read.clear();
    }

    /// Up to which version a resource was read.
    pub(super) fn until(&self, of: ResourceKey<'_>) -> Until {
        self.extent().until(of)
    }

    /// Whether nothing newer than `known` was read, and the resource has no readers.
    pub(super) fn is_within(&self, known: &ReadVersion) -> bool {
        let beyond = known.version.saturating_add(1);
        !self.is_read(known.of.key()) && self.until(known.of.key()).is_before(beyond)
    }

    /// `Some` if a version is to be asked for: the resource was read, has no readers, and no version is known. Called
    /// once another policy is in force.
    pub(super) fn unread(this: &Arc<Self>, of: ResourceKey<'_>) -> Option<PendingVersions> {
        let (until, times) = {
            let extent = this.extent();
            (extent.until(of), extent.times)
        };
        let unread = until == Until::Unknown && !this.is_read(of);
        unread.then(|| PendingVersions { reads: this.clone(), times })
    }

    /// Records that the policy came into force again, which makes its versions unknown.
    pub(super) fn again(&self) {
        let mut extent = self.extent();
        extent.times += 1;
        extent.read.values_mut().for_each(|version| *version = None);
    }

    /// Adds the reads of another. A version that is not known of both is not known.
    pub(super) fn add(&self, other: &Self) {
        let other = other.extent().clone();
        let mut extent = self.extent();
        extent.times += 1;
        let keys: Vec<_> = extent.read.keys().chain(other.read.keys()).cloned().collect();
        let all = extent.all || other.all;
        let of = |read: ReadResource| {
            let until = extent.until(read.key()).and(other.until(read.key()));
            let version = if let Until::Version(version) = until { Some(version) } else { None };
            (read, version)
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
    fn until(&self, of: ResourceKey<'_>) -> Until {
        match self.read.get(&ReadResource::new(of)) {
            Some(Some(version)) => Until::Version(*version),
            Some(None) => Until::Unknown,
            None if self.all => Until::Unknown,
            None => Until::Unread,
        }
    }
}

impl Until {
    /// Whether a client that continues from `version` cannot have read it here.
    pub(super) fn is_before(self, version: u64) -> bool {
        match self {
            Self::Unread => true,
            Self::Version(until) => until < version,
            Self::Unknown => false,
        }
    }

    /// Combines the reads of two.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Unread, other) | (other, Self::Unread) => other,
            (Self::Version(one), Self::Version(other)) => Self::Version(one.max(other)),
            _ => Self::Unknown,
        }
    }
}

impl PendingVersions {
    /// Records that a resource was read up to `version` at most. The API server must have given the version after this
    /// was returned.
    pub fn was_read_until(&self, of: ResourceKey<'_>, version: u64) {
        let mut extent = self.reads.extent();
        if extent.times == self.times {
            extent.read.insert(ReadResource::new(of), Some(version));
        }
    }
}
