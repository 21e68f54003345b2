//! Who answers the API server, and where?
//!
//! What takes long to answer takes threads of its own, so that neither proxies nor other questions wait for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ctrlmesh_common::names::{self, port};
use futures::FutureExt as _;
use kube::core::admission::AdmissionResponse;
use tracing::warn;

use super::LABEL;
use crate::admission::admit::{self, Asked};
use crate::admission::blocking_pool::Judges;
use crate::admission::inject::Settings;
use crate::admission::placement::Seats;
use crate::admission::webhook::{Handler, Route};
use crate::app::context::Context;
use crate::cluster::cache::{Cache, Snapshot};
use crate::cluster::plan::Plans;
use crate::push::service::Leader;
use crate::rules::pod::KUBE_SYSTEM;
use crate::rules::shard::Labelling;
use crate::telemetry;

/// How long an answer to the API server may take: its configurations wait 10 s.
const DEADLINE: Duration = Duration::from_secs(8);

/// Who answers the API server, and where.
pub(super) fn routes(context: &Context, plans: &Plans, cache: &Arc<Cache>) -> Vec<Route> {
    let (told, cache) = (Arc::new(context.wanted.clone()), Arc::clone(cache));
    let label = move |asked: Asked| futures::future::ready(label(&asked, &cache)).boxed();
    vec![
        Route { path: "/validate", deadline: DEADLINE, handler: judge(plans, &told) },
        Route { path: "/inject", deadline: DEADLINE, handler: inject(context) },
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
fn inject(context: &Context) -> Handler {
    let args = &context.args;
    let settings = Settings {
        image: args.proxy_image.clone(),
        pull_policy: args.proxy_pull_policy.clone(),
        manager: format!("{}:{}", args.service_name(), port::MANAGER_GRPC),
    };
    let seat = seat(&context.seats, &context.leader, settings);
    let roots = context.roots.clone();
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

/// Finds the shard of each pod. Those of a namespace that are made at the same time are asked about at the same time, and
/// perhaps not all of them here: so the replica that leads is asked in turn, where a shard depends on who else has come.
fn seat(seats: &Arc<Seats>, leader: &Leader, settings: Settings) -> Handler {
    let (seats, leader, settings) = (Arc::clone(seats), leader.clone(), Arc::new(settings));
    Arc::new(move |asked: Asked| {
        let (seats, leader, settings) = (Arc::clone(&seats), leader.clone(), Arc::clone(&settings));
        let seat = async move {
            let failed = AdmissionResponse::from(&asked);
            let mut recent = seats.turn(asked.namespace.as_deref().unwrap_or_default()).await;
            let given = match seats.shared(&asked) {
                Some(pod) => leader.seat(&pod).await,
                None => None,
            };
            let seat = move |snapshot: Option<&Snapshot>| {
                admit::inject(&asked, snapshot, &settings, given, (&mut *recent, Instant::now()))
            };
            Box::pin(seats.judge(seat)).await.unwrap_or_else(|| unjudged(failed))
        };
        seat.boxed()
    })
}

/// Judges our resources. Comparing one with many may take a second.
fn judge(plans: &Plans, told: &Arc<Labelling>) -> Handler {
    let (plans, told, judges) = (plans.clone(), Arc::clone(told), Judges::default());
    Arc::new(move |asked: Asked| {
        let (plan, failed) = (plans.borrow().clone(), AdmissionResponse::from(&asked));
        let (told, judges) = (Arc::clone(&told), judges.clone());
        let judge = move || {
            let snapshot = plan.as_ref().map(|plan| &*plan.snapshot);
            admit::validate(&asked, snapshot, &told)
        };
        async move { judges.judge(judge).await.unwrap_or_else(|| unjudged(failed)) }.boxed()
    })
}

fn unjudged(failed: AdmissionResponse) -> AdmissionResponse {
    failed.deny("cannot be judged; the manager's log says why")
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
        let seat = seat(&Arc::new(Seats::new(known)), &Leader::default(), settings);
        let answer = answered(|| seat(asked("Pod", "a", &[label::ENABLE_PROXY])));
        assert!(answer.result.message.contains("has not read"), "{answer:?}");
    }
}
