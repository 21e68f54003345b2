//! Compiles the cluster's state whenever it changes, once for all users of the plan.
//!
//! The push service, the cluster writer and admission read the same plan. What follows in one namespace follows from
//! that namespace alone: so only those are compiled anew in which something changed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task;
use tokio::time::{self, Instant};
use tracing::{error, warn};

use crate::cluster::backoff::Backoff;
use crate::cluster::cache::{Cache, Snapshot};
use crate::cluster::comebacks::Comebacks;
use crate::cluster::evidence::LeadersEvidence;
use crate::drain::Drain;
use crate::rules::compile::{self, Compiled, PoliciesByPod, Record};
use crate::rules::fenced::is_handing_back;
use crate::rules::object_name::full_name;

mod changes;

pub use changes::Changed;

/// How long changes are collected before they are compiled: a rollout brings many at once. If compiling took
/// longer, the pause is as long as that.
const GATHER: Duration = Duration::from_millis(20);

/// The same while ownership moves: each step of a move waits for it.
const GATHER_MOVING: Duration = Duration::from_millis(2);

#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub snapshot: Arc<Snapshot>,
    pub compiled: Compiled,
    /// Set while some operator's status is not written yet: the policies that proxies may get until then.
    pub sendable: Option<PoliciesByPod>,
}

impl Plan {
    /// The policies that proxies may get now.
    pub fn sendable(&self) -> &PoliciesByPod {
        self.sendable.as_ref().unwrap_or(&self.compiled.policies)
    }

    /// Whether a proxy, or a move, waits for a status to be written. Operators that are being deleted get none, unless
    /// they hand back what they own.
    pub fn waits(&self) -> bool {
        let leaving = self.snapshot.configs.iter().filter(|config| !is_handing_back(config));
        let leaving = leaving.map(|config| &config.metadata).filter(|meta| meta.deletion_timestamp.is_some());
        let leaving: BTreeSet<String> = leaving.map(full_name).collect();
        let mut operators = self.compiled.operators.iter();
        operators.any(|(operator, record)| (!record.written || record.moves) && !leaving.contains(operator))
    }

    /// Whether ownership is on its way from one owner to another.
    fn moves(&self) -> bool {
        let revokes = |record: &Record| record.ownership.as_ref().is_some_and(|table| table.revoked.is_some());
        self.compiled.operators.values().any(|record| record.moves || revokes(record))
    }
}

/// `None` until the cache is synced.
pub type Plans = watch::Receiver<Option<Arc<Plan>>>;

/// A replica that does not lead has no evidence: it plans what the leader wrote.
pub fn start(cache: Arc<Cache>, evidence: watch::Receiver<LeadersEvidence>, drain: &Drain) -> Plans {
    let (sender, plans) = watch::channel(None);
    drain.spawn_until_started(follow(cache, evidence, sender));
    plans
}

async fn follow(
    cache: Arc<Cache>,
    mut evidence: watch::Receiver<LeadersEvidence>,
    plans: watch::Sender<Option<Arc<Plan>>>,
) {
    cache.synced().await;
    let mut changes = cache.changes();
    let (mut last, mut unsettled) = (Arc::<Plan>::default(), BTreeSet::new());
    let (mut troubles, mut comebacks) = (Vec::new(), Comebacks::default());
    loop {
        changes.mark_unchanged();
        let begun = Instant::now();
        let snapshot = cache.snapshot();
        let (held_back, due) = comebacks.follow(&snapshot.configs, &snapshot.members, begun);
        let gathered = evidence.borrow_and_update().clone();
        let (follows, gathered) = (gathered.is_none(), gathered.unwrap_or_default());
        let snapshot = Snapshot { evidence: gathered, follows, held_back, ..snapshot };
        let (before, changing) = (Arc::clone(&last), unsettled.clone());
        // Compiling for thousands of pods would block the runtime.
        match task::spawn_blocking(move || after(&before, snapshot, changing)).await {
            Ok((plan, other)) => {
                unsettled = other;
                let new = plan.compiled.troubles.iter().filter(|one| !troubles.contains(*one));
                new.for_each(|one| warn!(object = %one.object, problem = %one.message, "refused"));
                troubles.clone_from(&plan.compiled.troubles);
                last = Arc::new(plan);
                plans.send_replace(Some(Arc::clone(&last)));
            }
            Err(error) => error!(%error, "compiling failed; the last plan stays"),
        }
        let backoff = Backoff::after(begun, Instant::now(), 1);
        tokio::select! {
            outcome = changes.changed() => {
                if outcome.is_err() {
                    return;
                }
            }
            () = proved(&mut evidence) => {}
            () = sleep_until(due) => {}
        }
        let gather = if last.moves() { GATHER_MOVING } else { GATHER };
        time::sleep_until(backoff.until(Instant::now() + gather)).await;
    }
}

/// For ever, if there is no such moment.
async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Waits until more is proved; for ever, if nobody gathers that.
async fn proved(evidence: &mut watch::Receiver<LeadersEvidence>) {
    if evidence.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The plan that follows `last`, and the namespaces in which it is another one. Those in which `last` was are compiled
/// anew, too: what follows may depend on the policies of before.
fn after(last: &Plan, snapshot: Snapshot, unsettled: BTreeSet<String>) -> (Plan, BTreeSet<String>) {
    let changed = Changed::between(&last.snapshot, &snapshot);
    let mut namespaces = changed.namespaces(|| &last.snapshot.all_namespaces() | &snapshot.all_namespaces());
    namespaces.extend(unsettled);
    let part = snapshot.part(&namespaces);
    let world = part.world(snapshot.world());
    let new = compile::compile(world, last.sendable());
    let mut compiled = last.compiled.clone();
    let mut unsettled = Changed::default();
    unsettled.compare_compiled(&compiled.take(&namespaces), &new);
    compiled.add(new);
    (planned(snapshot, compiled, last.sendable()), unsettled.namespaces(BTreeSet::new))
}

/// `before` are the policies that proxies were sent last.
pub fn of(snapshot: Snapshot, before: &PoliciesByPod) -> Plan {
    let compiled = compile::compile(snapshot.world(), before);
    planned(snapshot, compiled, before)
}

fn planned(snapshot: Snapshot, compiled: Compiled, before: &PoliciesByPod) -> Plan {
    let waits = compiled.operators.values().any(|record| !record.written);
    let sendable = waits.then(|| compile::sendable(&compiled, before));
    Plan { snapshot: Arc::new(snapshot), compiled, sendable }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a, namespace: ops}\n\
        spec: {selector: {matchLabels: {app: a}}, limits: [{selector: {matchLabels: {team: a}}}]}\n---\n\
        apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: ops, annotations: {ctrlmesh.kusionstack.io/injected: 'true'}, \
        labels: {app: a, ctrlmesh.kusionstack.io/enable-proxy: 'true'}}\nspec: {containers: []}\n";

    #[test]
    fn only_written_policies_are_sent_and_others_are_awaited() {
        let snapshot = Snapshot::of_manifests(CONFIG);
        let nothing = PoliciesByPod::new();
        let first = of(snapshot.clone(), &nothing);
        assert!(first.waits() && first.sendable().is_empty() && first.compiled.policies.len() == 1);
        let record = &first.compiled.operators["ops/a"];
        let mut written = snapshot;
        written.configs[0].status = Some(ctrlmesh_common::api::ShardingConfigStatus {
            epoch: i64::try_from(record.epoch).ok(),
            policy_digest: Some(record.policy_digest.clone()),
            ..Default::default()
        });
        let second = of(written.clone(), first.sendable());
        assert!(!second.waits() && *second.sendable() == second.compiled.policies);
        assert_eq!(*second.sendable(), compile::sendable(&second.compiled, first.sendable()));
        // The former policy stays until the new one is written.
        let other = Snapshot::of_manifests(&CONFIG.replace("team: a", "team: b"));
        written.configs[0].spec = other.configs[0].spec.clone();
        let third = of(written.clone(), second.sendable());
        assert!(third.waits() && third.sendable() == second.sendable());
        assert_ne!(*third.sendable(), third.compiled.policies);
        // A deleted config is not written, and nothing waits for it.
        let meta = &mut written.configs[0].metadata;
        meta.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
        let last = of(written, second.sendable());
        assert!(!last.waits() && last.sendable() == second.sendable());
    }

    /// Roots with pods in several namespaces, some of which share a name.
    fn cluster(of: impl Fn(usize) -> String) -> Snapshot {
        let text = |at: usize| {
            let namespace = format!("ops-{at}");
            CONFIG.replace("namespace: ops", &format!("namespace: {namespace}")) + "---\n" + &of(at)
        };
        Snapshot::of_manifests(&(0..4).map(text).collect::<Vec<_>>().join("---\n"))
    }

    #[test]
    fn what_changes_in_a_namespace_is_compiled_as_everything_would_be() {
        let breaker = |at: usize, limit: u32| {
            format!(
                "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: CircuitBreaker\n\
                 metadata: {{name: b, namespace: ops-{at}}}\n\
                 spec: {{selector: {{matchLabels: {{app: a}}}}, rateLimitings: [{{name: r, \
                 resourceRules: [{{verbs: ['*'], apiGroups: ['*'], resources: ['*'], namespaces: ['*']}}], \
                 bucket: {{burst: {limit}, interval: 1s, limit: {limit}}}, triggerPolicy: Normal}}]}}\n"
            )
        };
        let mut written = cluster(|at| breaker(at, 5));
        let without_last = {
            let mut less = cluster(|at| breaker(at, 6));
            less.members.pop();
            less
        };
        let mut other = cluster(|at| breaker(at, if at == 2 { 7 } else { 6 }));
        other.configs[1].spec.selector = None;
        let mut whole = of(written.clone(), &PoliciesByPod::new());
        for config in &mut written.configs {
            let record = &whole.compiled.operators[&full_name(&config.metadata)];
            config.status = Some(ctrlmesh_common::api::ShardingConfigStatus {
                epoch: i64::try_from(record.epoch).ok(),
                policy_digest: Some(record.policy_digest.clone()),
                ..Default::default()
            });
        }
        let held_back = Snapshot { held_back: [written.members[0].uid.clone()].into(), ..written.clone() };
        let (mut part, mut unsettled) = after(&Plan::default(), cluster(|at| breaker(at, 5)), BTreeSet::new());
        assert_eq!(part.compiled, whole.compiled);
        assert_eq!(unsettled.len(), 4, "nothing was known before");
        for (number, next) in
            [written.clone(), written.clone(), other, held_back, without_last, written].into_iter().enumerate()
        {
            whole = of(next.clone(), whole.sendable());
            (part, unsettled) = after(&part, next, unsettled);
            assert_eq!((&part.compiled, part.sendable()), (&whole.compiled, whole.sendable()), "{number}");
            assert_eq!(unsettled.is_empty(), number == 1, "{number}: {unsettled:?}");
        }
    }

    #[test]
    fn only_namespaces_in_which_something_changes_are_compiled_again() {
        let mut now = cluster(|_| String::new());
        let (mut part, mut unsettled) = after(&Plan::default(), now.clone(), BTreeSet::new());
        for (changed, expected) in [(None, None), (Some(1), Some("ops-1")), (Some(2), Some("ops-2")), (None, None)] {
            if let Some(at) = changed {
                now.configs[at].metadata.resource_version = Some("7".to_owned());
            }
            (part, unsettled) = after(&part, now.clone(), unsettled);
            assert_eq!(unsettled, expected.into_iter().map(str::to_owned).collect(), "{changed:?}");
        }
    }

    #[test]
    fn nothing_is_left_of_a_namespace_that_goes_while_another_one_comes() {
        let before = cluster(|_| String::new());
        let (part, _) = after(&Plan::default(), before.clone(), BTreeSet::new());
        let mut less = before;
        less.configs.pop();
        less.members.retain(|pod| pod.name.namespace != "ops-3");
        less.namespaces.insert("shop".to_owned());
        let (part, _) = after(&part, less.clone(), BTreeSet::new());
        assert_eq!(part.compiled, of(less, &PoliciesByPod::new()).compiled);
    }
}
