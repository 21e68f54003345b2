//! What does a replica of the manager do all day?
//!
//! Every replica watches, compiles, tells its proxies and answers the API server; the one that leads also writes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::names::port;
use ctrlmesh_common::policy::{Policy, Redirect};
use futures::FutureExt as _;
use jiff::Timestamp;
use kube::Client;
use kube::core::admission::AdmissionResponse;
use kube::runtime::events::Recorder;
use tracing::warn;

use crate::admit::{self, Asked};
use crate::board::{Board, Notice};
use crate::cache::Cache;
use crate::context::Context;
use crate::control::Control;
use crate::inject::Settings;
use crate::label::{LabelMetrics, Labeller, Pace};
use crate::lease::Leadership;
use crate::plan::{self, Plan, Plans};
use crate::pod::PodName;
use crate::roster::Roster;
use crate::shard::Labelling;
use crate::status::Contact;
use crate::telemetry;
use crate::webhook::Route;

/// As whom events are told.
const REPORTER: &str = "ctrlmesh-manager";

/// How long an answer to the API server may take: its configurations wait 10 s.
const DEADLINE: Duration = Duration::from_secs(8);

/// Starts everything; what is returned answers the API server.
///
/// `background` is the client for what can wait.
pub fn start(context: &Context, background: Client, metrics: LabelMetrics) -> Vec<Route> {
    let drain = &context.drain;
    let labelling = Arc::new(context.args.labels.labelling());
    let cache = Cache::start(&context.client, drain);
    let plans = plan::start(Arc::clone(&cache), Arc::clone(&labelling), drain);
    let caches = context.readiness.block("caches");
    let mut first = plans.clone();
    drain.spawn_until_started(async move {
        // The compiler of plans ends only with the process.
        drop(first.wait_for(Option::is_some).await);
        drop(caches);
    });
    drain.spawn_until_started(tell(context.board.clone(), plans.clone()));
    let (board, leadership) = (context.board.clone(), context.leadership.clone());
    let control = Control {
        client: context.client.clone(),
        labelling: Arc::clone(&labelling),
        recorder: Recorder::new(context.client.clone(), REPORTER.into()),
        contacts: move || contacts(&board),
        may_write: move || leadership.is_held(),
    };
    drain.spawn_until_started(control.run(plans.clone()));
    drain.spawn_until_started(roster(context).run());
    keep_labels(context, background, Arc::clone(&labelling), cache, metrics);
    routes(context, &plans, &labelling)
}

fn roster(context: &Context) -> Roster {
    Roster {
        client: context.client.clone(),
        namespace: context.args.namespace.clone(),
        service: context.args.service.clone(),
        replica: context.args.replica(),
        leadership: context.leadership.clone(),
    }
}

/// Labels, whenever this replica leads.
fn keep_labels(
    context: &Context,
    background: Client,
    labelling: Arc<Labelling>,
    cache: Arc<Cache>,
    metrics: LabelMetrics,
) {
    let leadership = context.leadership.clone();
    let labels = Arc::new(Labeller {
        client: background.clone(),
        namespace: context.args.namespace.clone(),
        labelling,
        cache,
        recorder: Recorder::new(background, REPORTER.into()),
        metrics,
        may_write: move || leadership.is_held(),
        pace: Pace::per_second(context.args.labels.label_rate),
    });
    let (drain, mut leadership) = (context.drain.clone(), context.leadership.clone());
    context.drain.spawn_until_started(async move {
        loop {
            leadership.held().await;
            let mut here = Leadership::clone(&leadership);
            tokio::select! {
                () = Arc::clone(&labels).run(drain.clone()) => {}
                // Another replica labels now.
                () = here.lost() => {}
            }
        }
    });
}

/// Publishes what proxies may be told, whenever that changes.
async fn tell(board: Arc<Board>, mut plans: Plans) {
    loop {
        let plan = plans.borrow_and_update().clone();
        if let Some(plan) = plan {
            board.publish(notices(&plan));
        }
        if plans.changed().await.is_err() {
            return;
        }
    }
}

/// What the pods of `plan` are told, each by its UID and node.
fn notices(plan: &Plan) -> Vec<Notice> {
    let members = plan.snapshot.members.iter();
    let told = members.filter_map(|member| {
        let told = plan.told.get(&member.name)?;
        let (redirect, fail_open) = (member.redirect, member.fail_open);
        let container = member.container.clone().filter(|_| redirect == Redirect::Sidecar);
        Some(Notice {
            pod: member.name.clone(),
            uid: member.uid.clone(),
            node: member.node.clone().filter(|_| redirect != Redirect::Nowhere),
            policy: Policy { redirect, fail_open, container, ..told.policy.clone() },
        })
    });
    told.collect()
}

/// What the proxies have said.
fn contacts(board: &Board) -> BTreeMap<PodName, Contact> {
    let contact = |(pod, receipt): (PodName, crate::board::Receipt)| {
        let at = Timestamp::try_from(receipt.last_contact).unwrap_or_default();
        (pod, Contact { epoch: receipt.epoch, refused: receipt.refused, at })
    };
    board.receipts().into_iter().map(contact).collect()
}

/// Who answers the API server, and where.
fn routes(context: &Context, plans: &Plans, labelling: &Arc<Labelling>) -> Vec<Route> {
    let args = &context.args;
    let settings = Arc::new(Settings {
        image: args.proxy_image.clone(),
        manager: format!("{}:{}", args.service_name(), port::MANAGER_GRPC),
    });
    let (known, labels, roots) = (plans.clone(), Arc::clone(labelling), context.roots.clone());
    let inject = move |asked: Asked| {
        let plan = known.borrow().clone();
        let snapshot = plan.as_ref().map(|plan| &*plan.snapshot);
        let response = admit::inject(&asked, snapshot, &labels, &settings);
        let roots = roots.clone();
        async move {
            let namespace = asked.namespace.as_deref().unwrap_or_default();
            // What the pod is to trust has to be there before the pod.
            if response.patch.is_some()
                && !asked.dry_run
                && let Err(error) = roots.in_namespace(namespace).await
            {
                let error = telemetry::chain(&error);
                warn!(namespace, error, "pod not admitted: what it is to trust is not there");
                return AdmissionResponse::from(&asked).deny(error);
            }
            response
        }
        .boxed()
    };
    let known = plans.clone();
    let validate = move |asked: Asked| {
        let plan = known.borrow().clone();
        let snapshot = plan.as_ref().map(|plan| &*plan.snapshot);
        futures::future::ready(admit::validate(&asked, snapshot)).boxed()
    };
    let labels = Arc::clone(labelling);
    let label = move |asked: Asked| futures::future::ready(admit::label(&asked, &labels)).boxed();
    vec![
        Route { path: "/validate", deadline: DEADLINE, handler: Arc::new(validate) },
        Route { path: "/inject", deadline: DEADLINE, handler: Arc::new(inject) },
        Route { path: "/label", deadline: DEADLINE, handler: Arc::new(label) },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Snapshot;
    use crate::manifest::Manifests;
    use crate::pod::Member;

    #[test]
    fn a_pod_is_told_by_uid_and_node_and_only_what_is_written_down() {
        let text = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a, namespace: ops}\n\
            spec: {selector: {matchLabels: {app: a}}, limits: [{selector: {matchLabels: {team: a}}}]}\n---\n\
            apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: ops, uid: '7', labels: {app: a, ctrlmesh.kusionstack.io/enable-proxy: 'true'}}\nspec: {nodeName: n, containers: []}\n---\n\
            apiVersion: v1\nkind: Pod\nmetadata: {name: q, namespace: ops, uid: '8', labels: {ctrlmesh.kusionstack.io/enable-proxy: 'true'}}\n---\n";
        let mut manifests = Manifests::default();
        manifests.read(text).unwrap();
        let snapshot = Snapshot {
            members: manifests.pods.iter().map(Member::from).collect(),
            configs: manifests.configs,
            ..Snapshot::default()
        };
        let of = |snapshot: &Snapshot| {
            notices(&plan::of(snapshot.clone(), &Labelling::default(), &BTreeMap::new()))
        };
        let told = of(&snapshot);
        assert_eq!(told.len(), 1, "nobody has written the epoch of `a` down");
        assert_eq!((told[0].uid.as_str(), told[0].policy.epoch), ("8", 0), "it sees nothing");
        let plan = plan::of(snapshot.clone(), &Labelling::default(), &BTreeMap::new());
        let mut written = snapshot;
        written.configs[0].status = Some(ctrlmesh_common::api::ShardingConfigStatus {
            epoch: Some(1),
            policy_digest: Some(plan.compiled.operators["ops/a"].policy_digest.clone()),
            ..Default::default()
        });
        let told = of(&written);
        assert_eq!((told[0].uid.as_str(), told[0].node.as_deref()), ("7", Some("n")));
    }
}
