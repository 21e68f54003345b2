//! CircuitBreakers are applied, changed and reset, and hold what an operator asks of the API server.

use std::fs;
use std::time::{Duration, Instant};

use ctrlmesh_common::api::{BreakerState, CircuitBreaker, LimitingSnapshot};
use ctrlmesh_testbed::audit_log::AuditEvent;
use ctrlmesh_testbed::{ControlPlane, Options, is_full};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::bed::{AUDIENCE, eventually};
use crate::follow::operator_config;
use crate::full::{OPERATOR, SYSTEM, divide_fenced, enrolled, parted, proxies, world};
use crate::process::{ProxySettings, Replica, Sidecar};
use crate::token::{self, TestPod};

pub(crate) const BREAKER: &str = "wild";

/// What the names of the objects begin with that the operator makes.
pub(crate) const PREFIX: &str = "guarded-";

const BURST: u32 = 5;

const PER_SECOND: u32 = 2;

/// How many objects the operator makes in a loop; `CTRLMESH_TEST_FULL=1` has it go on for 30 s.
fn made() -> usize {
    if is_full() { 65 } else { 15 }
}

/// A pod with its proxy, whose operator has run wild: it asks again at once, whatever the answer is.
pub(crate) struct Operator {
    sidecar: Sidecar,
    maps: Api<ConfigMap>,
    /// In all namespaces.
    all_maps: Api<ConfigMap>,
    secrets: Api<Secret>,
    /// Of a client that waits as long as it is told.
    patient: Api<ConfigMap>,
}

/// A request that passed: when it began and ended.
struct Passed {
    begun: Instant,
    ended: Instant,
}

impl Operator {
    /// Starts a proxy for the pod. The operator works in namespace `team`.
    async fn start(admin: &Client, settings: &ProxySettings, pod: &TestPod, team: &str) -> Self {
        let sidecar = Sidecar::start(settings, pod, &pod.token(admin, AUDIENCE).await).await;
        let mut config = operator_config(admin, settings, pod, &sidecar).await;
        let patient = Client::try_from(config.clone()).unwrap();
        config.default_retry = false;
        let wild = Client::try_from(config).unwrap();
        let maps = |client: &Client| Api::namespaced(client.clone(), team);
        let (patient, secrets) = (maps(&patient), Api::namespaced(wild.clone(), team));
        Self { sidecar, maps: maps(&wild), all_maps: Api::all(wild), secrets, patient }
    }

    /// Whether the request passed; panics where it failed for another reason than a guard.
    fn passed<T>(result: Result<T, kube::Error>) -> bool {
        match result {
            Ok(_) => true,
            Err(kube::Error::Api(status)) if status.code == 404 => true,
            Err(kube::Error::Api(status)) if status.code == 429 => {
                assert!(status.message.contains(&format!("CircuitBreaker {OPERATOR}/{BREAKER}")), "{status:?}");
                assert_eq!(status.reason, "TooManyRequests");
                false
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    async fn creates(&self, number: usize) -> bool {
        let map = json!({"metadata": {"name": format!("{PREFIX}{number}")}});
        Self::passed(self.maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await)
    }

    pub(crate) fn all_maps(&self) -> Api<ConfigMap> {
        self.all_maps.clone()
    }

    pub(crate) async fn deletes(&self, number: usize) -> bool {
        Self::passed(self.maps.delete(&format!("{PREFIX}{number}"), &DeleteParams::default()).await)
    }

    /// Makes objects as fast as it can. Returns those requests that passed, and how many did not.
    async fn runs_wild(&self) -> (Vec<Passed>, usize) {
        let (mut passed, mut refused) = (Vec::new(), 0);
        while passed.len() < made() {
            let begun = Instant::now();
            if self.creates(passed.len()).await {
                passed.push(Passed { begun, ended: Instant::now() });
            } else {
                refused += 1;
                self.secrets.list(&ListParams::default()).await.expect("another resource is not limited");
            }
        }
        (passed, refused)
    }

    /// A client that waits is refused once at most, because what it is told is true.
    async fn waits(&self, number: usize) {
        let refused = format!("guard_requests_total{{rule=\"{OPERATOR}/{BREAKER}/creates\",outcome=\"refused\"}}");
        let refused = format!("ctrlmesh_proxy_{refused}");
        let before = self.sidecar.metric(&refused).await;
        let map = json!({"metadata": {"name": format!("{PREFIX}{number}")}});
        self.patient.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
        assert!(self.sidecar.metric(&refused).await <= before + 1.0);
    }

    async fn is_open(&self, rule: &str) -> Option<bool> {
        let metric = format!("ctrlmesh_proxy_guard_open{{rule=\"{OPERATOR}/{BREAKER}/{rule}\"}}");
        self.sidecar.find_metric(&metric).await.map(|value| value > 0.0)
    }

    pub(crate) async fn until_open(&self, rule: &str, is_open: Option<bool>) {
        eventually("the breaker", async || (self.is_open(rule).await == is_open).then_some(())).await;
    }

    async fn epoch(&self) -> f64 {
        self.sidecar.metric(&format!("ctrlmesh_proxy_policy_epoch{{pod=\"{OPERATOR}/op-0\"}}")).await
    }
}

fn rule(name: &str, verb: &str, trigger: &str, bucket: &Value) -> Value {
    let requests = json!({"apiGroups": [""], "resources": ["configmaps"], "verbs": [verb], "namespaces": ["*"]});
    json!({"name": name, "bucket": bucket, "triggerPolicy": trigger, "resourceRules": [requests]})
}

/// Limits creates; and a breaker on deletes, which a user resets.
fn rules(creates: &str) -> Value {
    let per_second = json!({"burst": BURST, "interval": "1s", "limit": PER_SECOND});
    let two = json!({"burst": 2, "interval": "1h", "limit": 1});
    json!([rule("creates", "create", creates, &per_second), rule("deletes", "delete", "Normal", &two)])
}

async fn apply(client: &Client, metadata: &Value, rules: &Value) {
    let breakers: Api<CircuitBreaker> = Api::namespaced(client.clone(), OPERATOR);
    let every_pod = json!([{"key": "ctrlmesh.kusionstack.io/enable-proxy", "operator": "Exists"}]);
    let mut breaker = json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1",
        "kind": "CircuitBreaker",
        "metadata": {"name": BREAKER},
        "spec": {"selector": {"matchExpressions": every_pod}, "rateLimitings": rules},
    });
    for (field, value) in metadata.as_object().unwrap() {
        breaker["metadata"][field] = value.clone();
    }
    let force = PatchParams::apply("test").force();
    breakers.patch(BREAKER, &force, &Patch::Apply(&breaker)).await.unwrap();
}

/// In no window did more pass than the burst and what flowed in. A proxy let each pass while it was under way.
fn assert_bounded(passed: &[Passed], burst: u32, per_second: u32) {
    for first in passed {
        for last in passed.iter().filter(|last| last.ended >= first.ended) {
            let window: Duration = last.ended - first.begun;
            let within = |one: &&Passed| one.begun >= first.begun && one.ended <= last.ended;
            let count = u32::try_from(passed.iter().filter(within).count()).unwrap();
            let flowed_in = f64::from(per_second) * window.as_secs_f64();
            assert!(f64::from(count) <= f64::from(burst) + flowed_in + 1.0, "{count} passed in {window:?}");
        }
    }
}

/// At least 95 % of what may pass does. Of a few seconds that says little: one slow answer is more than the rest.
fn assert_used(passed: &[Passed]) {
    let (first, last) = (&passed[0], &passed[passed.len() - 1]);
    let flowed_in = f64::from(PER_SECOND) * (last.begun - first.begun).as_secs_f64();
    let allowed = f64::from(BURST) + flowed_in;
    let count = f64::from(u32::try_from(passed.len()).unwrap());
    assert!(!is_full() || count >= 0.95 * allowed, "{count} of {allowed}");
}

/// How often the API server was asked to make an object that counts.
fn audited(cluster: &ControlPlane) -> usize {
    let events = AuditEvent::read(&cluster.audit_log(), "configmaps").unwrap();
    let made = events.iter().filter(|event| event.verb == "create" && event.object.name.starts_with(PREFIX));
    made.filter(|event| event.stage == "ResponseComplete").count()
}

/// A cluster with an operator of two pods; the proxy of one of them is started by the test.
pub(crate) struct Bed {
    pub(crate) cluster: ControlPlane,
    pub(crate) client: Client,
    pub(crate) settings: ProxySettings,
    pub(crate) pod: TestPod,
    other: TestPod,
    /// A namespace of the pod's shard.
    pub(crate) team: String,
    _replica: Replica,
    _folder: TempDir,
}

impl Bed {
    pub(crate) async fn new() -> Self {
        let cluster = ControlPlane::start(&Options { audit: true, ..Options::default() }).unwrap();
        let client = cluster.client().await.unwrap();
        let folder = TempDir::new().unwrap();
        world(&client).await;
        let replica = Replica::start(&cluster, SYSTEM, &[]).await;
        replica.until_ready().await;
        divide_fenced(&client, "Off", 2, None).await;
        let (settings, [pod, other]) = enrolled(&cluster, &client, &replica, &folder).await;
        let (_sidecars, clients) = proxies(&client, &settings, &[pod.clone(), other.clone()]).await;
        let [own, _] = parted(&clients, |_, _| true).await;
        let team = own.first().unwrap().clone();
        Self { cluster, client, settings, pod, other, team, _replica: replica, _folder: folder }
    }

    /// Waits until the status says this of each condition, by its type and reason.
    async fn until_status(&self, expected: [(&str, &str); 3]) {
        let breakers: Api<CircuitBreaker> = Api::namespaced(self.client.clone(), OPERATOR);
        eventually("the status", async || {
            let status = breakers.get(BREAKER).await.ok()?.status?;
            let conditions = status.conditions.iter().map(|one| (one.type_.as_str(), one.reason.as_str()));
            conditions.eq(expected).then_some(())
        })
        .await;
    }

    /// What the status says of the limits of the pod that the test serves, as it was written last.
    async fn limits(&self) -> Vec<LimitingSnapshot> {
        let breakers: Api<CircuitBreaker> = Api::namespaced(self.client.clone(), OPERATOR);
        let status = breakers.get(BREAKER).await.unwrap().status.unwrap();
        let mut targets = status.target_status.into_iter();
        targets.find(|one| one.target.pod_name.as_ref() == Some(&self.pod.name)).unwrap().limiting_snapshots
    }

    async fn until_event(&self, reason: &str, note: &str) {
        let events: Api<Event> = Api::namespaced(self.client.clone(), OPERATOR);
        eventually("an event", async || {
            let all = events.list(&ListParams::default()).await.ok()?.items;
            let is_it = |one: &&Event| one.reason.as_deref() == Some(reason) && one.note.as_deref() == Some(note);
            all.iter().find(is_it).map(drop)
        })
        .await;
    }

    pub(crate) async fn operator(&self) -> Operator {
        Operator::start(&self.client, &self.settings, &self.pod, &self.team).await
    }

    /// Waits until the proxy's state folder has an open breaker with this text: it is written beside the request.
    async fn until_kept(&self, text: &str) {
        let file = self.settings.state(&self.pod).join(format!("guards/{OPERATOR}_{}", self.pod.name));
        let is_kept = async || fs::read_to_string(&file).is_ok_and(|kept| kept.contains(text)).then_some(());
        eventually("the breaker is kept", is_kept).await;
    }

    pub(crate) async fn apply(&self, metadata: &Value, rules: &Value) {
        apply(&self.client, metadata, rules).await;
    }
}

#[tokio::test]
async fn circuit_breakers_hold_what_an_operator_asks() {
    let bed = Bed::new().await;
    let mut operator = bed.operator().await;
    let epoch = operator.epoch().await;

    // A limiter, and a rule for another verb.
    let made = made();
    bed.apply(&json!({}), &rules("LimiterOnly")).await;
    operator.until_open("creates", Some(false)).await;
    // No proxy serves the other pod.
    let [valid, enforced] = [("Accepted", "Valid"), ("Programmed", "Waiting")];
    bed.until_status([valid, enforced, ("Open", "Closed")]).await;
    let (passed, refused) = operator.runs_wild().await;
    assert_bounded(&passed, BURST, PER_SECOND);
    assert_used(&passed);
    assert!(refused > 0);
    operator.waits(made).await;
    eventually("the log", async || (audited(&bed.cluster) > made).then_some(())).await;
    assert_eq!(audited(&bed.cluster), made + 1, "what is refused never arrives");

    // A breaker opens and stays open, also in another process, and while another rule changes.
    assert!(operator.deletes(0).await && operator.deletes(1).await && !operator.deletes(2).await);
    assert_eq!(operator.is_open("deletes").await, Some(true));
    bed.until_kept(r#""rule":"deletes""#).await;
    bed.until_status([valid, enforced, ("Open", "Opened")]).await;
    let limits = bed.limits().await;
    let [creates, deletes] = &limits[..] else { panic!("{limits:?}") };
    assert_eq!((creates.state, deletes.state), (BreakerState::Closed, BreakerState::Opened));
    assert_eq!((deletes.allowed, deletes.refused), (Some(2), Some(1)));
    bed.until_event("BreakerOpened", &format!("limit \"deletes\" opened in pod {}", bed.pod.name)).await;
    operator.sidecar.kill();
    let operator = bed.operator().await;
    assert!(!operator.deletes(2).await);
    bed.apply(&json!({}), &rules("ForceOpened")).await;
    operator.until_open("creates", Some(true)).await;
    assert!(!operator.deletes(2).await && !operator.creates(made + 1).await);

    // A reset lets it go on, and the label lets everything pass.
    let reset = json!({"annotations": {"circuitbreaker.ctrlmesh.kusionstack.io/reset": "deletes"}});
    bed.apply(&reset, &rules("ForceOpened")).await;
    operator.until_open("deletes", Some(false)).await;
    bed.until_event("BreakerClosed", &format!("limit \"deletes\" closed in pod {}", bed.pod.name)).await;
    assert!(operator.deletes(2).await && !operator.creates(made + 1).await);
    let off = json!({"labels": {"circuitbreaker.ctrlmesh.kusionstack.io/disable": "true"}});
    bed.apply(&off, &rules("ForceOpened")).await;
    operator.until_open("creates", None).await;
    bed.until_status([("Accepted", "Disabled"), ("Programmed", "Disabled"), ("Open", "Closed")]).await;
    assert!(operator.creates(made + 1).await);
    assert_eq!(operator.epoch().await.to_bits(), epoch.to_bits(), "nobody owns or sees anything else");
}

/// An operator that makes objects as fast as it can, until it is told to stop.
struct Wild {
    passed: watch::Receiver<usize>,
    stop: CancellationToken,
    task: JoinHandle<(Operator, Vec<Passed>)>,
}

impl Wild {
    /// The names of its objects begin at `number`.
    async fn start(bed: &Bed, pod: &TestPod, number: usize) -> Self {
        let operator = Operator::start(&bed.client, &bed.settings, pod, &bed.team).await;
        let (count, passed) = watch::channel(0);
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let mut passed = Vec::new();
            while !stopped.is_cancelled() {
                let begun = Instant::now();
                if operator.creates(number + passed.len()).await {
                    passed.push(Passed { begun, ended: Instant::now() });
                    count.send_replace(passed.len());
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            (operator, passed)
        });
        Self { passed, stop, task }
    }

    /// Waits until so many more have passed.
    async fn until_passed(&self, more: usize) {
        let mut passed = self.passed.clone();
        let wanted = *passed.borrow() + more;
        let all = async { drop(passed.wait_for(|passed| *passed >= wanted).await) };
        tokio::time::timeout(Duration::from_mins(1), all).await.expect("its part of the bucket");
    }

    /// Its proxy is killed.
    async fn end(self) -> Vec<Passed> {
        self.stop.cancel();
        let (mut operator, passed) = self.task.await.unwrap();
        operator.sidecar.kill();
        passed
    }
}

#[tokio::test]
async fn pods_of_an_operator_keep_to_one_bucket() {
    const BURST: u32 = 4;
    const PER_SECOND: u32 = 6;
    let bed = Bed::new().await;
    let bucket = json!({"burst": BURST, "interval": "1s", "limit": PER_SECOND, "scope": "Operator"});
    bed.apply(&json!({}), &json!([rule("creates", "create", "LimiterOnly", &bucket)])).await;
    let [first, second] = [Wild::start(&bed, &bed.pod, 10_000).await, Wild::start(&bed, &bed.other, 20_000).await];
    bed.until_status([("Accepted", "Valid"), ("Programmed", "Acknowledged"), ("Open", "Closed")]).await;
    for wild in [&first, &second] {
        wild.until_passed(6).await;
    }
    // A pod comes, and one goes: the bucket is divided anew.
    let third = token::pod_with_proxy(&bed.client, OPERATOR, "op-2").await;
    let third = Wild::start(&bed, &third, 30_000).await;
    third.until_passed(6).await;
    let mut passed = first.end().await;
    let pods: Api<Pod> = Api::namespaced(bed.client.clone(), OPERATOR);
    pods.delete(&bed.pod.name, &DeleteParams::default().grace_period(0)).await.unwrap();
    for wild in [&second, &third] {
        wild.until_passed(12).await;
    }
    passed.extend(second.end().await);
    passed.extend(third.end().await);
    assert_bounded(&passed, BURST, PER_SECOND);
    eventually("the log", async || (audited(&bed.cluster) >= passed.len()).then_some(())).await;
    assert_eq!(audited(&bed.cluster), passed.len(), "what is refused never arrives");
}
