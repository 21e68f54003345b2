//! Starts the controllers of a replica.
//!
//! Every replica watches, compiles, serves its proxies and answers the API server. The leader also writes.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use ctrlmesh_common::api::{CircuitBreaker, FaultInjection, ShardingConfig};
use ctrlmesh_common::policy::Redirect;
use ctrlmesh_runtime::sync::lock;
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::WebhookClientConfig;
use kube::Client;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tracing::warn;

use crate::admission::webhook::Route;
use crate::app::api_client::{self, ReachError};
use crate::app::context::Context;
use crate::audit::{AuditMetrics, Auditor, Ownerships};
use crate::cluster::cache::Cache;
use crate::cluster::event_recorder::EventRecorder;
use crate::cluster::evidence::{EvidenceFollower, InForce};
use crate::cluster::plan::{self, Plan, Plans};
use crate::labels::migration::{MigrationMetrics, MigrationNotice};
use crate::labels::{CurrentProgress, LabelMetrics, ObjectCounts};
use crate::leader::replica_list::ReplicaList;
use crate::ownership::FenceKeeper;
use crate::ownership::fence_state::{self, FenceStates, States};
use crate::push::policy_store::{EnrolledPod, PolicyStore, Receipt};
use crate::rollout::RolloutMetrics;
use crate::rollout::controller::RolloutController;
use crate::rules::pod::{Member, PodName};
use crate::rules::rollout::Decisions;
use crate::rules::shared::{Shared, each};
use crate::status::cluster_writer::ClusterWriter;
use crate::status::compute::Contact;
use crate::status::rules_writer::RulesWriter;
use crate::status::status_writer::StatusWriter;
use crate::telemetry;

mod condition_metrics;
mod labels;
mod pod_reports;
mod webhook_routes;

use condition_metrics::ConditionMetrics;
use labels::{LabelState, keep_labels, migrate_labels};

const REPORTER: &str = "ctrlmesh-manager";

/// Path of the labelling webhook.
const LABEL: &str = "/label";

/// What the controllers count.
pub(super) struct ControllerMetrics {
    labels: LabelMetrics,
    migration: MigrationMetrics,
    rollouts: RolloutMetrics,
    audit: AuditMetrics,
    conditions: ConditionMetrics,
}

impl ControllerMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        Self {
            labels: LabelMetrics::register(registry),
            migration: MigrationMetrics::register(registry),
            rollouts: RolloutMetrics::register(registry),
            audit: AuditMetrics::register(registry),
            conditions: ConditionMetrics::register(registry),
        }
    }
}

/// Starts all controllers, and returns the webhook routes.
///
/// `background` is a client with a lower priority.
pub(super) fn start(context: &Context, background: Client, counted: ControllerMetrics) -> Vec<Route> {
    let drain = &context.drain;
    let labelling = context.labelling.clone();
    let cache = Cache::start(&context.client, &context.args.namespace, labelling, drain);
    cache.watch_list(background.clone(), &context.args.namespace, drain);
    let (proved, evidence) = watch::channel(None);
    let plans = plan::start(Arc::clone(&cache), evidence, drain);
    pod_reports::follow(context, &cache, &plans);
    counted.conditions.follow(&plans, &context.leadership);
    let caches = context.readiness.block("caches");
    let mut first = context.published.subscribe();
    drain.spawn_until_started(async move {
        // The sender lives as long as the process.
        drop(first.wait_for(Option::is_some).await);
        drop(caches);
    });
    drain.spawn_until_started(publish_policies(context.store.clone(), context.published.clone(), plans.clone()));
    let (receipts, leadership) = (ReceiptCache::by(&context.store), context.leadership.clone());
    let labels = LabelState {
        cache: Arc::clone(&cache),
        progress: CurrentProgress::default(),
        notice: MigrationNotice::default(),
        counts: ObjectCounts::default(),
    };
    let reported = labels.clone();
    let (decisions, findings) = (watch::Sender::default(), watch::Sender::default());
    let control = ClusterWriter {
        client: context.client.clone(),
        recorder: EventRecorder::new(context.client.clone(), REPORTER.into()),
        contacts: move || receipts.contacts(),
        labels: move |configs: &[Shared<ShardingConfig>]| (reported.unlabelled(), reported.progress.coverages(configs)),
        fences: context.fences.subscribe(),
        rollouts: decisions.subscribe(),
        ownerships: findings.subscribe(),
        may_write: move || leadership.is_held(),
    };
    drain.spawn_until_started(control.run(plans.clone()));
    drain.spawn_until_started(rules_writer::<CircuitBreaker>(context, &plans, &labels).run());
    drain.spawn_until_started(rules_writer::<FaultInjection>(context, &plans, &labels).run());
    try_versions(context, &plans, &labels, decisions, counted.rollouts);
    drain.spawn_until_started(auditor(context, &plans, &labels, counted.audit, findings).run());
    keep_fences(context, &cache, &plans);
    drain.spawn_until_started(follower(context, plans.clone(), context.fences.subscribe()).run(proved));
    let status_writer = StatusWriter::default();
    drain.spawn_until_started(replica_list(context, status_writer.clone()).run());
    migrate_labels(context, labels.clone(), plans.clone(), status_writer, counted.migration);
    keep_labels(context, background, labels, counted.labels);
    webhook_routes::routes(context, &plans, &cache)
}

/// Tries new versions of operators, while this replica leads.
fn try_versions(
    context: &Context,
    plans: &Plans,
    labels: &LabelState,
    decisions: watch::Sender<Arc<Decisions>>,
    metrics: RolloutMetrics,
) {
    let controller = RolloutController {
        client: context.client.clone(),
        plans: plans.clone(),
        store: Arc::clone(&context.store),
        objects: labels.counts.clone(),
        decisions,
        leadership: context.leadership.clone(),
        metrics,
        drain: context.drain.clone(),
    };
    context.drain.spawn_until_started(controller.run());
}

/// Compares who owns what with who watches it, while this replica leads.
fn auditor(
    context: &Context,
    plans: &Plans,
    labels: &LabelState,
    metrics: AuditMetrics,
    findings: watch::Sender<Arc<Ownerships>>,
) -> Auditor {
    Auditor {
        plans: plans.clone(),
        store: Arc::clone(&context.store),
        objects: labels.counts.clone(),
        leadership: context.leadership.clone(),
        metrics,
        findings,
    }
}

/// Keeps the fences in the API server, and asks what they enforce, while this replica leads.
fn keep_fences(context: &Context, cache: &Arc<Cache>, plans: &Plans) {
    let (leadership, config) = (context.leadership.clone(), context.api_config.clone());
    let (states, held) = (context.fences.clone(), leadership.clone());
    let keeper = FenceKeeper {
        client: context.client.clone(),
        namespace: context.args.namespace.clone(),
        cache: Arc::clone(cache),
        plans: plans.clone(),
        dial: move |address| {
            let failed = |error: &ReachError| warn!(%address, error = telemetry::chain(error), "not dialled");
            api_client::at(&config, address).inspect_err(failed).ok()
        },
        may_write: move || held.is_held(),
        states: states.clone(),
    };
    context.drain.spawn_until_started(async move {
        leadership.while_held(|| keeper.lead(), || drop(states.send_replace(Arc::default()))).await;
    });
}

fn rules_writer<Kind>(
    context: &Context,
    plans: &Plans,
    labels: &LabelState,
) -> RulesWriter<Kind, impl Fn() -> bool + Send + Sync + use<Kind>> {
    let leadership = context.leadership.clone();
    RulesWriter {
        client: context.client.clone(),
        recorder: EventRecorder::new(context.client.clone(), REPORTER.into()),
        cache: Arc::clone(&labels.cache),
        objects: labels.counts.clone(),
        plans: plans.clone(),
        store: Arc::clone(&context.store),
        may_write: move || leadership.is_held(),
        kind: PhantomData,
    }
}

/// Gathers what is proved about pods and proxies.
fn follower(
    context: &Context,
    plans: Plans,
    fences: FenceStates,
) -> EvidenceFollower<impl Fn() -> BTreeMap<PodName, InForce> + Send + Sync + 'static, Arc<States>> {
    let store = Arc::clone(&context.store);
    let in_force = |receipt: Receipt| InForce { uid: receipt.uid, digest: receipt.digest };
    EvidenceFollower {
        plans,
        receipts: move || store.receipts().into_iter().map(|(pod, receipt)| (pod, in_force(receipt))).collect(),
        receipts_changed: context.store.receipts_changed(),
        fences,
        server: |states, root, uid| fence_state::server(states, root, uid),
        acknowledge_within: context.args.acknowledge_within,
        leadership: context.leadership.clone(),
        confirmations: Arc::clone(&context.confirmations),
    }
}

fn replica_list(context: &Context, status_writer: StatusWriter) -> ReplicaList {
    ReplicaList {
        status_writer,
        client: context.client.clone(),
        namespace: context.args.namespace.clone(),
        service: context.args.service.clone(),
        replica: context.args.replica(),
        grpc: context.grpc,
        leadership: context.leadership.clone(),
    }
}

fn at(mut asked: WebhookClientConfig, path: &str) -> WebhookClientConfig {
    if let Some(service) = &mut asked.service {
        service.path = Some(path.to_owned());
    }
    asked.url = asked.url.map(|url| url + path);
    asked
}

/// Publishes the policies of each new plan.
async fn publish_policies(store: Arc<PolicyStore>, published: watch::Sender<Option<Arc<Plan>>>, mut plans: Plans) {
    loop {
        let plan = plans.borrow_and_update().clone();
        if let Some(plan) = plan {
            store.publish(enrolled_pods(&plan));
            published.send_replace(Some(plan));
        }
        if plans.changed().await.is_err() {
            return;
        }
    }
}

/// The policies of the plan's pods. Pods that have ended get none: no proxy serves them.
fn enrolled_pods(plan: &Plan) -> Vec<EnrolledPod> {
    let enrolled_pod = |member: &Member| EnrolledPod {
        name: member.name.clone(),
        uid: member.uid.clone(),
        node: member.node.clone().filter(|_| member.redirect != Redirect::Nowhere),
        policy: plan.sendable().get(&member.name).cloned(),
    };
    let members = each(&plan.snapshot.members).filter(|member| member.enrolled() && !member.ended);
    members.map(enrolled_pod).collect()
}

/// Caches the proxies' receipts, which are read twice a second, until one changes.
struct ReceiptCache {
    store: Arc<PolicyStore>,
    changes: Mutex<watch::Receiver<u64>>,
    last: Mutex<Arc<BTreeMap<PodName, Contact>>>,
}

impl ReceiptCache {
    fn by(store: &Arc<PolicyStore>) -> Self {
        let mut changes = store.receipts_changed();
        changes.mark_changed();
        let (changes, last) = (Mutex::new(changes), Mutex::default());
        Self { store: Arc::clone(store), changes, last }
    }

    fn contacts(&self) -> Arc<BTreeMap<PodName, Contact>> {
        if self.is_changed() {
            let mut contacts: BTreeMap<PodName, Contact> = self.store.receipts().into_iter().map(contact).collect();
            for (pod, state) in self.store.sidecar_webhooks() {
                if let Some(contact) = contacts.get_mut(&pod) {
                    contact.webhook = Some(state);
                }
            }
            *lock(&self.last) = Arc::new(contacts);
        }
        Arc::clone(&lock(&self.last))
    }

    /// Whether a receipt changed since the last call.
    fn is_changed(&self) -> bool {
        let mut changes = lock(&self.changes);
        // The store is a field, so the sender lives.
        let is_changed = changes.has_changed().unwrap_or(true);
        // Only then, so that a change in between is not lost.
        if is_changed {
            changes.mark_unchanged();
        }
        is_changed
    }
}

fn contact((pod, receipt): (PodName, Receipt)) -> (PodName, Contact) {
    // A report of a connected proxy is no news for a status.
    let last = Some(receipt.last_contact).filter(|_| !receipt.connected);
    let at = last.and_then(|last| Timestamp::try_from(last).ok()).unwrap_or_default();
    let Receipt { epoch, digest, refused, connected, webhook, .. } = receipt;
    (pod, Contact { epoch, digest, refused, connected, at, webhook })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::cache::Snapshot;
    use crate::push::policy_store::tests::{name, notice, receipt};
    use crate::rules::compile::CompiledPolicy;
    use crate::rules::manifest::Manifests;

    #[test]
    fn receipts_are_cached_until_one_changes_or_a_pod_goes() {
        let store = Arc::<PolicyStore>::default();
        let pod = name("a");
        store.publish([notice("a", "one", 1)]);
        let receipts = ReceiptCache::by(&store);
        let epoch = || receipts.contacts().get(&pod).map(|one| one.epoch);
        assert_eq!(epoch(), None);
        store.receive(None, &pod, receipt("a", 1));
        assert_eq!(epoch(), Some(1));
        assert!(Arc::ptr_eq(&receipts.contacts(), &receipts.contacts()));
        let before = receipts.contacts();
        store.publish([notice("a", "one", 1)]);
        assert!(Arc::ptr_eq(&before, &receipts.contacts()), "no receipt changed");
        store.receive(None, &pod, receipt("a", 2));
        assert_eq!(epoch(), Some(2));
        store.publish([]);
        assert_eq!(epoch(), None, "the next pod of that name has no receipt");
    }

    #[test]
    fn a_pod_gets_only_a_policy_whose_epoch_is_written() {
        let text = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a, namespace: ops}\n\
            spec: {selector: {matchLabels: {app: a}}, limits: [{selector: {matchLabels: {team: a}}}]}\n---\n\
            apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: ops, uid: '7', annotations: {ctrlmesh.kusionstack.io/injected: 'true'}, labels: {app: a, ctrlmesh.kusionstack.io/enable-proxy: 'true'}}\nspec: {nodeName: 'n', containers: []}\n---\n\
            apiVersion: v1\nkind: Pod\nmetadata: {name: q, namespace: ops, uid: '8', annotations: {ctrlmesh.kusionstack.io/injected: 'true'}, labels: {ctrlmesh.kusionstack.io/enable-proxy: 'true'}}\n---\n\
            apiVersion: v1\nkind: Pod\nmetadata: {name: r, namespace: ops, uid: '9', annotations: {ctrlmesh.kusionstack.io/injected: 'true'}, labels: {ctrlmesh.kusionstack.io/enable-proxy: 'true'}}\nstatus: {phase: Failed}\n---\n";
        let mut manifests = Manifests::default();
        manifests.read(text).unwrap();
        let snapshot = Snapshot {
            members: manifests.pods.iter().map(|pod| Member::from(pod).into()).collect(),
            configs: manifests.configs,
            ..Snapshot::default()
        };
        let of = |snapshot: &Snapshot| enrolled_pods(&plan::of(snapshot.clone(), &BTreeMap::new()));
        let pods = of(&snapshot);
        assert_eq!(pods[0].policy, None, "the status of `a` has no epoch yet");
        let nothing = Arc::new(CompiledPolicy::nothing());
        assert_eq!((pods[1].uid.as_str(), &pods[1].policy), ("8", &Some(nothing)));
        assert_eq!(pods.len(), 2, "the last one has ended");
        let plan = plan::of(snapshot.clone(), &BTreeMap::new());
        let mut written = snapshot;
        written.configs[0].status = Some(ctrlmesh_common::api::ShardingConfigStatus {
            epoch: Some(1),
            policy_digest: Some(plan.compiled.operators["ops/a"].policy_digest.clone()),
            ..Default::default()
        });
        let pods = of(&written);
        assert_eq!((pods[0].uid.as_str(), pods[0].node.as_deref()), ("7", Some("n")));
        let policy = pods[0].policy.as_ref().unwrap();
        assert_eq!((policy.operator.as_deref(), policy.policy.epoch), (Some("ops/a"), 1));
    }
}
