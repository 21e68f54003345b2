//! Knows which kinds a pod watches, and reports that to the manager.
//!
//! A pod that owns a share and watches none of it reconciles nothing, and nobody would notice. A watch of one name does
//! not count: it shows nothing of a share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::wire::{MAX_WATCHED_KINDS, MAX_WATCHED_NAMESPACES, Watched, WatchedKind};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::sync::{lock, read, write};
use tokio::sync::Notify;
use tokio::time;
use tokio_util::sync::CancellationToken;

use crate::policy::{Current, PublishWatches, while_served};

/// From a change to the report on it. Clients end their watches every few minutes, and begin them again at once: within
/// this time, that changes nothing.
const REPORT_DELAY: Duration = Duration::from_secs(1);

/// Before the first report: clients that another process served before begin their watches anew.
const FIRST_REPORT: Duration = Duration::from_secs(5);

/// Kinds that are kept; a pod asks for more only to be a nuisance.
const MAX_KINDS: usize = 4096;

/// The kinds of one pod. Its connections share them.
#[derive(Debug, Default)]
pub(crate) struct PodWatches {
    /// By group and plural.
    kinds: RwLock<BTreeMap<String, BTreeMap<String, Arc<KindWatches>>>>,
    /// Whether there were more.
    overflows: AtomicBool,
    /// A watch began or ended.
    changed: Notify,
}

#[derive(Debug, Default)]
struct KindWatches {
    /// How many watches are open, by namespace; those of all namespaces have the empty name.
    open: Mutex<BTreeMap<String, usize>>,
    /// When one last ended.
    last_watched: AtomicU64,
}

/// A watch counts as open until this is dropped.
#[derive(Debug)]
pub(crate) struct OpenWatch {
    pod: Arc<PodWatches>,
    kind: Arc<KindWatches>,
    namespace: String,
}

impl PodWatches {
    /// A watch that the API server has granted. `None` where it does not count.
    pub(crate) fn begin(self: &Arc<Self>, watch: &RequestInfo<'_>) -> Option<OpenWatch> {
        let counts = |watch: &&RequestInfo<'_>| watch.name().is_empty() && watch.cluster().is_none();
        let kind = Some(watch).filter(counts).and_then(|watch| self.kind(watch))?;
        let namespace = watch.namespace().to_owned();
        *lock(&kind.open).entry(namespace.clone()).or_default() += 1;
        self.changed.notify_one();
        Some(OpenWatch { pod: self.clone(), kind, namespace })
    }

    /// Publishes the kinds that the policy limits as they change: until shutdown, or until the pod is `gone`.
    pub(crate) async fn report(
        self: Arc<Self>,
        policy: Current,
        publish: PublishWatches,
        drain: Drain,
        gone: Option<CancellationToken>,
    ) {
        while_served(self.publish(policy, publish), &drain, gone.as_ref()).await;
    }

    async fn publish(&self, mut policy: Current, publish: PublishWatches) {
        let since = super::now();
        time::sleep(FIRST_REPORT).await;
        loop {
            let watched = self.watched(since, &policy.borrow_and_update());
            publish.publish(Some(Arc::new(watched)));
            tokio::select! {
                () = self.changed.notified() => {}
                // Once the policy's source has ended, the last one stays.
                Ok(()) = policy.changed() => {}
            }
            time::sleep(REPORT_DELAY).await;
        }
    }

    fn watched(&self, since: u64, policy: &Policy) -> Watched {
        let kinds = read(&self.kinds);
        let all = kinds.iter().flat_map(|(group, kinds)| kinds.iter().map(move |(plural, kind)| (group, plural, kind)));
        let mut limited = all.filter(|(group, plural, _)| policy.is_limited(group, plural));
        let mut room = MAX_WATCHED_NAMESPACES;
        let of_kind = |(group, plural, kind): (&String, &String, &Arc<KindWatches>)| {
            let watched = kind.watched(group, plural, room);
            room -= watched.namespaces.len();
            watched
        };
        let named = limited.by_ref().take(MAX_WATCHED_KINDS).map(of_kind).collect();
        let more = limited.next().is_some() || self.overflows.load(Ordering::Relaxed);
        drop(kinds);
        Watched { since, kinds: named, more }
    }

    fn known(&self, request: &RequestInfo<'_>) -> Option<Arc<KindWatches>> {
        read(&self.kinds).get(request.api_group())?.get(request.resource()).cloned()
    }

    /// `None` where there are too many.
    fn kind(&self, request: &RequestInfo<'_>) -> Option<Arc<KindWatches>> {
        if let Some(kind) = self.known(request) {
            return Some(kind);
        }
        let mut kinds = write(&self.kinds);
        if kinds.values().map(BTreeMap::len).sum::<usize>() >= MAX_KINDS {
            self.overflows.store(true, Ordering::Relaxed);
            return None;
        }
        let group = kinds.entry(request.api_group().to_owned()).or_default();
        let kind = group.entry(request.resource().to_owned()).or_default().clone();
        drop(kinds);
        Some(kind)
    }
}

impl KindWatches {
    /// Names so many namespaces at most.
    fn watched(&self, group: &str, resource: &str, room: usize) -> WatchedKind {
        let open = lock(&self.open);
        let mut namespaces = open.keys().filter(|namespace| !namespace.is_empty());
        WatchedKind {
            group: group.to_owned(),
            resource: resource.to_owned(),
            everywhere: open.contains_key(""),
            namespaces: namespaces.by_ref().take(room).cloned().collect(),
            more: namespaces.next().is_some(),
            last_watched: if open.is_empty() { self.last_watched.load(Ordering::Relaxed) } else { 0 },
        }
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        let mut open = lock(&self.kind.open);
        if let Some(count) = open.get_mut(&self.namespace) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.namespace);
            }
        }
        self.kind.last_watched.store(super::now(), Ordering::Relaxed);
        drop(open);
        self.pod.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::Limit;
    use ctrlmesh_common::resource::ResourceMatch;
    use tokio::sync::watch;

    use super::*;
    use crate::policy::{PodName, WatchReports};

    /// Limits pods and config maps.
    fn policy() -> Policy {
        let resources = ["pods", "configmaps"].map(ToOwned::to_owned).to_vec();
        let limited = ResourceMatch { api_groups: vec![String::new()], resources };
        Policy { limits: vec![Limit { relate_resources: vec![limited], ..Limit::default() }], ..Policy::default() }
    }

    fn get(target: &str) -> RequestInfo<'_> {
        RequestInfo::parse("GET", target).unwrap()
    }

    /// Of each kind its plural, and where it is watched.
    fn open(pod: &PodWatches) -> Vec<(String, bool, Vec<String>)> {
        let kinds = pod.watched(7, &policy()).kinds.into_iter();
        kinds.map(|kind| (kind.resource, kind.everywhere, kind.namespaces)).collect()
    }

    #[test]
    fn a_watch_is_open_until_the_last_of_its_namespace_ends() {
        let pod = Arc::new(PodWatches::default());
        let begin = |target| pod.begin(&get(target));
        let everywhere = [begin("/api/v1/pods?watch=1"), begin("/api/v1/pods?watch=1&labelSelector=a%3Db")];
        let within = begin("/api/v1/namespaces/a/configmaps?watch=1");
        let one = "/api/v1/namespaces/a/pods?watch=1&fieldSelector=metadata.name%3Dx";
        assert!(begin(one).is_none(), "it shows one object");
        let unlimited = begin("/api/v1/services?watch=1");
        let text = str::to_owned;
        let both = [(text("configmaps"), false, vec![text("a")]), (text("pods"), true, vec![])];
        assert_eq!(open(&pod), both);
        let [first, second] = everywhere;
        drop(first);
        assert_eq!(open(&pod), both);
        drop((second, within, unlimited));
        let neither = [(text("configmaps"), false, vec![]), (text("pods"), false, vec![])];
        assert_eq!(open(&pod), neither, "it is known that they were watched");
        assert!(pod.watched(7, &policy()).kinds.iter().all(|kind| kind.last_watched > 0));
        assert!(pod.watched(7, &Policy::default()).kinds.is_empty());
    }

    #[test]
    fn what_is_reported_is_bounded() {
        let pod = Arc::new(PodWatches::default());
        let open: Vec<_> = (0..=MAX_WATCHED_NAMESPACES)
            .map(|at| pod.begin(&get(&format!("/api/v1/namespaces/n{at}/pods?watch=1"))).unwrap())
            .collect();
        for at in 0..MAX_KINDS {
            drop(pod.begin(&get(&format!("/apis/g/v1/r{at}?watch=1"))));
        }
        assert!(pod.begin(&get("/api/v1/configmaps?watch=1")).is_none(), "there is no room");
        let all = Policy { limits: vec![Limit::default()], ..Policy::default() };
        let watched = pod.watched(7, &all);
        assert_eq!((watched.kinds.len(), watched.more), (MAX_WATCHED_KINDS, true));
        assert_eq!((watched.kinds[0].namespaces.len(), watched.kinds[0].more), (MAX_WATCHED_NAMESPACES, true));
        drop(open);
        assert!(pod.watched(7, &policy()).more, "nobody knows which kinds there was no room for");
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_begins_again_at_once_never_ended() {
        let (reports, name) = (WatchReports::default(), "ops/a".parse::<PodName>().unwrap());
        let (_sender, current) = watch::channel(Arc::new(policy()));
        let pod = Arc::new(PodWatches::default());
        let said = reports.changes();
        let drain = Drain::default();
        drain.spawn(pod.clone().report(current, reports.begin(name.clone()), drain.clone(), None));
        let is_watched_after = async |milliseconds| {
            time::sleep(Duration::from_millis(milliseconds)).await;
            said.borrow().get(&name).map(|now| now.state.kinds.iter().any(|kind| kind.everywhere))
        };
        assert_eq!(is_watched_after(4900).await, None, "the clients have not come yet");
        let watch = pod.begin(&get("/api/v1/pods?watch=1"));
        assert_eq!(is_watched_after(200).await, Some(true));
        // Long after the last report, and other tasks run in between.
        is_watched_after(60_000).await;
        let before = said.borrow().get(&name).unwrap().state.clone();
        drop(watch);
        assert_eq!(is_watched_after(100).await, Some(true));
        let again = pod.begin(&get("/api/v1/pods?watch=1"));
        assert_eq!(is_watched_after(5000).await, Some(true));
        assert!(Arc::ptr_eq(&before, &said.borrow().get(&name).unwrap().state), "there was nothing to say");
        drop(again);
        assert_eq!(is_watched_after(900).await, Some(true));
        assert_eq!(is_watched_after(200).await, Some(false));
    }
}
