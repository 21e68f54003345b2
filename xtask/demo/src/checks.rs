//! What has to hold, asked of the audit log and of the objects, not of us.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::label;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::slots::{NamespaceHash, SlotSet};
use jiff::Timestamp;

use crate::audit::Resource;
use crate::ledger::{Activity, Asked, Clash, Ledger};
use crate::observer::{Sampled, since};
use crate::scene::Scene;
use crate::view::Table;

/// How long it may take until everything is as it should be again: the leader-election lock of a replica that was killed
/// runs for 15 s, and others build at the same time.
pub(crate) const WHOLE_WITHIN: Duration = Duration::from_mins(3);

/// Changes every object, each time in another way, and waits until the operator has followed.
pub(crate) fn touched(scene: &Scene) -> Result<String> {
    static TIMES: AtomicU64 = AtomicU64::new(1000);
    changed(scene, TIMES.fetch_add(1, Ordering::Relaxed))
}

/// Makes the change of this number to every object, and waits until the operator has followed.
pub(crate) fn changed(scene: &Scene, number: u64) -> Result<String> {
    let clock = Instant::now();
    let objects = scene.change_all(number)?;
    scene.observer.settle()?;
    scene
        .observer
        .until("every change to be followed", WHOLE_WITHIN, |table| table.pending == 0)?;
    let took = seconds(clock.elapsed());
    Ok(format!("{objects} objects changed, and followed by the operator, in {took}"))
}

/// The objects of work, and those made of them, that `ask` finds in the ledger.
pub(crate) fn clashes(scene: &Scene, ask: impl Fn(&Ledger) -> Vec<Clash>) -> Vec<Clash> {
    scene.observer.both(|world, ledger| {
        let namespaces: BTreeSet<&str> =
            world.work.iter().map(|work| work.namespace.as_str()).collect();
        let mut clashes = ask(ledger);
        clashes.retain(|clash| namespaces.contains(clash.object.namespace.as_str()));
        clashes
    })
}

/// That no object was changed by two replicas, though all could be.
pub(crate) fn steady(scene: &Scene, start: Timestamp) -> Result<String> {
    let span = since(start);
    none("changed by two replicas", &clashes(scene, |ledger| ledger.shared(&span)))?;
    let (writes, objects) = scene.observer.ledger(|ledger| {
        let objects: BTreeSet<_> = ledger.writes(&span).map(|write| &write.object).collect();
        (ledger.writes(&span).count(), objects.len())
    });
    Ok(format!("audit log: {writes} changes of {objects} objects, none by two replicas"))
}

pub(crate) fn none(what: &str, clashes: &[Clash]) -> Result<()> {
    let shown =
        clashes.iter().take(3).map(|clash| format!("\n  {}: {:?}", clash.object, clash.turns));
    ensure!(clashes.is_empty(), "{} objects {what}:{}", clashes.len(), shown.collect::<String>());
    Ok(())
}

/// That every request of the operator since `start` came from an address that is none of its pods'.
pub(crate) fn only_by_proxy(scene: &Scene, start: Timestamp) -> Result<String> {
    let own = scene.addresses()?;
    let requests = scene.observer.ledger(|ledger| {
        ledger
            .requests(&since(start))
            .map(|one| (one.pod.clone(), one.source.clone()))
            .collect::<Vec<_>>()
    });
    let past = requests.iter().find(|(_, source)| own.contains(source));
    ensure!(past.is_none(), "past the proxy: {past:?}");
    ensure!(!requests.is_empty(), "there was no request at all");
    Ok(format!("audit log: {} requests of the operator, 0 past the proxy", requests.len()))
}

/// That no replica has asked for objects of work without the selector of its shard.
pub(crate) fn only_own(scene: &Scene, start: Timestamp) -> Result<String> {
    let divided: Vec<Resource> = scene.work.kinds().iter().map(|kind| kind.resource()).collect();
    let asked: Vec<(String, Asked)> = scene.observer.ledger(|ledger| {
        let of = |(pod, one): (&String, &Activity)| -> Vec<(String, Asked)> {
            one.asked().iter().map(|asked| (pod.clone(), asked.clone())).collect()
        };
        let mut all: Vec<_> = ledger.pods().iter().flat_map(of).collect();
        all.retain(|(_, asked)| asked.at >= start && divided.contains(&asked.resource));
        all
    });
    let is_limited = |selector: &Selector| {
        let mut requirements = selector.requirements().iter();
        requirements.any(|one| [label::SHARDING_HASH, label::NAMESPACE].contains(&one.key()))
    };
    let unlimited =
        asked.iter().find(|(_, asked)| !asked.selector.as_ref().is_some_and(is_limited));
    ensure!(unlimited.is_none(), "without limit: {unlimited:?}");
    ensure!(!asked.is_empty(), "nothing was asked for");
    let count = asked.len();
    Ok(format!("audit log: {count} lists and watches of the work, each with its shard's selector"))
}

/// That each namespace is with the shard that the rule gives its slot to; reckoned here, from its name.
pub(crate) fn landed(scene: &Scene, canary: SlotSet) -> Result<()> {
    let rest = canary.complement().divide(2);
    scene.observer.both(|world, ledger| {
        for work in &world.work {
            let slot = NamespaceHash::Fnv1a.slot(&work.namespace);
            let wanted = match rest.iter().position(|part| part.contains(slot)) {
                Some(at) => format!("share-{}-normal", at + 1),
                None => "share-0-canary".to_owned(),
            };
            let owners: Vec<_> = world.owners(work, ledger).collect();
            let shards: Vec<_> =
                owners.iter().map(|owner| world.pods[*owner].shard.as_deref()).collect();
            ensure!(
                shards == [Some(wanted.as_str())],
                "{}: {owners:?} of {shards:?}, not {wanted}",
                work.namespace
            );
        }
        Ok(())
    })
}

/// That the replicas are those that there were, and none was started again.
pub(crate) fn same_replicas(before: &Table, after: &Table) -> Result<()> {
    let known = |table: &Table| -> BTreeMap<String, u64> {
        table.replicas.iter().map(|(name, one)| (name.clone(), one.restarts)).collect()
    };
    ensure!(known(before) == known(after), "restarts: {:?} -> {:?}", known(before), known(after));
    Ok(())
}

pub(crate) fn shards(table: &Table) -> BTreeSet<&str> {
    table.replicas.values().filter_map(|one| one.shard.as_deref()).collect()
}

/// The replica of a shard, and how many namespaces it has.
pub(crate) fn of_shard(table: &Table, shard: &str) -> Result<(String, usize)> {
    let found = table.replicas.iter().find(|(_, one)| one.shard.as_deref() == Some(shard));
    let (name, one) = found.with_context(|| format!("no replica is of {shard}"))?;
    Ok((name.clone(), one.namespaces))
}

/// The most that was unowned and owned twice, and for how long at most: until we looked next.
pub(crate) fn worst(samples: &[Sampled], when: &str) -> String {
    let unowned = samples.iter().map(|sample| sample.unowned).max().unwrap_or_default();
    let twice = samples.iter().map(|sample| sample.twice).max().unwrap_or_default();
    format!(
        "{when}: at most {unowned} objects without owner{}, {twice} watched by two{}",
        lasted(samples, |sample| sample.unowned > 0),
        lasted(samples, |sample| sample.twice > 0),
    )
}

fn lasted(samples: &[Sampled], is: impl Fn(&Sampled) -> bool) -> String {
    let mut longest = Duration::ZERO;
    let mut begun: Option<Timestamp> = None;
    for sample in samples {
        if let Some(begun) = begun {
            let length = sample.at.duration_since(begun).try_into().unwrap_or_default();
            longest = longest.max(length);
        }
        begun = is(sample).then(|| begun.unwrap_or(sample.at));
    }
    if longest.is_zero() { String::new() } else { format!(" (for less than {})", seconds(longest)) }
}

pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

pub(crate) fn count(number: usize, one: &str, several: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {several}") }
}
