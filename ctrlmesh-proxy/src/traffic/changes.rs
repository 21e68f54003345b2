//! Counts how long a pod takes from a change that a watch shows it to its first write of that object.
//!
//! Only kinds count that the pod writes by name. Of each object one change counts a minute: one that changes all the
//! time says no more than others. The events of a pod's own writes are no changes.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::Duration;

use ctrlmesh_common::wire::FIRST_WRITE_BOUNDS;
use ctrlmesh_request::request::ObjectKey;
use ctrlmesh_request::rewrite::Encoding;
use ctrlmesh_request::rewrite::watch::{self, ObjectChange};
use ctrlmesh_runtime::sync::lock;
use tokio::time::Instant;

/// A change that is not followed for so long never is. One that was is the only one of its object for as long.
const PATIENCE: Duration = Duration::from_mins(1);

/// The event of a write comes at most so long after its answer, as a rule.
const ECHO: Duration = Duration::from_secs(1);

/// Most objects that are known of. Changes of others do not count.
const MAX_OBJECTS: usize = 256;

/// Most kinds that are known to be written.
const MAX_KINDS: usize = 64;

/// Group and plural.
pub(crate) type Kind = (String, String);

/// The changes of one pod's objects.
#[derive(Debug, Default)]
pub(crate) struct PodChanges(Mutex<Changes>);

#[derive(Debug, Default)]
struct Changes {
    /// A key without a name is that of a collection, in which something was written whose name is not known.
    objects: HashMap<ObjectKey, Last>,
    written: HashSet<Kind>,
    first_writes: [u64; FIRST_WRITE_BOUNDS.len()],
}

/// What the pod last did with an object.
#[derive(Clone, Copy, Debug)]
enum Last {
    /// It was shown a change, and has not written since.
    Shown(Instant),
    /// It wrote, and that followed no change.
    Wrote(Instant),
    /// It wrote after a change that it had been shown then.
    Followed { shown: Instant },
}

/// A write that the API server took.
#[derive(Clone, Debug)]
pub(crate) struct TakenWrite {
    /// Without a name where only the collection is known.
    pub(crate) object: ObjectKey,
    /// When the pod's request came.
    pub(crate) came: Instant,
    /// When it went on to the API server.
    pub(crate) sent: Instant,
}

impl PodChanges {
    /// A watch of this kind showed this frame to the pod.
    pub(crate) fn shown_in(&self, frame: &[u8], encoding: Encoding, kind: &Kind) {
        if !lock(&self.0).written.contains(kind) {
            return;
        }
        if let Some(change) = watch::object_change(frame, encoding) {
            let ObjectChange { namespace, name, is_deleted } = change;
            let (group, resource) = kind.clone();
            self.shown(ObjectKey { cluster: None, group, resource, namespace, name }, is_deleted);
        }
    }

    /// A watch showed a change to the pod. Where it has not written since an earlier one, that one counts.
    fn shown(&self, object: ObjectKey, is_deleted: bool) {
        let mut changes = lock(&self.0);
        let now = Instant::now();
        if is_deleted {
            // What is gone needs no write.
            if matches!(changes.objects.get(&object), Some(Last::Shown(_))) {
                changes.objects.remove(&object);
            }
            return;
        }
        let is_known = |last: Option<&Last>| last.is_some_and(|last| !last.is_over(now));
        if is_known(changes.objects.get(&object)) || is_known(changes.objects.get(&collection_of(&object))) {
            return;
        }
        if changes.objects.len() >= MAX_OBJECTS {
            changes.objects.retain(|_, last| !last.is_over(now));
        }
        if changes.objects.len() < MAX_OBJECTS {
            changes.objects.insert(object, Last::Shown(now));
        }
    }

    /// The API server took a write of the pod.
    pub(crate) fn written(&self, write: TakenWrite) {
        let mut changes = lock(&self.0);
        let now = Instant::now();
        let TakenWrite { object, came, sent } = write;
        let last = if object.name.is_empty() {
            // What was shown since may be what it wrote.
            changes.objects.retain(|other, last| {
                !(matches!(last, Last::Shown(at) if *at > sent) && collection_of(other) == object)
            });
            Last::Wrote(now)
        } else {
            if changes.written.len() < MAX_KINDS {
                changes.written.insert((object.group.clone(), object.resource.clone()));
            }
            match changes.objects.remove(&object) {
                Some(Last::Shown(at)) if at <= came => {
                    changes.followed(came - at);
                    Last::Followed { shown: at }
                }
                Some(followed @ Last::Followed { .. }) if !followed.is_over(now) => followed,
                // What was shown after the write had come may be its own event.
                _ => Last::Wrote(now),
            }
        };
        if changes.objects.len() >= MAX_OBJECTS {
            changes.objects.retain(|_, last| !last.is_over(now));
        }
        if changes.objects.len() < MAX_OBJECTS {
            changes.objects.insert(object, last);
        }
    }

    /// What the pod was shown before does not count: its objects are others now, or it did not work on them.
    pub(crate) fn forget(&self) {
        lock(&self.0).objects.retain(|_, last| !matches!(last, Last::Shown(_)));
    }

    /// How many first writes came within each of the bounds, and not within the one before.
    pub(super) fn first_writes(&self) -> Vec<u64> {
        lock(&self.0).first_writes.to_vec()
    }
}

impl Changes {
    fn followed(&mut self, after: Duration) {
        let within = FIRST_WRITE_BOUNDS.iter().position(|bound| after < Duration::from_secs(*bound));
        if let Some(count) = within.and_then(|within| self.first_writes.get_mut(within)) {
            *count += 1;
        }
    }
}

impl Last {
    fn is_over(self, now: Instant) -> bool {
        match self {
            Self::Shown(at) | Self::Followed { shown: at } => now.saturating_duration_since(at) >= PATIENCE,
            Self::Wrote(at) => now.saturating_duration_since(at) >= ECHO,
        }
    }
}

fn collection_of(object: &ObjectKey) -> ObjectKey {
    ObjectKey { name: String::new(), ..object.clone() }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn object(name: &str) -> ObjectKey {
        let text = str::to_owned;
        ObjectKey { cluster: None, group: text("g"), resource: text("r"), namespace: text("n"), name: text(name) }
    }

    /// The pod writes now.
    fn write(changes: &PodChanges, object: ObjectKey) {
        let now = Instant::now();
        changes.written(TakenWrite { object, came: now, sent: now });
    }

    fn show(changes: &PodChanges, name: &str) {
        changes.shown(object(name), false);
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_write_after_the_first_change_counts() {
        let changes = PodChanges::default();
        show(&changes, "x");
        advance(SECOND).await;
        show(&changes, "x");
        changes.shown(object("y"), true);
        advance(SECOND).await;
        write(&changes, object("y"));
        write(&changes, ObjectKey { resource: "other".to_owned(), ..object("x") });
        assert_eq!(changes.first_writes(), [0; 7]);
        write(&changes, object("x"));
        write(&changes, object("x"));
        assert_eq!(changes.first_writes(), [0, 0, 1, 0, 0, 0, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn one_change_of_an_object_counts_a_minute() {
        let changes = PodChanges::default();
        for _ in 0..120 {
            show(&changes, "x");
            show(&changes, "x");
            write(&changes, object("x"));
            advance(SECOND).await;
        }
        assert_eq!(changes.first_writes(), [2, 0, 0, 0, 0, 0, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_event_of_an_own_write_is_no_change() {
        for name in ["x", ""] {
            let changes = PodChanges::default();
            let sent = Instant::now();
            advance(ECHO / 4).await;
            show(&changes, "x");
            advance(ECHO / 4).await;
            // A write without a name: the pod has made the object.
            changes.written(TakenWrite { object: object(name), came: sent, sent });
            advance(ECHO / 2).await;
            show(&changes, "x");
            advance(PATIENCE / 2).await;
            write(&changes, object("x"));
            assert_eq!(changes.first_writes(), [0; 7], "{name:?}");
            advance(ECHO).await;
            show(&changes, "x");
            write(&changes, object("x"));
            assert_eq!(changes.first_writes()[0], 1, "{name:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_is_held_back_follows_when_it_came() {
        let changes = PodChanges::default();
        show(&changes, "x");
        advance(SECOND / 2).await;
        let came = Instant::now();
        advance(20 * SECOND).await;
        changes.written(TakenWrite { object: object("x"), came, sent: Instant::now() });
        assert_eq!(changes.first_writes()[0], 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_too_late_or_forgotten_does_not_count() {
        let changes = PodChanges::default();
        show(&changes, "x");
        show(&changes, "y");
        advance(PATIENCE.saturating_sub(SECOND / 2)).await;
        write(&changes, object("x"));
        assert_eq!(changes.first_writes(), [0, 0, 0, 0, 0, 0, 1]);
        advance(SECOND / 2).await;
        write(&changes, object("y"));
        advance(SECOND).await;
        show(&changes, "y");
        changes.forget();
        write(&changes, object("y"));
        assert_eq!(changes.first_writes(), [0, 0, 0, 0, 0, 0, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn only_so_many_objects_are_known_of() {
        let changes = PodChanges::default();
        for number in 0..2 * MAX_OBJECTS {
            show(&changes, &number.to_string());
            write(&changes, object(&format!("w{number}")));
        }
        assert!(lock(&changes.0).objects.len() <= MAX_OBJECTS);
        advance(PATIENCE).await;
        show(&changes, "x");
        write(&changes, object("x"));
        assert_eq!(changes.first_writes()[0], 1, "there is room again");
    }

    #[tokio::test(start_paused = true)]
    async fn only_kinds_that_the_pod_writes_by_name_count() {
        let changes = PodChanges::default();
        let kind = ("g".to_owned(), "r".to_owned());
        let frame = br#"{"type":"MODIFIED","object":{"metadata":{"name":"x","namespace":"n"}}}"#;
        let shown = || {
            changes.shown_in(frame, Encoding::Json, &kind);
            lock(&changes.0).objects.contains_key(&object("x"))
        };
        assert!(!shown());
        write(&changes, object(""));
        advance(ECHO).await;
        assert!(!shown(), "it has only made one");
        write(&changes, object("z"));
        assert!(shown());
    }
}
