//! Watches an operator from outside: follows the audit log, and looks every second at what the API server has.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use ctrlmesh_runtime::sync::lock;
use jiff::Timestamp;
use serde_json::Value;

use crate::api::Api;
use crate::audit::Event;
use crate::history::{AuditHistory, Span};
use crate::lease::Leases;
use crate::operator::{ClusterObjects, Operator, by_label, metric};
use crate::tail::Tail;
use crate::view::{Table, World};

/// How often the log is read, and how often the API server is asked.
const READ_EVERY: Duration = Duration::from_millis(200);
const ASK_EVERY: Duration = Duration::from_secs(1);

/// How long a pod may take to say what it counts. One that has just died is asked again and again by the client.
const METRICS_WITHIN: Duration = Duration::from_millis(500);

/// Over what time changes are counted for the table.
const COUNTED_OVER: Duration = Duration::from_secs(5);

/// Watches, until it is dropped.
#[derive(Debug)]
pub struct Observer {
    shared: Arc<ObserverState>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct ObserverState {
    api: Arc<Api>,
    operator: Operator,
    seen: Mutex<Observations>,
    over: AtomicBool,
}

/// What has been seen.
#[derive(Debug, Default)]
struct Observations {
    history: AuditHistory,
    world: World,
    /// Reconciles a second, by pod.
    rates: BTreeMap<String, f64>,
    /// What was unowned and owned twice, whenever we looked, as long as there is work.
    samples: Vec<OwnershipSample>,
    /// How often the API server was asked, with success.
    rounds: u64,
    /// Why that failed last.
    trouble: Option<String>,
}

/// What was seen at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnershipSample {
    /// When.
    pub at: Timestamp,
    /// How many objects no replica worked on.
    pub unowned: usize,
    /// How many objects several replicas worked on.
    pub twice: usize,
}

/// A count, and when it was taken.
type Sample = (Instant, f64);

/// What was found when the API server was asked before.
#[derive(Debug, Default)]
struct Before {
    /// Reconciles, by pod.
    samples: BTreeMap<String, Sample>,
    leases: Leases,
}

impl Observer {
    /// Watches `operator`, where the API server writes its audit log to `log`.
    pub fn start(api: Arc<Api>, operator: Operator, log: PathBuf) -> Self {
        let history = AuditHistory::of(operator.namespace, operator.name);
        let seen = Mutex::new(Observations { history, ..Observations::default() });
        let shared = Arc::new(ObserverState { api, operator, seen, over: AtomicBool::new(false) });
        let thread = thread::spawn({
            let shared = shared.clone();
            move || shared.watch(log)
        });
        Self { shared, thread: Some(thread) }
    }

    /// The operator.
    pub fn operator(&self) -> &Operator {
        &self.shared.operator
    }

    /// The table, as of now.
    pub fn table(&self) -> Table {
        let seen = self.shared.seen();
        let now = Timestamp::now();
        let span = now.checked_sub(COUNTED_OVER).unwrap_or(now)..now;
        let mut table = seen.world.table(&seen.history, &span);
        for (pod, replica) in &mut table.replicas {
            replica.reconciles = seen.rates.get(pod).copied();
        }
        table
    }

    /// What the API server had last.
    pub fn world(&self) -> World {
        self.shared.seen().world.clone()
    }

    /// The addresses that the operator's pods have ever had: who connects to the API server past a proxy comes from
    /// there.
    pub fn addresses(&self) -> BTreeSet<String> {
        self.shared.seen().world.addresses.clone()
    }

    /// Asks the history.
    pub fn history<T>(&self, ask: impl FnOnce(&AuditHistory) -> T) -> T {
        ask(&self.shared.seen().history)
    }

    /// Asks world and history, of one moment.
    pub fn both<T>(&self, ask: impl FnOnce(&World, &AuditHistory) -> T) -> T {
        let seen = self.shared.seen();
        ask(&seen.world, &seen.history)
    }

    /// What was unowned and owned twice in a span, whenever we looked.
    pub fn sampled(&self, span: &Span) -> Vec<OwnershipSample> {
        let seen = self.shared.seen();
        seen.samples.iter().copied().filter(|sample| span.contains(&sample.at)).collect()
    }

    /// Waits until what was so when this is called has been seen; gives the time that it is seen up to.
    ///
    /// # Errors
    /// Where the API server does not answer for a minute.
    pub fn settle(&self) -> Result<Timestamp> {
        let now = Timestamp::now();
        let rounds = self.shared.seen().rounds;
        // The one that was under way may have asked before.
        self.wait("the API server", Duration::from_mins(1), |seen| seen.rounds >= rounds + 2)?;
        Ok(now)
    }

    /// Waits until the table is as `wanted`; gives how long that took.
    ///
    /// # Errors
    /// Where it does not become so; the error shows the table.
    pub fn until(&self, what: &str, within: Duration, wanted: impl Fn(&Table) -> bool) -> Result<Duration> {
        let start = Instant::now();
        loop {
            let table = self.table();
            if wanted(&table) {
                return Ok(start.elapsed());
            }
            if start.elapsed() > within {
                let trouble = self.shared.seen().trouble.clone().unwrap_or_default();
                bail!("waited {within:?} in vain for {what}: {table:#?} {trouble}");
            }
            thread::sleep(READ_EVERY);
        }
    }

    fn wait(&self, what: &str, within: Duration, wanted: impl Fn(&Observations) -> bool) -> Result<()> {
        let deadline = Instant::now() + within;
        while !wanted(&self.shared.seen()) {
            if Instant::now() > deadline {
                let trouble = self.shared.seen().trouble.clone().unwrap_or_default();
                bail!("waited {within:?} in vain for {what}: {trouble}");
            }
            thread::sleep(READ_EVERY);
        }
        Ok(())
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It panicked where there is an error, and has said so.
            drop(thread.join());
        }
    }
}

impl Observations {
    fn sample(&mut self) {
        let at = Timestamp::now();
        let Table { unowned, twice, objects, .. } = self.world.table(&self.history, &(at..at));
        if objects > 0 {
            self.samples.push(OwnershipSample { at, unowned, twice });
        }
    }
}

impl ObserverState {
    fn seen(&self) -> MutexGuard<'_, Observations> {
        lock(&self.seen)
    }

    fn watch(&self, log: PathBuf) {
        let mut tail = Tail::of(log);
        let mut asked: Option<Instant> = None;
        let mut before = Before::default();
        while !self.over.load(Ordering::Relaxed) {
            let mut events = Vec::new();
            let read = tail.lines(|line| events.extend(Event::parse(line)));
            {
                let mut seen = self.seen();
                for event in events {
                    seen.history.add(event);
                }
                seen.trouble = read.err().map(|error| format!("read the audit log: {error}"));
            }
            if asked.is_none_or(|asked| asked.elapsed() >= ASK_EVERY) {
                asked = Some(Instant::now());
                self.ask(&mut before);
            }
            self.seen().sample();
            thread::sleep(READ_EVERY);
        }
    }

    fn ask(&self, before: &mut Before) {
        let answer = self.look(&mut before.leases);
        let samples = &mut before.samples;
        let mut seen = self.seen();
        match answer {
            Ok(mut world) => {
                let now = Instant::now();
                for (name, pod) in &world.pods {
                    let Some(count) = pod.reconciles else { continue };
                    if let Some((then, before)) = samples.insert(name.clone(), (now, count)) {
                        let seconds = now.duration_since(then).as_secs_f64().max(0.001);
                        // After a restart it begins at 0 again.
                        seen.rates.insert(name.clone(), (count - before).max(0.0) / seconds);
                    }
                }
                world.remember(&seen.world);
                seen.world = world;
                seen.rounds += 1;
            }
            Err(error) => seen.trouble = Some(format!("{error:#}")),
        }
    }

    fn look(&self, leases: &mut Leases) -> Result<World> {
        let (api, operator) = (&self.api, &self.operator);
        let namespace = operator.namespace;
        let core = format!("/api/v1/namespaces/{namespace}");
        let label = operator.label.replace('/', "%2F").replace('=', "%3D");
        let all = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases");
        let found = ClusterObjects {
            pods: api.get(&format!("{core}/pods?labelSelector={label}"))?,
            leases: leases.living(api.get(&all)?, Instant::now()),
            // There may be no such kind yet.
            configs: api
                .get(&format!("/apis/ctrlmesh.kusionstack.io/v1alpha1/namespaces/{namespace}/shardingconfigs"))
                .unwrap_or(Value::Null),
            work: api.get(operator.work).context("the operator's work")?,
        };
        let mut world = operator.world(&found);
        for (name, pod) in world.pods.iter_mut().filter(|(_, pod)| pod.ready) {
            let path = format!("{core}/pods/{name}:{}/proxy/metrics", operator.metrics);
            // A pod that ends meanwhile does not answer.
            let Ok(text) = api.text(&path, METRICS_WITHIN) else { continue };
            pod.reconciles = metric(&text, operator.reconciles);
            pod.answers = by_label(&text, operator.answers.0, operator.answers.1);
            pod.received = metric(&text, "process_network_receive_bytes_total");
        }
        Ok(world)
    }
}

/// The span from a moment until now.
pub fn since(start: Timestamp) -> Span {
    start..Timestamp::now()
}
