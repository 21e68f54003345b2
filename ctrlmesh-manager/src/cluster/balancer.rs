//! Divides elastic roots by load, while this replica leads.
//!
//! Once in an interval it measures the load of each root with `balance: Load`, decides what moves, and hands that to
//! the cache. The next plan wants it, and the status says so from then on. Nothing is decided while something moves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::ownership::{Ownership, UNSHARDED};
use ctrlmesh_common::slots::Slot;
use ctrlmesh_common::wire::Traffic;
use tokio::time::{self, Instant};
use tracing::info;

use crate::cluster::cache::Cache;
use crate::cluster::load_meter::LoadMeter;
use crate::leader::lease::Leadership;
use crate::rules::balance::{self, RootLoad, RootLoads, SlotOwners};
use crate::rules::shard::Versions;

/// Between two looks at least.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

/// Over how many intervals a load is measured.
const INTERVALS: u32 = 5;

/// The same at least: proxies report every 10 s.
const SHORTEST_WINDOW: Duration = Duration::from_secs(30);

pub struct Balancer<Reports> {
    pub cache: Arc<Cache>,
    /// What proxies that are connected have reported last, by the UID of the pod. One that is not would seem idle, and
    /// get more.
    pub reports: Reports,
    /// Between two looks.
    pub interval: Duration,
    pub leadership: Leadership,
}

/// A root that is divided by load.
struct Root {
    /// What its status wants.
    wanted: SlotOwners,
    /// UIDs of the pods that write.
    pods: Vec<String>,
    /// Whether everything is where it is wanted.
    is_settled: bool,
}

impl<Reports: Fn() -> BTreeMap<String, Traffic> + Send + Sync> Balancer<Reports> {
    pub async fn run(self) {
        let unknown = || self.cache.take_loads(RootLoads::new());
        self.leadership.clone().while_held(|| self.lead(), unknown).await;
    }

    async fn lead(&self) {
        let interval = self.interval.max(SHORTEST_INTERVAL);
        let mut meter = LoadMeter::new(interval.saturating_mul(INTERVALS).max(SHORTEST_WINDOW));
        let mut ticks = time::interval(interval);
        ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let mut last = RootLoads::new();
        loop {
            ticks.tick().await;
            meter.observe(&(self.reports)(), Instant::now());
            let roots = self.cache.in_configs(root);
            last = loads(&roots, &meter, &last);
            self.cache.take_loads(last.clone());
        }
    }
}

/// What is known now. A decision that is not written yet stays.
fn loads(roots: &BTreeMap<String, Root>, meter: &LoadMeter, last: &RootLoads) -> RootLoads {
    let load = |(name, root): (&String, &Root)| {
        let last = last.get(name);
        let pending = last.and_then(|load| load.decision.clone());
        let pending = pending.filter(|pending| pending.base == root.wanted);
        let Some(measured) = meter.measured(&root.pods.iter().collect::<BTreeSet<_>>()) else {
            return last.filter(|_| pending.is_some()).map(|load| (name.clone(), load.clone()));
        };
        let decided = || {
            let decision = balance::decide(&root.wanted, &measured).filter(|_| root.is_settled)?;
            let moves = decision.next.iter().filter(|(slot, owner)| decision.base.get(*slot) != Some(*owner));
            let moves: Vec<String> = moves.map(|(slot, owner)| format!("{slot} to {owner}")).collect();
            info!(root = name, moves = moves.join(", "), "slots move because of their load");
            Some(decision)
        };
        Some((name.clone(), RootLoad { rates: measured.rates.clone(), decision: pending.or_else(decided) }))
    };
    roots.iter().filter_map(load).collect()
}

/// `None`: it is no root, or one that is not divided by load now.
fn root(config: &ShardingConfig) -> Option<Root> {
    let rule = config.spec.root.as_ref().filter(|rule| rule.balances_by_load() && rule.disable != Some(true))?;
    let status = config.status.as_ref().filter(|_| config.metadata.deletion_timestamp.is_none())?;
    let (table, wanted) = (status.ownership.as_ref()?, &status.wanted);
    let owners: BTreeSet<&String> = wanted.values().collect();
    let writes = |(uid, owner): (&String, &String)| owners.contains(owner).then(|| uid.clone());
    let is_followed = rule.rollout.is_none() || Versions::of(config).trial().is_none();
    Some(Root {
        wanted: wanted.clone(),
        pods: table.pod_uids.iter().filter_map(writes).collect(),
        is_settled: is_followed && is_settled(table, wanted),
    })
}

/// Whether nothing moves, and pods that are not enrolled have nothing.
fn is_settled(table: &Ownership, wanted: &SlotOwners) -> bool {
    let is_there = |(slot, owner): (&Slot, &String)| table.slots.get(slot) == Some(owner) && owner != UNSHARDED;
    table.revoked.is_none() && wanted.iter().all(is_there)
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::ownership::Revoked;
    use ctrlmesh_common::slots::SlotSet;
    use ctrlmesh_common::wire::SlotLoad;
    use serde_json::json;

    use super::*;

    const MINUTE: Duration = Duration::from_mins(1);

    /// Two shards by turns, each with a pod.
    fn config() -> ShardingConfig {
        let owner = |slot: Slot| if slot.number().is_multiple_of(2) { "op-1-normal" } else { "op-2-normal" };
        let slots: SlotOwners = SlotSet::ALL.iter().map(|slot| (slot, owner(slot).to_owned())).collect();
        serde_json::from_value(json!({
            "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"namespace": "ops", "name": "op"},
            "spec": {"root": {"prefix": "op", "targetStatefulSet": "op",
                "auto": {"shardingSize": 4, "balance": "Load"}}},
            "status": {"wanted": slots, "ownership": {"epoch": 3, "slots": slots,
                "podUids": {"a": "op-1-normal", "b": "op-2-normal", "c": "standby"}}},
        }))
        .unwrap()
    }

    /// The pods have been observed for long: the first has three times the requests of the other.
    fn meter() -> LoadMeter {
        let mut meter = LoadMeter::new(5 * MINUTE);
        let start = Instant::now();
        for minute in 0..=5_u32 {
            let load = |first: u32, each: u64| {
                let requests = u64::from(minute) * each;
                let slots = (first..32).step_by(2).map(|slot| SlotLoad { slot, requests }).collect();
                Traffic { since: 1, slots, ..Traffic::default() }
            };
            let reports = [("a".to_owned(), load(0, 30)), ("b".to_owned(), load(1, 10))].into();
            meter.observe(&reports, start + minute * MINUTE);
        }
        meter
    }

    fn loads_of(config: &ShardingConfig, last: &RootLoads) -> RootLoads {
        let roots = root(config).map(|root| ("ops/op".to_owned(), root));
        loads(&roots.into_iter().collect(), &meter(), last)
    }

    #[test]
    fn a_decision_stays_until_it_is_written() {
        let mut config = config();
        let decided = loads_of(&config, &RootLoads::new());
        let decision = decided["ops/op"].decision.clone().unwrap();
        assert_eq!(loads_of(&config, &decided), decided);
        // A proxy has begun anew.
        let roots = || [("ops/op".to_owned(), root(&config).unwrap())].into();
        assert_eq!(loads(&roots(), &LoadMeter::new(MINUTE), &decided), decided);
        assert_eq!(loads(&roots(), &LoadMeter::new(MINUTE), &RootLoads::new()), RootLoads::new());
        // Its table is on its way.
        config.status.as_mut().unwrap().wanted.clone_from(&decision.next);
        assert_eq!(loads_of(&config, &decided)["ops/op"].decision, None);
        // It has come: the next look may decide again.
        config.status.as_mut().unwrap().ownership.as_mut().unwrap().slots = decision.next;
        assert_ne!(loads_of(&config, &decided)["ops/op"].decision, decided["ops/op"].decision);
    }

    #[test]
    fn nothing_is_decided_while_something_moves() {
        let is_decided = |change: fn(&mut ShardingConfig)| {
            let mut config = config();
            change(&mut config);
            loads_of(&config, &RootLoads::new()).get("ops/op").is_some_and(|load| load.decision.is_some())
        };
        assert!(is_decided(|_| {}));
        assert!(!is_decided(|config| {
            let table = config.status.as_mut().unwrap().ownership.as_mut().unwrap();
            table.revoked = Some(Revoked::default());
        }));
        assert!(!is_decided(|config| {
            let table = config.status.as_mut().unwrap().ownership.as_mut().unwrap();
            table.pod_uids.insert("d".to_owned(), "op-1-normal".to_owned());
        }));
        assert!(!is_decided(|config| config.spec.root.as_mut().unwrap().auto.as_mut().unwrap().balance = None));
        assert!(!is_decided(|config| config.status.as_mut().unwrap().wanted.clear()));
    }
}
