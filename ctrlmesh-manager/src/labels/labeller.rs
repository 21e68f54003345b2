//! Labels existing objects, and those that admission missed.
//!
//! There is one watch of metadata per kind. A list comes page by page, and the next page is requested when the last one
//! is labelled. Labelled objects cost nothing, so an interrupted pass resumes quickly.
//!
//! All kinds share one rate limit, in order of their requests, so none starves. New objects and namespaces do not wait
//! for old ones.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::names::resource_list;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ObjectReference};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::{ApiResource, DynamicObject, PartialObjectMeta};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::events::{Event as News, EventType};
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::time::{self, Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::namespaces::Namespaces;
use super::progress::{KindProgress, ListProgress};
use super::{AdmissionLabelling, Kind, Kinds, KindsError, NAMESPACES, ObjectCounts, Progress, RateLimit, Served};
use super::{is_unowned, list_of_kinds};
use crate::cluster::cache::Cache;
use crate::cluster::event_recorder::EventRecorder;
use crate::drain::Drain;
use crate::rules::label_coverage::{self, KindName};
use crate::rules::label_scheme::Scheme;
use crate::telemetry;

mod wanted;
mod kind_follower;
mod object;

use object::RepairOutcome;
use wanted::WantedKinds;

const PAGE: u32 = 500;

/// How long changes of the list and of definitions are gathered, and the interval without any.
const LOOK: (Duration, Duration) = (Duration::from_millis(300), Duration::from_mins(1));

/// Interval of checks for rights that are missing.
const RIGHTS: Duration = Duration::from_secs(5);

/// Interval of checks for new namespaces during a long pass.
const NEW_NAMESPACES: Duration = Duration::from_secs(1);

/// For one object.
const DEADLINE: Duration = Duration::from_secs(10);

/// Name of the role that the manager proposes for the listed kinds.
const ROLE: &str = "ctrlmesh-labels";

/// By the name of the kind.
type Followers = BTreeMap<String, Follower>;

/// What follows one kind.
struct Follower {
    kind: Kind,
    /// Those of its objects that are kept, beside our own.
    label_keys: BTreeSet<String>,
    ends: CancellationToken,
}

/// What was reported of the list.
#[derive(Default)]
struct Reported {
    not_served: Vec<String>,
    forbidden: Vec<KindName>,
}

pub struct Labeller<MayWrite> {
    /// A client of its own, so that the API server can give it a lower priority by its user agent.
    pub client: Client,
    /// The manager's namespace, with the list of kinds.
    pub namespace: String,
    pub scheme: Arc<Scheme>,
    pub at_once: AdmissionLabelling,
    pub cache: Arc<Cache>,
    pub recorder: EventRecorder,
    pub metrics: LabelMetrics,
    pub progress: Progress,
    pub counts: ObjectCounts,
    /// Whether this replica leads at this moment.
    pub may_write: MayWrite,
    pub rate_limit: RateLimit,
}

#[derive(Clone, Debug, Default)]
pub struct LabelMetrics {
    repairs: Family<Repair, Counter>,
    kinds: Gauge,
    unfinished: Gauge,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct Repair {
    kind: String,
    outcome: &'static str,
}

impl<MayWrite: Fn() -> bool + Send + Sync + 'static> Labeller<MayWrite> {
    pub async fn run(self: Arc<Self>, drain: Drain) {
        let all = CancellationToken::new();
        // Ends the tasks of all kinds.
        let _guard = all.clone().drop_guard();
        let unfinished = self.unfinished(NAMESPACES);
        let namespaces = Arc::clone(&self).follow_namespaces(unfinished);
        spawn(&drain, &all, namespaces);
        let mut running = Followers::new();
        let mut triggers = pin!(self.triggers());
        let list = ListProgress::new(&self.metrics.unfinished, &self.progress);
        let (mut wanted, mut reported, mut kept) = (WantedKinds::default(), Reported::default(), None);
        loop {
            let look = wanted.look(&self.client, &self.namespace, &self.cache, &self.progress);
            let (found, named) = Box::pin(look).await;
            // First the followers, so that a kind that a root names is known to be unfinished.
            self.change(&wanted, &mut running, &all, &drain);
            self.progress.name(named);
            Box::pin(self.report(&list, &found, &wanted.listed_without_rights(), &mut reported)).await;
            Box::pin(self.keep_at_once(&wanted.granted, &mut kept)).await;
            let within = if wanted.lacks_rights() { RIGHTS } else { LOOK.1 };
            tokio::select! {
                _ = triggers.next() => {}
                () = wanted.changed(&self.cache) => {}
                () = time::sleep(within) => {}
            }
            time::sleep(LOOK.0).await;
            // Definitions are often created in groups.
            while futures::FutureExt::now_or_never(triggers.next()).flatten().is_some() {}
        }
    }

    /// Keeps labelling at admission. `kept` are the kinds for which it was set up last, and when.
    async fn keep_at_once(&self, kinds: &Kinds, kept: &mut Option<(Kinds, Instant)>) {
        let is_recent = |(before, at): &(Kinds, Instant)| before == kinds && at.elapsed() < LOOK.1;
        if kept.as_ref().is_some_and(is_recent) || !(self.may_write)() {
            return;
        }
        let outcome = self.at_once.keep(kinds).await;
        match &outcome {
            Ok(()) => *kept = Some((kinds.clone(), Instant::now())),
            Err(error) => warn!(%error, "labelling at once is not set up; the watches label"),
        }
        self.progress.at_once(outcome.map_err(|error| error.to_string()));
    }

    /// Reports problems with the list: groups that cannot be discovered, kinds that are not served, and those that may
    /// not be labelled.
    async fn report(
        &self,
        list: &ListProgress,
        found: &Result<Served, KindsError>,
        forbidden: &[KindName],
        reported: &mut Reported,
    ) {
        let why: Vec<String> = match found {
            Ok(served) => served.unknown.iter().map(|error| telemetry::chain(error)).collect(),
            Err(error) => vec![telemetry::chain(error)],
        };
        let why = (!why.is_empty()).then(|| why.join("; "));
        if list.report(why.clone())
            && let Some(error) = why
        {
            warn!(error, "not all that is listed can be labelled; what was known holds");
            self.publish_event("list", true, "NotLabelled", error).await;
        }
        if forbidden != reported.forbidden {
            for role in label_coverage::cluster_roles(ROLE, forbidden) {
                warn!(role, "some of what is listed may not be labelled; apply this role");
                self.publish_event("list", true, "LabelsForbidden", role).await;
            }
            forbidden.clone_into(&mut reported.forbidden);
        }
        let Ok(Served { missing, .. }) = found else { return };
        if *missing != reported.not_served && !missing.is_empty() {
            let kinds = missing.join(", ");
            warn!(kinds, "listed, but not served, or not so that it can be labelled");
            let note = format!("not served, or not so that it can be labelled: {kinds}");
            self.publish_event("list", true, "NotServed", note).await;
        }
        reported.not_served.clone_from(missing);
    }

    /// Starts the followers of new kinds and ends those of removed ones.
    fn change(self: &Arc<Self>, wanted: &WantedKinds, running: &mut Followers, all: &CancellationToken, drain: &Drain) {
        let kinds = &wanted.granted;
        running.retain(|name, follower| {
            let stays = kinds.get(name) == Some(&follower.kind);
            if !stays {
                info!(kind = name, "no longer labelled");
            }
            // By further labels, its objects have to be listed anew.
            let stays = stays && wanted.label_keys(&follower.kind).is_subset(&follower.label_keys);
            if !stays {
                follower.ends.cancel();
            }
            stays
        });
        for (name, kind) in kinds {
            running.entry(name.clone()).or_insert_with(|| {
                info!(kind = name, "labelled from now on");
                let (ends, label_keys) = (all.child_token(), wanted.label_keys(kind));
                let unfinished = self.unfinished(name);
                let (labels, kind) = (Arc::clone(self), kind.clone());
                let follow = kind_follower::follow(labels, name.clone(), kind.clone(), label_keys.clone(), unfinished);
                spawn(drain, &ends, follow);
                Follower { kind, label_keys, ends }
            });
        }
        self.metrics.kinds.set(i64::try_from(running.len()).unwrap_or(i64::MAX));
    }

    fn unfinished(&self, kind: &str) -> KindProgress {
        KindProgress::new(&self.metrics.unfinished, &self.progress, kind)
    }

    /// One item whenever the list or a definition may have changed.
    fn triggers(&self) -> impl futures::Stream<Item = ()> + use<MayWrite> {
        let config = Config::default().page_size(PAGE);
        let definitions = Api::<PartialObjectMeta<CustomResourceDefinition>>::all(self.client.clone());
        let definitions = watcher(definitions, config.clone()).default_backoff().map(drop);
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), &self.namespace);
        let one = config.fields(&format!("metadata.name={}", resource_list::NAME));
        stream::select(definitions, watcher(maps, one).default_backoff().map(drop))
    }

    async fn follow_namespaces(self: Arc<Self>, mut unfinished: KindProgress) {
        self.cache.synced().await;
        let mut changes = self.cache.changes();
        let resource = ApiResource::erase::<Namespace>(&());
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        let mut all = Namespaces::default();
        loop {
            changes.mark_unchanged();
            let began = Instant::now();
            let mut left = all.due(&self.cache.namespaces(), &self.scheme, began).into_iter();
            // The watch shows labelled namespaces with the next change.
            let was_any = left.len() > 0;
            for (meta, change) in left.by_ref() {
                self.rate_limit.wait().await;
                match self.repair(NAMESPACES, &api, &meta, change.clone()).await {
                    RepairOutcome::Failed(why) => {
                        unfinished.failed(&why);
                        all.failed(&meta, change, Instant::now());
                    }
                    RepairOutcome::Changed(why) => {
                        if all.changed(&meta, change, Instant::now()) {
                            unfinished.failed(&why);
                        }
                    }
                    RepairOutcome::Done => {
                        if is_unowned(&change, &self.scheme) {
                            unfinished.labelled();
                        }
                        all.done(&meta);
                    }
                    RepairOutcome::Undone => all.failed(&meta, change, Instant::now()),
                    RepairOutcome::Gone => all.done(&meta),
                }
                if began.elapsed() > NEW_NAMESPACES {
                    break;
                }
            }
            if left.next().is_some() {
                continue;
            }
            if let Some(name) = all.leaving() {
                unfinished.failed(&format!("{name} is on its way out"));
            }
            unfinished.set(was_any || !all.is_empty());
            tokio::select! {
                _ = changes.changed() => {}
                // A retry is due.
                () = time::sleep_until(all.again().unwrap_or(began)), if all.again().is_some() => {}
            }
        }
    }

    /// Publishes an event on the list of kinds. What only roots name is in their conditions, and events of these.
    async fn publish_event(&self, kind: &str, warning: bool, reason: &str, note: String) {
        if self.progress.is_only_named(kind) {
            return;
        }
        let event = News {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            note: Some(note.chars().take(label_coverage::NOTE_BYTES).collect()),
            action: "Label".to_owned(),
            secondary: Some(ObjectReference { kind: Some(kind.to_owned()), ..ObjectReference::default() }),
        };
        let list = list_of_kinds(&self.namespace);
        match time::timeout(DEADLINE, self.recorder.publish(&event, &list)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "event not written"),
            Err(_elapsed) => warn!("event not written in time"),
        }
    }
}

impl LabelMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        let help = "Objects whose labels were put right, by kind and outcome: done, gone, changed, undone or failed";
        registry.register("label_repairs", help, this.repairs.clone());
        registry.register("label_kinds", "Kinds whose objects are labelled", this.kinds.clone());
        let help = "Kinds that were not gone through yet, or of which some cannot be seen or labelled, and the list of kinds where something is wrong with it: 0 when everything is labelled";
        registry.register("label_kinds_unfinished", help, this.unfinished.clone());
        this
    }
}

fn spawn(drain: &Drain, token: &CancellationToken, task: impl Future<Output = ()> + Send + 'static) {
    let token = token.clone();
    drain.spawn_until_started(async move {
        tokio::select! {
            // The kind was removed, or this replica does not lead any more.
            () = token.cancelled() => {}
            () = task => {}
        }
    });
}
