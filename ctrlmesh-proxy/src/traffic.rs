//! Counts what the requests of one pod to the API server come to, and reports it to the manager.
//!
//! A request counts where the policy under which it began asks for it, once the API server has answered. So answers of
//! the proxy itself do not count, and without such a policy a request pays one branch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::wire::Traffic;
use ctrlmesh_request::decide::{self, LockPlan, Plan};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_runtime::drain::Drain;
use http::StatusCode;
use tokio::time::{self, Instant};
use tokio_util::sync::CancellationToken;

use crate::policy::{Current, PublishTraffic, while_served};
use crate::shadow::PodShadow;

/// Between two reports to the manager.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The counts of one pod. Its connections share them. They outlive its policies, and only grow.
#[derive(Debug, Default)]
pub struct PodTraffic {
    requests: AtomicU64,
    conflicts: AtomicU64,
    invalid: AtomicU64,
    client_errors: AtomicU64,
    server_errors: AtomicU64,
    writes: AtomicU64,
    deletes: AtomicU64,
    watches: AtomicU64,
    latency_micros: AtomicU64,
    timed: AtomicU64,
    /// What became of writes that were dry runs.
    pub(crate) shadow: PodShadow,
}

/// What a request counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Watch,
    /// A write of a limited resource that deletes nothing.
    Write,
    /// A write of a limited resource that deletes.
    Delete,
    Other,
}

impl RequestKind {
    /// What a request that begins under `policy` counts as. `None` where the policy asks for no counts, and for the
    /// leader-election lock. Where only the body tells whether a request is for the lock, the caller has to look.
    pub(crate) fn of(policy: &Policy, plan: Option<&Plan>, info: &RequestInfo<'_>) -> Option<Self> {
        if !policy.report_traffic {
            return None;
        }
        let lock = plan.and_then(|plan| plan.lock.as_ref());
        if lock.and_then(LockPlan::is_for_lock) == Some(true) {
            return None;
        }
        Some(match info.verb() {
            _ if info.is_watch() => Self::Watch,
            _ if !writes_limited(policy, info) => Self::Other,
            "delete" | "deletecollection" => Self::Delete,
            _ => Self::Write,
        })
    }
}

impl PodTraffic {
    /// Counts a request, sent then, to which the API server has sent the head of an answer with this status.
    pub(crate) fn answered(&self, kind: RequestKind, status: StatusCode, sent: Instant) {
        add(&self.requests, 1);
        match status.as_u16() {
            409 => add(&self.conflicts, 1),
            422 => add(&self.invalid, 1),
            404 => {}
            429 | 500..=599 => add(&self.server_errors, 1),
            400..=499 => add(&self.client_errors, 1),
            _ => {}
        }
        match kind {
            RequestKind::Watch if matches!(status, StatusCode::OK | StatusCode::SWITCHING_PROTOCOLS) => {
                add(&self.watches, 1);
            }
            RequestKind::Write | RequestKind::Delete if status.is_success() => {
                add(&self.writes, 1);
                add(&self.deletes, u64::from(kind == RequestKind::Delete));
            }
            _ => {}
        }
        if kind != RequestKind::Watch {
            add(&self.latency_micros, u64::try_from(sent.elapsed().as_micros()).unwrap_or(u64::MAX));
            add(&self.timed, 1);
        }
    }

    /// Publishes the counts as they change, while the policy asks for them: until shutdown, or until the pod is `gone`.
    pub(crate) async fn report(
        self: Arc<Self>,
        policy: Current,
        publish: PublishTraffic,
        drain: Drain,
        gone: Option<CancellationToken>,
    ) {
        while_served(self.publish(policy, publish), &drain, gone.as_ref()).await;
    }

    async fn publish(&self, mut policy: Current, publish: PublishTraffic) {
        let mut since = None;
        loop {
            // It may have changed when a report was due.
            if !policy.borrow().report_traffic {
                publish.publish(None);
                asks(&mut policy, true).await;
            }
            let since = *since.get_or_insert_with(now);
            publish.publish(Some(Arc::new(self.totals(since))));
            let next = Instant::now() + REPORT_INTERVAL;
            tokio::select! {
                () = time::sleep_until(next) => {}
                () = asks(&mut policy, false) => {
                    publish.publish(None);
                    time::sleep_until(next).await;
                }
            }
        }
    }

    fn totals(&self, since: u64) -> Traffic {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Traffic {
            since,
            requests: get(&self.requests),
            conflicts: get(&self.conflicts),
            invalid: get(&self.invalid),
            client_errors: get(&self.client_errors),
            server_errors: get(&self.server_errors),
            writes: get(&self.writes),
            deletes: get(&self.deletes),
            watches: get(&self.watches),
            latency_micros: get(&self.latency_micros),
            timed: get(&self.timed),
            shadow: self.shadow.report(),
        }
    }
}

/// Waits until the policy asks for counts, or until it does not. Never completes where the policy's source has ended.
async fn asks(policy: &mut Current, asks: bool) {
    if policy.wait_for(|policy| policy.report_traffic == asks).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Whether a request writes an object of a resource that a limit covers, and neither an event nor a dry run.
fn writes_limited(policy: &Policy, info: &RequestInfo<'_>) -> bool {
    let resource = (info.api_group(), info.resource());
    decide::is_write(info)
        && policy.is_limited(resource.0, resource.1)
        && !decide::is_event(info)
        && !decide::is_dry_run(info)
}

fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

/// In milliseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::{Limit, Lock, Mode};
    use ctrlmesh_common::resource::ResourceMatch;
    use ctrlmesh_common::selector::Selector;
    use tokio::sync::watch;

    use super::*;
    use crate::policy::{PodName, TrafficReports};

    /// Limits pods and events; the lock is the lease `ops/lead`.
    fn policy(report_traffic: bool) -> Policy {
        let resources = ["pods", "events"].map(ToOwned::to_owned).to_vec();
        let limited = ResourceMatch { api_groups: vec![String::new()], resources };
        let selector = Selector::parse("team=a").unwrap();
        let limit = Limit { relate_resources: vec![limited], selector, changed_at: None };
        let text = str::to_owned;
        let lock = Lock { namespace: text("ops"), name: text("lead"), shard: text("s1") };
        Policy { limits: vec![limit], lock: Some(lock), report_traffic, ..Policy::default() }
    }

    fn kind(policy: &Policy, method: &str, target: &str) -> Option<RequestKind> {
        let info = RequestInfo::parse(method, target).unwrap();
        let plan = match decide::decide(policy, &info) {
            decide::Decision::Rewrite(plan) => Some(plan),
            decide::Decision::Pass => None,
            decide::Decision::Refuse(refusal) => panic!("{target}: {refusal}"),
        };
        RequestKind::of(policy, plan.as_ref(), &info)
    }

    #[test]
    fn a_request_counts_by_its_verb_and_resource() {
        use RequestKind::{Delete, Other, Watch, Write};
        let policy = policy(true);
        let pods = "/api/v1/namespaces/a/pods";
        let one = format!("{pods}/x");
        let leases = "/apis/coordination.k8s.io/v1/namespaces/ops/leases";
        for (method, target, expected) in [
            ("GET", pods.to_owned(), Some(Other)),
            ("GET", format!("{pods}?watch=1"), Some(Watch)),
            ("POST", pods.to_owned(), Some(Write)),
            ("PUT", format!("{one}/status"), Some(Write)),
            ("PATCH", one.clone(), Some(Write)),
            ("DELETE", one.clone(), Some(Delete)),
            ("DELETE", pods.to_owned(), Some(Delete)),
            ("PUT", format!("{one}?dryRun=All"), Some(Other)),
            ("PUT", format!("{one}?dryRun="), Some(Write)),
            ("POST", format!("{one}/exec"), Some(Other)),
            ("POST", "/api/v1/namespaces/a/events".to_owned(), Some(Other)),
            ("POST", "/api/v1/namespaces/a/configmaps".to_owned(), Some(Other)),
            ("GET", "/version".to_owned(), Some(Other)),
            ("PUT", format!("{leases}/lead"), None),
            ("GET", format!("{leases}?watch=1&fieldSelector=metadata.name%3Dlead"), None),
            ("PUT", format!("{leases}/other"), Some(Other)),
            // Only the body tells.
            ("POST", leases.to_owned(), Some(Other)),
        ] {
            assert_eq!(kind(&policy, method, &target), expected, "{method} {target}");
        }
        let passing = Policy { mode: Mode::Pass, ..policy };
        assert_eq!(kind(&passing, "POST", pods), Some(Other), "nothing is limited");
    }

    #[test]
    fn nothing_counts_unless_the_policy_asks() {
        assert_eq!(kind(&policy(false), "POST", "/api/v1/namespaces/a/pods"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_counts_by_its_status() {
        use RequestKind::{Delete, Other, Watch, Write};
        let traffic = PodTraffic::default();
        for (kind, status) in [
            (Other, 200),
            (Other, 404),
            (Other, 403),
            (Other, 429),
            (Write, 201),
            (Write, 409),
            (Write, 422),
            (Delete, 200),
            (Delete, 500),
            (Watch, 200),
            (Watch, 101),
            (Watch, 410),
        ] {
            let sent = Instant::now();
            time::advance(Duration::from_millis(1)).await;
            traffic.answered(kind, StatusCode::from_u16(status).unwrap(), sent);
        }
        let expected = Traffic {
            since: 7,
            requests: 12,
            conflicts: 1,
            invalid: 1,
            client_errors: 2,
            server_errors: 2,
            writes: 2,
            deletes: 1,
            watches: 2,
            latency_micros: 9000,
            timed: 9,
            shadow: None,
        };
        assert_eq!(traffic.totals(7), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn counts_are_published_while_the_policy_asks() {
        let sender = watch::Sender::new(Arc::new(policy(false)));
        let (reports, pod) = (TrafficReports::default(), "ops/a".parse::<PodName>().unwrap());
        let (traffic, drain) = (Arc::<PodTraffic>::default(), Drain::default());
        let publish = reports.begin(pod.clone());
        drain.spawn(traffic.clone().report(sender.subscribe(), publish, drain.clone(), None));
        let count = || {
            traffic.answered(RequestKind::Other, StatusCode::OK, Instant::now());
        };
        let requests = || reports.of(&pod).map(|traffic| traffic.requests);
        time::sleep(REPORT_INTERVAL * 3).await;
        assert_eq!(requests(), None, "the policy does not ask");
        sender.send_replace(Arc::new(policy(true)));
        let mut changes = reports.changes();
        let begun = Instant::now();
        drop(changes.wait_for(|all| !all.is_empty()).await.unwrap());
        assert_eq!((requests(), begun.elapsed()), (Some(0), Duration::ZERO));
        let since = reports.of(&pod).unwrap().since;
        count();
        sender.send_replace(Arc::new(Policy { epoch: 2, ..policy(true) }));
        time::sleep(REPORT_INTERVAL / 2).await;
        assert_eq!(requests(), Some(0), "the next report is not due");
        changes.mark_unchanged();
        changes.changed().await.unwrap();
        assert_eq!((requests(), begun.elapsed()), (Some(1), REPORT_INTERVAL));
        changes.mark_unchanged();
        time::sleep(REPORT_INTERVAL * 3).await;
        assert!(!changes.has_changed().unwrap(), "nothing has changed");
        sender.send_replace(Arc::new(policy(false)));
        changes.changed().await.unwrap();
        assert_eq!(requests(), None);
        sender.send_replace(Arc::new(policy(true)));
        drop(changes.wait_for(|all| !all.is_empty()).await.unwrap());
        assert_eq!((requests(), reports.of(&pod).unwrap().since), (Some(1), since), "it goes on counting");
        assert!(drain.finish(Duration::from_secs(9)).await);
        assert_eq!(requests(), None);
    }
}
