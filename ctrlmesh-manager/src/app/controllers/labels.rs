//! Starts labelling and migration of labels.

use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::names::MANAGER_STATE;
use kube::Client;
use kube::runtime::events::Recorder;
use tokio::time;
use tracing::warn;

use super::{LABEL, REPORTER, ReceiptCache, at};
use crate::app::context::Context;
use crate::cluster::cache::Cache;
use crate::cluster::event_recorder::EventRecorder;
use crate::cluster::plan::Plans;
use crate::labels::migration::{Migration, MigrationMetrics, MigrationNotice};
use crate::labels::{AdmissionLabelling, CurrentProgress, LabelMetrics, Labeller, ObjectCounts, Progress, RateLimit};
use crate::leader::lease::Leadership;
use crate::rules::label_scheme::Scheme;
use crate::status::compute::Unlabelled;
use crate::status::status_writer::StatusWriter;

/// How long labelling waits for the scheme in the `ManagerState`. An older definition never stores it.
const WRITTEN_WITHIN: Duration = Duration::from_secs(10);

/// What labelling and migration share.
#[derive(Clone)]
pub(super) struct LabelState {
    pub(super) cache: Arc<Cache>,
    pub(super) progress: CurrentProgress,
    pub(super) notice: MigrationNotice,
    pub(super) counts: ObjectCounts,
}

impl LabelState {
    /// What is wrong with labels. Objects that no shard owns come first.
    pub(super) fn unlabelled(&self) -> Option<Unlabelled> {
        let left = self.progress.left().map(Unlabelled::Some);
        left.or_else(|| self.notice.get().map(Unlabelled::Beside))
    }
}

/// Migrates labels, while this replica leads.
pub(super) fn migrate_labels(
    context: &Context,
    labels: LabelState,
    plans: Plans,
    status_writer: StatusWriter,
    metrics: MigrationMetrics,
) {
    let receipts = ReceiptCache::by(&context.store);
    let migration = Migration {
        client: context.client.clone(),
        namespace: context.args.namespace.clone(),
        wanted: context.labelling.clone(),
        keeps_former: context.args.keep_former_labels,
        cache: labels.cache,
        plans,
        contacts: move || receipts.contacts(),
        current: labels.progress,
        leadership: context.leadership.clone(),
        status_writer,
        recorder: Recorder::new(context.client.clone(), REPORTER.into()),
        metrics,
        notice: labels.notice,
    };
    context.drain.spawn_until_started(migration.run());
}

/// Labels objects by the current scheme, while this replica leads.
pub(super) fn keep_labels(context: &Context, background: Client, labels: LabelState, metrics: LabelMetrics) {
    let (this, mut leadership) = (context.clone(), context.leadership.clone());
    let mut schemes = labels.cache.schemes();
    context.drain.spawn_until_started(async move {
        loop {
            leadership.acquired().await;
            let mut here = Leadership::clone(&leadership);
            let scheme = schemes.borrow_and_update().clone();
            let progress = labels.progress.set(scheme.clone());
            let labelling = async {
                let Some(scheme) = scheme else { return std::future::pending().await };
                // The next leader must know by which scheme objects were labelled.
                if time::timeout(WRITTEN_WITHIN, labels.cache.scheme_written()).await.is_err() {
                    warn!(state = MANAGER_STATE, "objects are labelled, and it is not written by what");
                }
                let labeller = labeller(&this, background.clone(), scheme, &labels, metrics.clone(), progress);
                Box::pin(Arc::new(labeller).run(this.drain.clone())).await;
            };
            tokio::select! {
                () = labelling => {}
                // The scheme changed.
                _ = schemes.changed() => {}
                // Another replica leads now.
                () = here.lost() => {}
            }
            labels.progress.set(None);
        }
    });
}

fn labeller(
    context: &Context,
    background: Client,
    scheme: Arc<Scheme>,
    labels: &LabelState,
    metrics: LabelMetrics,
    progress: Progress,
) -> Labeller<impl Fn() -> bool + Send + Sync + 'static> {
    let (leadership, ca_store) = (context.leadership.clone(), context.ca_store.clone());
    let at_once = AdmissionLabelling {
        client: context.client.clone(),
        namespace: context.args.namespace.clone(),
        scheme: Arc::clone(&scheme),
        webhook_client: at(context.webhook_client.clone(), LABEL),
        trust_bundle: Arc::new(move || ca_store.current().manager.bundle()),
    };
    Labeller {
        client: background.clone(),
        namespace: context.args.namespace.clone(),
        scheme,
        at_once,
        cache: Arc::clone(&labels.cache),
        recorder: EventRecorder::new(background, REPORTER.into()),
        metrics,
        progress,
        counts: labels.counts.clone(),
        may_write: move || leadership.is_held(),
        rate_limit: RateLimit::per_second(context.args.label_rate),
    }
}
