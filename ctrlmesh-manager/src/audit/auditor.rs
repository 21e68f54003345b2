//! Audits again and again, while this replica leads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use ctrlmesh_runtime::sync::lock;
use ctrlmesh_runtime::unix_time;
use tokio::sync::watch;
use tokio::task;
use tokio::time::{self, Instant};
use tracing::error;

use super::comparison::{Audit, KindKey, KindState, compare};
use super::condition::{ConditionLog, Ownerships, TroubleTimes};
use super::holders::{InForce, PolicyInForce, SentPolicies};
use super::metrics::{AuditMetrics, AuditedKind, AuditedOperator, AuditedOperators};
use super::operators::operators;
use crate::cluster::plan::{Plan, Plans};
use crate::labels::ObjectCounts;
use crate::leader::lease::Leadership;
use crate::push::policy_store::{PolicyStore, Receipt};
use crate::rules::pod::PodName;

/// Between two audits.
const PERIOD: Duration = Duration::from_secs(1);

/// How many times as long as an audit took: it takes no more than a twentieth of a core.
const REST: u32 = 19;

/// A proxy of which nothing was heard for so long is away. Proxies connect anew within a few seconds.
const AWAY: Duration = Duration::from_secs(8);

/// A new leader takes this long to hear from all proxies. Until then the conditions stay.
const NEW_LEADER: Duration = Duration::from_mins(1);

/// Audits while this replica leads.
pub struct Auditor {
    pub plans: Plans,
    pub store: Arc<PolicyStore>,
    pub objects: ObjectCounts,
    pub leadership: Leadership,
    pub metrics: AuditMetrics,
    /// What the conditions are to say.
    pub findings: watch::Sender<Arc<Ownerships>>,
}

/// What one term of leadership remembers.
#[derive(Debug, Default)]
struct Memory {
    times: TroubleTimes,
    log: ConditionLog,
    audit: Audit,
    /// ShardingConfigs whose conditions tell of an operator, by its name.
    told: BTreeMap<String, Vec<String>>,
    /// Kinds that its pods were once known to watch, by the name of the operator.
    watched: BTreeMap<String, BTreeSet<KindKey>>,
    /// By what the last audit went.
    inputs: Option<InputVersions>,
}

/// Versions of everything that an audit goes by.
#[derive(Debug)]
struct InputVersions {
    plan: Arc<Plan>,
    objects: u64,
    in_force: InForce,
    watches: u64,
}

impl Auditor {
    /// Audits for ever.
    pub async fn run(self) {
        let this = Arc::new(self);
        let lead = || async {
            let sent = Arc::default();
            tokio::select! {
                () = this.lead(&sent) => {}
                () = this.remember(&sent) => {}
            }
        };
        let ended = || {
            this.findings.send_replace(Arc::default());
            this.metrics.clear();
        };
        this.leadership.clone().while_held(lead, ended).await;
    }

    /// A proxy may have any policy in force that was sent since this replica leads.
    async fn remember(&self, sent: &Mutex<SentPolicies>) {
        let mut plans = self.plans.clone();
        loop {
            let plan = plans.borrow_and_update().clone();
            if let Some(plan) = plan {
                lock(sent).remember(&plan);
            }
            if plans.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    async fn lead(self: &Arc<Self>, sent: &Arc<Mutex<SentPolicies>>) {
        let (mut memory, since, mut has_heard) = (Memory::default(), Instant::now(), false);
        loop {
            let begun = Instant::now();
            // Before the plan: a proxy has nothing newer in force then.
            let in_force = self.in_force();
            let plan = self.plans.borrow().clone();
            if let Some(plan) = plan {
                let (this, sent) = (Arc::clone(self), Arc::clone(sent));
                let audit = task::spawn_blocking(move || {
                    let metrics = this.audit(plan, in_force, &sent, &mut memory);
                    (memory, metrics)
                });
                match audit.await {
                    Ok((next, metrics)) => {
                        memory = next;
                        has_heard |= since.elapsed() >= NEW_LEADER || memory.has_heard_of_all();
                        if has_heard {
                            self.metrics.set(metrics);
                        }
                    }
                    Err(error) => {
                        error!(%error, "the audit failed; it begins anew");
                        memory = Memory::default();
                    }
                }
                if since.elapsed() >= NEW_LEADER {
                    self.tell(&mut memory);
                }
            }
            time::sleep(PERIOD.max(begun.elapsed() * REST)).await;
        }
    }

    fn tell(&self, memory: &mut Memory) {
        let findings = memory.log.findings(&memory.audit, &memory.told, &memory.times, Instant::now());
        self.findings.send_if_modified(|before| {
            let differs = before.as_ref().as_ref() != Some(&findings);
            if differs {
                *before = Arc::new(Some(findings));
            }
            differs
        });
    }

    /// Looks at everything, if something has changed. Returns what the metrics say.
    fn audit(
        &self,
        plan: Arc<Plan>,
        in_force: InForce,
        sent: &Mutex<SentPolicies>,
        memory: &mut Memory,
    ) -> AuditedOperators {
        let (objects, watches) = (self.objects.version(), *self.store.watches().changes().borrow());
        let inputs = InputVersions { plan, objects, in_force, watches };
        if !memory.inputs.as_ref().is_some_and(|before| before.is_same(&inputs)) {
            let sent = self.sent(&inputs, sent);
            self.look(&inputs, &sent, memory);
            memory.inputs = Some(inputs);
        }
        let (now, unix) = (Instant::now(), unix_time::millis(SystemTime::now()));
        memory.times.see(&memory.audit, now);
        let of_operator = |(name, kinds): (&String, &BTreeMap<KindKey, KindState>)| {
            let mut audited = AuditedOperator::default();
            for (key, state) in kinds {
                let KindState::Audited(audit) = state else {
                    audited.uncounted += 1;
                    continue;
                };
                let unwatched = memory.times.unwatched(name, key, audit, now, unix);
                audited.kinds.insert(key.clone(), AuditedKind { audit: audit.clone(), unwatched });
            }
            (name.clone(), audited)
        };
        memory.audit.iter().map(of_operator).collect()
    }

    fn in_force(&self) -> InForce {
        let now = SystemTime::now();
        let of = |(pod, receipt): (PodName, Receipt)| {
            let silent = now.duration_since(receipt.last_contact).unwrap_or_default();
            let is_away = !receipt.connected && silent >= AWAY;
            (pod, PolicyInForce { uid: receipt.uid, digest: receipt.digest, is_away })
        };
        self.store.receipts().into_iter().map(of).collect()
    }

    /// A copy, so that nobody waits for the audit.
    fn sent(&self, InputVersions { plan, in_force, .. }: &InputVersions, sent: &Mutex<SentPolicies>) -> SentPolicies {
        let is_newest = self.plans.borrow().as_ref().is_some_and(|newest| Arc::ptr_eq(newest, plan));
        let mut sent = lock(sent);
        sent.remember(plan);
        if is_newest {
            sent.forget(plan, in_force);
        }
        sent.clone()
    }

    fn look(&self, inputs: &InputVersions, sent: &SentPolicies, memory: &mut Memory) {
        let InputVersions { plan, in_force, .. } = inputs;
        let watches = self.store.watches().newest();
        let holders = sent.holders(plan, in_force, &watches);
        let labelling = &plan.snapshot.scheme.in_force;
        let operators = operators(plan);
        memory.told = operators.iter().map(|one| (one.name.clone(), one.told.clone())).collect();
        memory.watched.retain(|name, _| memory.told.contains_key(name));
        let known_kinds = &mut memory.watched;
        let audit = operators.iter().map(|audited| {
            let holders = audited.operators.iter().filter_map(|config| holders.get(config.as_str()));
            let holders: Vec<_> = holders.flatten().collect();
            let known = known_kinds.entry(audited.name.clone()).or_default();
            (audited.name.clone(), compare(audited, &holders, &self.objects, labelling, known))
        });
        memory.audit = audit.collect();
    }
}

impl Memory {
    /// Whether every pod that has a policy has a proxy that has said something.
    fn has_heard_of_all(&self) -> bool {
        let Some(InputVersions { plan, in_force, .. }) = &self.inputs else { return false };
        plan.sendable().keys().all(|pod| in_force.contains_key(pod))
    }
}

impl InputVersions {
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.plan, &other.plan)
            && (self.objects, self.watches) == (other.objects, other.watches)
            && self.in_force == other.in_force
    }
}
