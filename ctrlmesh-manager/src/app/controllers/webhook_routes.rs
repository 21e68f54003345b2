//! The routes of the admission webhooks.
//!
//! Slow answers are computed on threads of their own, so that neither proxies nor other requests wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_common::names::{self, port};
use futures::FutureExt as _;
use kube::core::admission::AdmissionResponse;
use tracing::warn;

use super::LABEL;
use crate::admission::admit::{self, Review};
use crate::admission::blocking_pool::BlockingPool;
use crate::admission::inject::SidecarSettings;
use crate::admission::placement::Placement;
use crate::admission::webhook::{Handler, Route};
use crate::app::context::Context;
use crate::cluster::cache::{Cache, Snapshot};
use crate::cluster::plan::Plans;
use crate::push::service::LeaderClient;
use crate::rules::pod::KUBE_SYSTEM;
use crate::rules::shard::Labelling;
use crate::telemetry;

/// Less than the 10 s of our webhook configurations.
const DEADLINE: Duration = Duration::from_secs(8);

pub(super) fn routes(context: &Context, plans: &Plans, cache: &Arc<Cache>) -> Vec<Route> {
    let (labelling, cache) = (Arc::new(context.labelling.clone()), Arc::clone(cache));
    let label = move |asked: Review| futures::future::ready(label(&asked, &cache)).boxed();
    vec![
        Route { path: "/validate", deadline: DEADLINE, handler: validate(plans, &labelling) },
        Route { path: "/inject", deadline: DEADLINE, handler: inject(context) },
        Route { path: LABEL, deadline: DEADLINE, handler: Arc::new(label) },
    ]
}

/// Labels a written object, once the scheme is known.
fn label(asked: &Review, cache: &Cache) -> AdmissionResponse {
    match cache.scheme() {
        Some(scheme) => admit::label(asked, &scheme),
        None => AdmissionResponse::from(asked),
    }
}

/// Injects pods. The trust bundle must be in the namespace before the pod.
fn inject(context: &Context) -> Handler {
    let args = &context.args;
    let settings = SidecarSettings {
        image: args.proxy_image.clone(),
        pull_policy: args.proxy_pull_policy.clone(),
        manager: format!("{}:{}", args.service_name(), port::MANAGER_GRPC),
        traces: args.sidecar_otlp_endpoint.clone().map(|collector| (collector, args.sidecar_trace_ratio)),
    };
    let place = place(&context.placement, &context.leader, settings);
    let trust_bundle = context.trust_bundle.clone();
    let own = args.namespace.clone();
    Arc::new(move |asked: Review| {
        if let Some(response) = unasked(&asked, &own) {
            return futures::future::ready(response).boxed();
        }
        let (namespace, dry_run) = (asked.namespace.clone().unwrap_or_default(), asked.dry_run);
        let failed = AdmissionResponse::from(&asked);
        let (placed, trust_bundle) = (place(asked), trust_bundle.clone());
        let injected = async move {
            let response = placed.await;
            if response.patch.is_some()
                && !dry_run
                && let Err(error) = trust_bundle.in_namespace(&namespace).await
            {
                let error = telemetry::chain(&error);
                warn!(namespace, error, "pod not admitted: what it is to trust is not there");
                return failed.deny(error);
            }
            response
        };
        injected.boxed()
    })
}

/// The answer to a review that is not looked at.
///
/// Namespaces that our configurations exclude stay as they are, and impossible names are refused. Anybody who reaches
/// us can send such reviews; the API server does not.
fn unasked(asked: &Review, own: &str) -> Option<AdmissionResponse> {
    let namespace = asked.namespace.as_deref().unwrap_or_default();
    let response = AdmissionResponse::from(asked);
    if [KUBE_SYSTEM, own].contains(&namespace) {
        return Some(response);
    }
    let may_be = names::is_dns_subdomain(namespace) && !namespace.contains('.');
    let message = || format!("request.namespace: {namespace:?} must be a lower-case DNS label");
    (!may_be).then(|| response.deny(message()))
}

/// Places and injects each pod. Where its shard depends on which other pods exist, the leader is asked: other replicas
/// admit some of these.
fn place(placement: &Arc<Placement>, leader: &LeaderClient, settings: SidecarSettings) -> Handler {
    let (placement, leader, settings) = (Arc::clone(placement), leader.clone(), Arc::new(settings));
    Arc::new(move |asked: Review| {
        let (placement, leader, settings) = (Arc::clone(&placement), leader.clone(), Arc::clone(&settings));
        let place = async move {
            let failed = AdmissionResponse::from(&asked);
            let mut recent = placement.lock_namespace(asked.namespace.as_deref().unwrap_or_default()).await;
            let given = match placement.shared(&asked) {
                Some(pod) => leader.assign_shard(&pod).await,
                None => None,
            };
            let place = move |snapshot: Option<&Snapshot>| {
                admit::inject(&asked, snapshot, &settings, given, &mut recent, Instant::now())
            };
            Box::pin(placement.run(place)).await.unwrap_or_else(|| failed_review(failed))
        };
        place.boxed()
    })
}

/// Validates our resources. Comparing one with many may take a second.
fn validate(plans: &Plans, labelling: &Arc<Labelling>) -> Handler {
    let (plans, labelling, pool) = (plans.clone(), Arc::clone(labelling), BlockingPool::default());
    Arc::new(move |asked: Review| {
        let (plan, failed) = (plans.borrow().clone(), AdmissionResponse::from(&asked));
        let (labelling, pool) = (Arc::clone(&labelling), pool.clone());
        let validate = move || {
            let snapshot = plan.as_ref().map(|plan| &*plan.snapshot);
            admit::validate(&asked, snapshot, &labelling)
        };
        async move { pool.run(validate).await.unwrap_or_else(|| failed_review(failed)) }.boxed()
    })
}

fn failed_review(failed: AdmissionResponse) -> AdmissionResponse {
    failed.deny("cannot be reviewed; the manager's log says why")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use ctrlmesh_common::names::label;
    use futures::future::BoxFuture;
    use kube::core::DynamicObject;
    use kube::core::admission::AdmissionReview;

    use tokio::sync::watch;
    use tokio::{runtime, task};

    use super::*;

    /// A review of a new object of `kind` with these labels.
    fn asked(kind: &str, namespace: &str, labels: &[&str]) -> Review {
        let labels: serde_json::Map<_, _> = labels.iter().map(|key| ((*key).to_owned(), "true".into())).collect();
        let object = serde_json::json!({
            "apiVersion": "v1", "kind": kind, "metadata": {"name": "x", "labels": labels}, "spec": {"containers": []},
        });
        let review = serde_json::json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "1", "kind": {"group": "", "version": "", "kind": kind}, "resource": {"group": "", "version": "", "resource": ""},
                "operation": "CREATE", "namespace": namespace, "name": "x", "userInfo": {}, "object": object, "dryRun": false,
            },
        });
        let review: AdmissionReview<DynamicObject> = serde_json::from_value(review).unwrap();
        review.try_into().unwrap()
    }

    #[test]
    fn excluded_namespaces_are_ignored_and_bad_names_refused() {
        let answer = |namespace| unasked(&asked("Pod", namespace, &[label::ENABLE_PROXY]), "mesh");
        for namespace in [KUBE_SYSTEM, "mesh"] {
            let response = answer(namespace).unwrap();
            assert!(response.allowed && response.patch.is_none(), "{response:?}");
        }
        // It would stand in the path of a request of ours.
        for namespace in ["", "a/secrets/b?", "..", "a.b", "A"] {
            let response = answer(namespace).unwrap();
            assert!(!response.allowed, "{response:?}");
            assert!(response.result.message.starts_with("request.namespace: "), "{response:?}");
        }
        assert!(answer("ops").is_none());
    }

    /// The answer of a pooled thread, while the only blocking thread is busy at first.
    fn answered(ask: impl FnOnce() -> BoxFuture<'static, AdmissionResponse>) -> AdmissionResponse {
        let mut runtime = runtime::Builder::new_current_thread();
        let runtime = runtime.max_blocking_threads(1).enable_all().build().unwrap();
        let (release, held) = mpsc::channel::<()>();
        runtime.block_on(async {
            task::spawn_blocking(move || held.recv());
            let mut answer = ask();
            assert!(futures::poll!(&mut answer).is_pending(), "the runtime's thread answers");
            drop(release);
            answer.await
        })
    }

    #[test]
    fn validation_runs_on_a_thread_of_its_own() {
        let (_plans, known) = watch::channel(None);
        let validate = validate(&known, &Arc::default());
        assert!(!answered(|| validate(asked("ManagerState", "", &[]))).allowed);
    }

    #[test]
    fn placement_runs_on_a_thread_of_its_own() {
        let (_plans, known) = watch::channel(None);
        let none = String::new();
        let settings = SidecarSettings { image: none.clone(), pull_policy: none.clone(), manager: none, traces: None };
        let place = place(&Arc::new(Placement::new(known)), &LeaderClient::default(), settings);
        let answer = answered(|| place(asked("Pod", "a", &[label::ENABLE_PROXY])));
        assert!(answer.result.message.contains("has not read"), "{answer:?}");
    }
}
