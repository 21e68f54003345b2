//! Labels the objects of one kind.
//!
//! New objects come first: a second watch, from now on, shows them until the list is done.

use std::collections::BTreeSet;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ListParams, WatchParams};
use kube::core::{DynamicObject, PartialObjectMeta, WatchEvent};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Error, Event, watcher};
use kube::{Api, Client};
use tokio::time::{self, Instant};
use tracing::{info, warn};

use super::{DEADLINE, Labeller, PAGE, RepairOutcome};
use crate::labels::object_counts::{KeptBy, KindCounter};
use crate::labels::progress::KindProgress;
use crate::labels::retry_queue::RetryQueue;
use crate::labels::{Change, Kind, change, is_unowned, is_waited_for};
use crate::rules::object_name::full_name;
use crate::rules::shard::Labelling;

/// Pause before the watch of new objects starts again.
const PAUSE: Duration = Duration::from_secs(1);

/// Watch failures in a row that are reported.
const FAILURES: u32 = 3;

struct KindFollower<MayWrite> {
    labels: Arc<Labeller<MayWrite>>,
    name: String,
    kind: Kind,
    unfinished: KindProgress,
    counter: KindCounter,
    retries: RetryQueue,
    /// Objects that were labelled in this pass.
    repaired: u64,
    /// Whether the list is done.
    listed: bool,
    /// Watch failures in a row.
    failures: u32,
    reported: Option<String>,
}

enum Next {
    Fresh(Box<ObjectMeta>),
    Seen(Box<Result<Event<PartialObjectMeta<DynamicObject>>, Error>>),
    Due,
    Ended,
}

pub(super) async fn follow<MayWrite>(
    labels: Arc<Labeller<MayWrite>>,
    name: String,
    kind: Kind,
    label_keys: BTreeSet<String>,
    unfinished: KindProgress,
) where
    MayWrite: Fn() -> bool + Send + Sync + 'static,
{
    let (retries, repaired, listed, failures) = (RetryQueue::default(), 0, false, 0);
    let carried = labels.scheme.carried().flat_map(Labelling::keys).map(str::to_owned);
    let kept_by = KeptBy { hash: labels.scheme.in_force.hash, label_keys: carried.chain(label_keys).collect() };
    let counter = labels.counts.counter(&name, &kind, kept_by);
    let reported = None;
    let mut this =
        KindFollower { labels, name, kind, unfinished, counter, retries, repaired, listed, failures, reported };
    loop {
        Box::pin(this.pass()).await;
    }
}

impl<MayWrite: Fn() -> bool + Send + Sync + 'static> KindFollower<MayWrite> {
    /// Lists and watches, until the kind must be listed again.
    async fn pass(&mut self) {
        let client: &Client = &self.labels.client;
        let seen: Api<PartialObjectMeta<DynamicObject>> = Api::all_with(client.clone(), &self.kind.resource);
        let events = watcher(seen, Config::default().page_size(PAGE)).default_backoff();
        let mut events = pin!(events);
        let mut fresh = fresh(Api::all_with(client.clone(), &self.kind.resource)).boxed();
        self.listed = false;
        // After watch failures a new list shows when the kind is readable again.
        while !(self.retries.overflows() || self.listed && self.failures >= FAILURES) {
            match self.next(&mut fresh, events.as_mut()).await {
                Next::Fresh(meta) => self.look(&meta).await,
                Next::Seen(event) => self.seen(*event).await,
                Next::Due => {
                    if let Some((meta, change)) = self.retries.next(Instant::now()) {
                        self.look_again(&meta, change).await;
                    }
                }
                Next::Ended => return,
            }
            if self.listed {
                // From here on the main watch shows everything.
                fresh = stream::pending().boxed();
            }
            self.report().await;
        }
    }

    async fn next(
        &self,
        fresh: &mut BoxStream<'_, ObjectMeta>,
        mut events: Pin<&mut (impl Stream<Item = Result<Event<PartialObjectMeta<DynamicObject>>, Error>> + Send)>,
    ) -> Next {
        let due = self.retries.due();
        tokio::select! {
            biased;
            // New objects do not wait for old ones.
            Some(meta) = fresh.next() => Next::Fresh(Box::new(meta)),
            event = events.next() => event.map_or(Next::Ended, |event| Next::Seen(Box::new(event))),
            () = time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => Next::Due,
        }
    }

    async fn seen(&mut self, event: Result<Event<PartialObjectMeta<DynamicObject>>, Error>) {
        // The start of a list proves nothing yet.
        if !matches!(event, Ok(Event::Init) | Err(_)) {
            self.failures = 0;
        }
        match event {
            Ok(Event::InitApply(object) | Event::Apply(object)) => {
                self.counter.there_is(&object.metadata);
                self.look(&object.metadata).await;
            }
            Ok(Event::InitDone) => {
                self.counter.list_ends();
                self.listed = true;
                self.unfinished.unseen(None);
            }
            Ok(Event::Delete(object)) => {
                self.counter.there_is_no(&object.metadata);
                self.retries.done(&object.metadata);
            }
            Ok(Event::Init) => {
                self.counter.list_begins();
                self.retries.listed_anew();
            }
            Err(error) => {
                let text = error.to_string();
                warn!(kind = self.name, error = text, "watch failed; goes on");
                if !self.listed || is_refused(&error) {
                    self.failures = self.failures.saturating_add(1);
                }
                if self.failures >= FAILURES {
                    self.counter.cannot_list();
                    self.unfinished.unseen(Some(&text));
                }
            }
        }
    }

    /// Labels the object, if necessary, within the rate limit.
    async fn look(&mut self, meta: &ObjectMeta) {
        let needs = change(meta, self.kind.scope, &self.labels.scheme);
        if needs.is_some() {
            self.labels.rate_limit.wait().await;
        }
        self.settle(meta, needs).await;
    }

    /// Reads the object again, within the rate limit, and labels it.
    async fn look_again(&mut self, meta: &ObjectMeta, before: Change) {
        self.labels.rate_limit.wait().await;
        match self.labels.metadata(&self.kind, meta).await {
            Ok(Some(now)) => {
                let needs = change(&now, self.kind.scope, &self.labels.scheme);
                self.settle(&now, needs).await;
            }
            Ok(None) => self.retries.done(meta),
            Err(why) => {
                let (kind, object) = (&self.name, meta.name.as_deref());
                warn!(kind, object, namespace = meta.namespace, error = why, "not seen");
                self.fail(meta, before, &why);
            }
        }
    }

    async fn settle(&mut self, meta: &ObjectMeta, needs: Option<Change>) {
        match needs {
            Some(change) => self.repair(meta, change).await,
            None if is_waited_for(meta, self.kind.scope, &self.labels.scheme) => {
                self.unfinished.failed(&format!("{} is on its way out", full_name(meta)));
                self.retries.leaves(meta);
            }
            None => self.retries.done(meta),
        }
    }

    fn fail(&mut self, meta: &ObjectMeta, change: Change, why: &str) {
        self.unfinished.failed(why);
        self.retries.failed(meta, change, Instant::now());
    }

    async fn repair(&mut self, meta: &ObjectMeta, change: Change) {
        let repaired = self.labels.repair_object(&self.name, &self.kind, meta, change.clone());
        match repaired.await {
            RepairOutcome::Done => {
                self.repaired += 1;
                if is_unowned(&change, &self.labels.scheme) {
                    self.unfinished.labelled();
                }
                self.retries.done(meta);
            }
            RepairOutcome::Undone => self.retries.failed(meta, change, Instant::now()),
            RepairOutcome::Gone => self.retries.done(meta),
            RepairOutcome::Changed(why) => {
                if self.retries.changed(meta, change, Instant::now()) {
                    self.unfinished.failed(&why);
                }
            }
            RepairOutcome::Failed(why) => self.fail(meta, change, &why),
        }
    }

    /// Reports the progress where it changed.
    async fn report(&mut self) {
        let is_seen = self.listed && self.failures < FAILURES;
        let finished = is_seen && self.retries.is_empty();
        let changed = self.unfinished.set(!finished);
        if !self.listed && self.failures < FAILURES {
            return;
        }
        if finished {
            if (changed || self.reported.is_some()) && self.repaired > 0 {
                let (kind, repaired) = (&self.name, self.repaired);
                info!(kind, repaired, "gone through: every object is labelled");
                let note = format!(
                    "every object of {kind} has its labels; {repaired} had to be given some, or had others left over"
                );
                self.labels.publish_event(kind, false, "Labelled", note).await;
            }
            (self.repaired, self.reported) = (0, None);
        } else if let Some(why) = self.unfinished.why()
            && self.reported.as_ref() != Some(&why)
        {
            self.labels.publish_event(&self.name, true, "NotLabelled", why.clone()).await;
            self.reported = Some(why);
        }
    }
}

/// Whether the API server rejects the watch. Outages and expired versions pass by themselves.
fn is_refused(error: &Error) -> bool {
    let code = match error {
        Error::WatchStartFailed(kube::Error::Api(status)) | Error::WatchError(status) => status.code,
        _ => return false,
    };
    matches!(code, 400..=499) && !matches!(code, 408 | 410 | 429)
}

/// New and changed objects, for ever. A restarted watch may miss some.
fn fresh(api: Api<DynamicObject>) -> impl Stream<Item = ObjectMeta> + Send {
    let watches = stream::unfold(api, |api| async {
        let watch = time::timeout(DEADLINE, from_now_on(&api)).await;
        let watch = match watch {
            Ok(Ok(watch)) => watch,
            // The list will show the objects.
            Ok(Err(_)) | Err(_) => stream::empty().boxed(),
        };
        Some((watch.chain(pause()), api))
    });
    watches.flatten()
}

async fn from_now_on(api: &Api<DynamicObject>) -> kube::Result<BoxStream<'static, ObjectMeta>> {
    let now = api.list_metadata(&ListParams::default().limit(1)).await?.metadata.resource_version;
    let api = api.clone();
    let watch = api.watch_metadata(&WatchParams::default(), &now.unwrap_or_default()).await?;
    let changed = watch.filter_map(async |event| match event {
        Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => Some(object.metadata),
        Ok(_) | Err(_) => None,
    });
    Ok(changed.boxed())
}

/// Ends after a while, without an item.
fn pause() -> impl Stream<Item = ObjectMeta> + Send {
    stream::once(time::sleep(PAUSE)).filter_map(async |()| None)
}
