//! Who answers the API server, and where?
//!
//! What takes long to answer takes threads of its own, so that neither proxies nor other questions wait for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_common::names::{self, port};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use kube::core::admission::AdmissionResponse;
use tokio::sync::Semaphore;
use tokio::task;
use tracing::{error, warn};

use super::LABEL;
use super::turns::Turns;
use crate::admit::{self, Asked};
use crate::cache::Cache;
use crate::context::Context;
use crate::inject::Settings;
use crate::plan::Plans;
use crate::pod::KUBE_SYSTEM;
use crate::shard::Labelling;
use crate::telemetry;
use crate::webhook::{Handler, Route};

/// How long an answer to the API server may take: its configurations wait 10 s.
const DEADLINE: Duration = Duration::from_secs(8);

/// How many resources are judged at once, and how many pods: each takes a thread of its own while it is.
const JUDGES: usize = 2;

/// Who answers the API server, and where.
pub(super) fn routes(context: &Context, plans: &Plans, cache: &Arc<Cache>) -> Vec<Route> {
    let (told, cache) = (Arc::new(context.wanted.clone()), Arc::clone(cache));
    let label = move |asked: Asked| futures::future::ready(label(&asked, &cache)).boxed();
    vec![
        Route { path: "/validate", deadline: DEADLINE, handler: judge(plans, &told) },
        Route { path: "/inject", deadline: DEADLINE, handler: inject(context, plans) },
        Route { path: LABEL, deadline: DEADLINE, handler: Arc::new(label) },
    ]
}

/// Labels what is written, once it is known how.
fn label(asked: &Asked, cache: &Cache) -> AdmissionResponse {
    match cache.scheme() {
        Some(scheme) => admit::label(asked, &scheme),
        None => AdmissionResponse::from(asked),
    }
}

/// Gives pods what they need. What a pod is to trust has to be there before the pod.
fn inject(context: &Context, plans: &Plans) -> Handler {
    let args = &context.args;
    let settings = Settings {
        image: args.proxy_image.clone(),
        pull_policy: args.proxy_pull_policy.clone(),
        manager: format!("{}:{}", args.service_name(), port::MANAGER_GRPC),
    };
    let (seat, roots) = (seat(plans, settings), context.roots.clone());
    let own = args.namespace.clone();
    Arc::new(move |asked: Asked| {
        if let Some(response) = unasked(&asked, &own) {
            return futures::future::ready(response).boxed();
        }
        let (namespace, dry_run) = (asked.namespace.clone().unwrap_or_default(), asked.dry_run);
        let failed = AdmissionResponse::from(&asked);
        let (seated, roots) = (seat(asked), roots.clone());
        let injected = async move {
            let response = seated.await;
            if response.patch.is_some()
                && !dry_run
                && let Err(error) = roots.in_namespace(&namespace).await
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

/// The answer where a pod is not even looked at: what our configurations never ask about stays as it is, and what no
/// namespace can be called is refused. Whoever reaches us can ask; the API server would not.
fn unasked(asked: &Asked, own: &str) -> Option<AdmissionResponse> {
    let namespace = asked.namespace.as_deref().unwrap_or_default();
    let response = AdmissionResponse::from(asked);
    if [KUBE_SYSTEM, own].contains(&namespace) {
        return Some(response);
    }
    let may_be = names::is_dns_subdomain(namespace) && !namespace.contains('.');
    let message = || format!("request.namespace: {namespace:?} must be a lower-case DNS label");
    (!may_be).then(|| response.deny(message()))
}

/// Finds the shard of each pod. Those of a namespace that are made at the same time are asked about at the same time.
fn seat(plans: &Plans, settings: Settings) -> Handler {
    let (plans, settings) = (plans.clone(), Arc::new(settings));
    let (turns, room) = (Arc::new(Turns::default()), Arc::new(Semaphore::new(JUDGES)));
    Arc::new(move |asked: Asked| {
        let (plans, settings) = (plans.clone(), Arc::clone(&settings));
        let (turns, room) = (Arc::clone(&turns), room.clone());
        let seat = async move {
            let failed = AdmissionResponse::from(&asked);
            let mut recent = turns.take(asked.namespace.as_deref().unwrap_or_default()).await;
            let seat = move || {
                // What is known when it is its turn, not when it was asked.
                let plan = plans.borrow().clone();
                let snapshot = plan.as_ref().map(|plan| &*plan.snapshot);
                let now = Instant::now();
                admit::inject(&asked, snapshot, &settings, &mut recent, now)
            };
            aside(room, failed, seat).await
        };
        seat.boxed()
    })
}

/// Judges our resources. Comparing one with many may take a second.
fn judge(plans: &Plans, told: &Arc<Labelling>) -> Handler {
    let (plans, told) = (plans.clone(), Arc::clone(told));
    let room = Arc::new(Semaphore::new(JUDGES));
    Arc::new(move |asked: Asked| {
        let (plan, failed) = (plans.borrow().clone(), AdmissionResponse::from(&asked));
        let told = Arc::clone(&told);
        let judge = move || {
            let snapshot = plan.as_ref().map(|plan| &*plan.snapshot);
            admit::validate(&asked, snapshot, &told)
        };
        aside(room.clone(), failed, judge)
    })
}

/// Answers on a thread of its own, once there is room; one that cannot be given is `failed`.
fn aside(
    room: Arc<Semaphore>,
    failed: AdmissionResponse,
    answer: impl FnOnce() -> AdmissionResponse + Send + 'static,
) -> BoxFuture<'static, AdmissionResponse> {
    let answered = async move {
        // It is never closed.
        let permit = room.acquire_owned().await;
        let answered = task::spawn_blocking(move || {
            let answer = answer();
            drop(permit);
            answer
        });
        answered.await.unwrap_or_else(|error| {
            error!(%error, "judging failed");
            failed.deny("cannot be judged; the manager's log says why")
        })
    };
    answered.boxed()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use ctrlmesh_common::names::label;
    use kube::core::DynamicObject;
    use kube::core::admission::AdmissionReview;

    use tokio::runtime;
    use tokio::sync::watch;

    use super::*;

    /// The question whether an object of `kind`, with these labels, may be made in `namespace`.
    fn asked(kind: &str, namespace: &str, labels: &[&str]) -> Asked {
        let labels: serde_json::Map<_, _> =
            labels.iter().map(|key| ((*key).to_owned(), "true".into())).collect();
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
    fn what_no_configuration_asks_about_is_left_alone_and_what_is_no_namespace_refused() {
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

    /// What is answered by a thread of its own, which it waits for while the only one there is has other work.
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
    fn what_takes_long_to_judge_holds_nobody_up() {
        let (_plans, known) = watch::channel(None);
        let judge = judge(&known, &Arc::default());
        assert!(!answered(|| judge(asked("ManagerState", "", &[]))).allowed);
    }

    #[test]
    fn a_pod_is_seated_on_a_thread_of_its_own() {
        let (_plans, known) = watch::channel(None);
        let settings =
            Settings { image: String::new(), pull_policy: String::new(), manager: String::new() };
        let seat = seat(&known, settings);
        let answer = answered(|| seat(asked("Pod", "a", &[label::ENABLE_PROXY])));
        assert!(answer.result.message.contains("has not read"), "{answer:?}");
    }
}
