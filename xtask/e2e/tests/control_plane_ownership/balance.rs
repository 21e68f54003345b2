//! Shares that are kept even by load: one namespace has half of all work.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::shares::are_even;
use serde_json::json;

use crate::bed::{Bed, teams};
use crate::load::Load;
use crate::moves::UNOWNED;
use crate::pods;

/// The namespace with half of all work.
const BUSY: &str = "team-0";

const PODS: u16 = 4;

/// It works on what changes, and on nothing else: so the load is that of the changes.
const CACHED: [&str; 1] = ["--leader-elect=false"];

/// How much the slots of an owner have to do: the busy namespace as much as all others together.
fn loads(table: &Ownership) -> BTreeMap<&str, usize> {
    let others = teams().count() - 1;
    let mut loads: BTreeMap<&str, usize> = table.slots.values().map(|owner| (owner.as_str(), 0)).collect();
    for team in teams() {
        let owner = table.owner(NamespaceHash::default().slot(&team), Some(&team)).unwrap_or_default();
        *loads.entry(owner).or_default() += if team == BUSY { others } else { 1 };
    }
    loads
}

/// The namespaces that have the owner of the busy one, but not its slot.
fn beside_busy(table: &Ownership) -> BTreeSet<String> {
    let hash = NamespaceHash::default();
    let owner = |team: &str| table.owner(hash.slot(team), Some(team));
    teams().filter(|team| owner(team) == owner(BUSY) && hash.slot(team) != hash.slot(BUSY)).collect()
}

/// Whether the busiest shard is within 1.3 times the mean. That of the busy slot may have more if it has nothing else.
fn is_balanced(table: &Ownership) -> bool {
    let loads = loads(table);
    let busy = table.owner(NamespaceHash::default().slot(BUSY), Some(BUSY)).unwrap_or_default();
    let all: usize = loads.values().sum();
    let is_within = |load: &usize| load * loads.len() * 10 <= all * 13;
    let others = loads.iter().filter(|(owner, _)| **owner != busy);
    let is_alone = beside_busy(table).is_empty();
    loads.len() == usize::from(PODS)
        && others.map(|(_, load)| load).all(is_within)
        && (is_alone || loads.get(busy).is_some_and(is_within))
}

#[tokio::test]
async fn one_busy_namespace_leaves_the_rest_to_the_others() -> Result<()> {
    let test = "one_busy_namespace_leaves_the_rest_to_the_others";
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    pods::workload(&bed, usize::from(PODS), true).await?;
    bed.root(&json!({"fence": "Server", "auto": {"shardingSize": 8, "balance": "Load"}})).await?;
    for number in 0..PODS {
        bed.start_pod(number, true, &CACHED).await?;
    }
    let before = bed.settled(|table| are_even(table, usize::from(PODS))).await?;
    ensure!(!is_balanced(&before), "nothing would have to move: {before:?}");
    let load = Load::skewed(&bed, BUSY);
    let after = bed.settled(is_balanced).await?;
    eprintln!("loads before: {:?}, after: {:?}", loads(&before), loads(&after));
    ensure!(loads(&after).values().all(|load| *load > 0), "each pod works: {after:?}");
    bed.until_written(&teams().collect(), 1).await?;
    bed.verdict(load, UNOWNED).await.map(drop)
}
