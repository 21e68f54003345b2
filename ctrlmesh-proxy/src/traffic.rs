//! Counts what the requests of one pod to the API server come to, and reports it to the manager.
//!
//! A request counts where the policy under which it began asks for it, once the API server has answered. So answers of
//! the proxy itself do not count, and without such a policy a request pays one branch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::slots::Slot;
use ctrlmesh_common::wire::Traffic;
use ctrlmesh_request::decide::{self, Plan};
use ctrlmesh_request::request::{ObjectKey, RequestInfo};
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::unix_time;
use http::StatusCode;
use tokio::time::{self, Instant};
use tokio_util::sync::CancellationToken;

use crate::policy::{Current, PublishTraffic, while_served};
use crate::shadow::PodShadow;
use crate::traffic::changes::{PodChanges, TakenWrite};

mod changes;
mod lock_holder;
mod slot_counts;
mod watches;

pub(crate) use changes::Kind;
pub(crate) use lock_holder::{HeldLock, LockHolder};
use slot_counts::SlotCounts;
pub(crate) use watches::{OpenWatch, PodWatches};

/// The plural of the only locks of which it is known who holds them.
pub(crate) const LEASES: &str = "leases";

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
    slots: SlotCounts,
    /// What its watches showed, until it is written.
    pub(crate) changes: PodChanges,
    pub(crate) lock: LockHolder,
    /// Which kinds the pod watches.
    pub(crate) watched: Arc<PodWatches>,
    /// What became of writes that were dry runs.
    pub(crate) shadow: PodShadow,
}

/// A request that counts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CountedRequest {
    kind: RequestKind,
    /// What a write is about.
    object: Option<ObjectKey>,
    /// The slot for whose load it counts.
    slot: Option<Slot>,
    /// What a write of the lock says.
    held: Option<HeldLock>,
    /// Whether it asks for the newest Lease that is the lock.
    pub(crate) reads_lock: bool,
}

/// What a request counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Watch,
    /// A write of a limited resource that deletes nothing.
    Write,
    /// A write of a limited resource that deletes.
    Delete,
    /// Any request for the leader-election lock. Only losses of the lock count.
    Lock,
    Other,
}

impl CountedRequest {
    /// What a request that begins under `policy` counts as. `None` where the policy asks for no counts. Where only the
    /// body tells whether a request is for the lock, the caller has to look.
    pub(crate) fn of(policy: &Policy, plan: Option<&Plan>, info: &RequestInfo<'_>) -> Option<Self> {
        if !policy.report_traffic {
            return None;
        }
        let lock = plan.and_then(|plan| plan.lock.as_ref());
        if let Some(lock) = lock.filter(|lock| lock.is_for_lock() == Some(true)) {
            let is_lease = info.resource() == LEASES;
            let name = || lock.rename.on_server.clone();
            let released = is_lease && matches!(info.verb(), "delete" | "deletecollection");
            let held = released.then(|| HeldLock { name: name(), holder: String::new() });
            let reads_lock = is_lease && info.verb() == "get" && info.query().first("resourceVersion").is_none();
            return Some(Self { kind: RequestKind::Lock, object: None, slot: None, held, reads_lock });
        }
        let kind = match info.verb() {
            _ if info.is_watch() => RequestKind::Watch,
            _ if !writes_limited(policy, info) => RequestKind::Other,
            "delete" | "deletecollection" => RequestKind::Delete,
            _ => RequestKind::Write,
        };
        let is_write = matches!(kind, RequestKind::Write | RequestKind::Delete);
        let slot = loaded_slot(policy, info);
        Some(Self { kind, object: is_write.then(|| info.object()), slot, held: None, reads_lock: false })
    }

    /// It is for the lock. `held`: what it writes of the holder, where the lock is a Lease.
    pub(crate) fn is_for_lock(&mut self, held: Option<HeldLock>) {
        self.kind = RequestKind::Lock;
        (self.object, self.slot) = (None, None);
        self.held = held.or(self.held.take());
    }
}

impl PodTraffic {
    /// Counts a request that came and was sent then, and to which the API server has sent the head of an answer with
    /// this status.
    pub(crate) fn answered(&self, counted: &mut CountedRequest, status: StatusCode, [came, sent]: [Instant; 2]) {
        let CountedRequest { kind, object, slot, held, .. } = counted;
        if *kind == RequestKind::Lock {
            if let Some(held) = held.take().filter(|_| status.is_success())
                && self.lock.wrote(held)
            {
                // A pod that stood by is shown all changes, and works on none.
                self.changes.forget();
            }
            return;
        }
        add(&self.requests, 1);
        if let Some(slot) = slot {
            self.slots.add(*slot);
        }
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
                add(&self.deletes, u64::from(*kind == RequestKind::Delete));
                if let Some(object) = object.take() {
                    self.changes.written(TakenWrite { object, came, sent });
                }
            }
            _ => {}
        }
        if *kind != RequestKind::Watch {
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
                self.changes.forget();
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
            first_writes: self.changes.first_writes(),
            lock_losses: self.lock.losses(),
            shadow: self.shadow.report(),
            slots: self.slots.report(),
        }
    }
}

/// Waits until the policy asks for counts, or until it does not. Never completes where the policy's source has ended.
async fn asks(policy: &mut Current, asks: bool) {
    if policy.wait_for(|policy| policy.report_traffic == asks).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// What a watch shows, where changes that it shows under `policy` count.
pub(crate) fn counted_changes(policy: &Policy, watch: &RequestInfo<'_>) -> Option<Box<Kind>> {
    let (group, resource) = (watch.api_group(), watch.resource());
    let counts = policy.report_traffic && watch.cluster().is_none() && policy.is_limited(group, resource);
    counts.then(|| Box::new((group.to_owned(), resource.to_owned())))
}

/// Whether a request writes an object of a resource that a limit covers, and neither an event nor a dry run.
fn writes_limited(policy: &Policy, info: &RequestInfo<'_>) -> bool {
    let is_limited = || match info.cluster() {
        Some(_) => policy.members().is_some_and(|members| members.sees.is_some()),
        None => policy.is_limited(info.api_group(), info.resource()),
    };
    decide::is_write(info)
        && is_limited()
        && !decide::is_event(info)
        && !decide::is_dry_run(info)
        && !decide::is_token(info)
}

/// The slot that the pod owns, and to whose load a request belongs, where the policy asks for that.
fn loaded_slot(policy: &Policy, info: &RequestInfo<'_>) -> Option<Slot> {
    let fence = policy.fence().filter(|fence| fence.counts_slots)?;
    if let Some(cluster) = info.cluster() {
        let members = policy.members().filter(|members| members.sees.is_some() && members.sees(cluster))?;
        return Some(members.hash.slot(cluster));
    }
    fence.owned_slot((info.api_group(), info.resource()), info.namespace(), info.name())
}

fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

/// In milliseconds since 1970.
fn now() -> u64 {
    unix_time::millis(SystemTime::now())
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::{Fence, Limit, Lock, Mode};
    use ctrlmesh_common::resource::ResourceMatch;
    use ctrlmesh_common::selector::Selector;
    use ctrlmesh_common::slots::NamespaceHash;
    use ctrlmesh_common::wire::SlotLoad;
    use ctrlmesh_request::rewrite::Encoding;
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
        CountedRequest::of(policy, plan.as_ref(), &info).map(|counted| counted.kind)
    }

    fn counted(kind: RequestKind) -> CountedRequest {
        CountedRequest { kind, object: None, slot: None, held: None, reads_lock: false }
    }

    #[test]
    fn a_request_counts_by_its_verb_and_resource() {
        use RequestKind::{Delete, Lock, Other, Watch, Write};
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
            ("PUT", format!("{leases}/lead"), Some(Lock)),
            ("GET", format!("{leases}?watch=1&fieldSelector=metadata.name%3Dlead"), Some(Lock)),
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
    async fn a_request_counts_for_the_slot_that_the_pod_owns() {
        let (traffic, hash) = (PodTraffic::default(), NamespaceHash::default());
        let (own, other) = (hash.slot("shop"), hash.slot("kube-public"));
        let slots = [(own, "a".to_owned()), (other, "b".to_owned())].into();
        let fence = Fence { owner: Some("a".to_owned()), slots, hash, counts_slots: true, ..Fence::default() };
        let asking = Policy { fence: Some(fence.clone()), ..policy(true) };
        let silent = Policy { fence: Some(Fence { counts_slots: false, ..fence }), ..policy(true) };
        for (policy, namespace) in [(&asking, "shop"), (&asking, "shop"), (&asking, "kube-public"), (&silent, "shop")] {
            let target = format!("/api/v1/namespaces/{namespace}/pods/x");
            let mut request = CountedRequest::of(policy, None, &RequestInfo::parse("GET", &target).unwrap()).unwrap();
            traffic.answered(&mut request, StatusCode::OK, [Instant::now(); 2]);
        }
        let counted = SlotLoad { slot: own.number().into(), requests: 2 };
        assert_eq!(traffic.totals(1).slots, [counted]);
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
            traffic.answered(&mut counted(kind), StatusCode::from_u16(status).unwrap(), [sent; 2]);
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
            first_writes: vec![0; 7],
            ..Traffic::default()
        };
        assert_eq!(traffic.totals(7), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn only_what_the_api_server_took_follows_a_change_or_holds_the_lock() {
        let (traffic, policy) = (PodTraffic::default(), policy(true));
        let info = RequestInfo::parse("PUT", "/api/v1/namespaces/a/pods/x/status").unwrap();
        let now = Instant::now();
        traffic.changes.written(TakenWrite {
            object: ObjectKey { name: "y".to_owned(), ..info.object() },
            came: now,
            sent: now,
        });
        let frame = br#"{"type":"MODIFIED","object":{"metadata":{"name":"x","namespace":"a"}}}"#;
        traffic.changes.shown_in(frame, Encoding::Json, &(String::new(), "pods".to_owned()));
        let answered = |status| {
            let mut request = CountedRequest::of(&policy, None, &info).unwrap();
            traffic.answered(&mut request, status, [Instant::now(); 2]);
            let held = |holder: &str| HeldLock { name: "lead".to_owned(), holder: holder.to_owned() };
            request.is_for_lock(Some(held("me")));
            traffic.answered(&mut request, status, [Instant::now(); 2]);
            traffic.lock.read(&held("other"));
            let totals = traffic.totals(1);
            [totals.requests, totals.first_writes.iter().sum(), totals.lock_losses]
        };
        assert_eq!(answered(StatusCode::CONFLICT), [1, 0, 0]);
        assert_eq!(answered(StatusCode::OK), [2, 1, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn counts_are_published_while_the_policy_asks() {
        let sender = watch::Sender::new(Arc::new(policy(false)));
        let (reports, pod) = (TrafficReports::default(), "ops/a".parse::<PodName>().unwrap());
        let (traffic, drain) = (Arc::<PodTraffic>::default(), Drain::default());
        let publish = reports.begin(pod.clone());
        drain.spawn(traffic.clone().report(sender.subscribe(), publish, drain.clone(), None));
        let count = || {
            traffic.answered(&mut counted(RequestKind::Other), StatusCode::OK, [Instant::now(); 2]);
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
