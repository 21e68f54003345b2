//! Shares that follow the pods of a Deployment, and what a killed replica had.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Write as _, stderr};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::SlotSet;
use ctrlmesh_runtime::sync::read;
use ctrlmesh_testbed::{is_full, shares};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::bed::{self, GOOD, Kind, MANAGERS, Operator, PAUSE, REPLICAS};
use crate::mesh::operator::{self, NAME};
use crate::mesh::{self, kill_in, until};
use crate::pods::has;
use crate::promotions::good_version;

/// Writes the status of each website as often: so a new owner writes soon.
pub(crate) const BUSY: &str = "--resync=200ms";

/// How many replicas are killed; a full run kills this many times as many.
const KILLS: usize = 4;
const FULL: usize = 50;

impl Operator<'_> {
    /// Waits until so many shards own all slots, each as many as the others, or one more; all of them with a pod.
    pub(crate) fn even(self, shards: usize) -> Result<Ownership> {
        let mut last = None;
        let found = until("even shares", || {
            last = self.config()?.status.and_then(|status| status.ownership);
            Ok(last.clone().filter(|table| shares::are_even(table, shards)))
        });
        found.with_context(|| format!("expected {shards} shards, the last table: {last:?}"))
    }

    /// The same, once these shards are those of its pods, which are all ready. Returns the pods, too.
    pub(crate) fn owned_by_pods(self, replicas: usize) -> Result<(Ownership, Vec<Value>)> {
        until("its pods to own all slots", || {
            let (table, pods) = (self.even(replicas)?, operator::pods(self.space)?);
            let owners: BTreeSet<&str> = table.slots.values().map(String::as_str).collect();
            let shard = |pod: &Value| table.shard_of(pod["metadata"]["name"].as_str()?);
            let shards: Option<BTreeSet<&str>> = pods.iter().filter(|pod| has(pod, "Ready")).map(shard).collect();
            let is_owned = shards == Some(owners) && pods.len() == replicas;
            Ok(is_owned.then_some((table, pods)))
        })
    }

    /// The first write of another pod than those of `dead` to what these slots have, after `since`.
    pub(crate) fn first_write(self, slots: SlotSet, dead: &[&str], since: Timestamp) -> Result<Timestamp> {
        let namespaces = self.namespaces().into_iter().filter(|(slot, _)| slots.contains(*slot));
        let namespaces: BTreeSet<String> = namespaces.map(|(_, namespace)| namespace).collect();
        until("a write of a new owner", || {
            let requests = mesh::requests(self.space.cluster(), self.space.name(), NAME)?;
            let writes = requests.iter().filter(|one| {
                one.is_write()
                    && one.received > since
                    && (200..300).contains(&one.response_status.code)
                    && namespaces.contains(&one.object.namespace)
                    && mesh::pod_of(one).is_some_and(|pod| !dead.contains(&pod))
            });
            Ok(writes.map(|one| one.at).min())
        })
    }

    /// Waits until the table names no other pods than those that there are. One that ends counts as a writer of its
    /// shard, which may be that of the next one to be killed.
    fn settled(self) -> Result<()> {
        until("a table of pods that exist", || {
            let table = self.even(REPLICAS)?;
            let pods = operator::pods(self.space)?;
            let uids: BTreeSet<&str> = pods.iter().filter_map(|pod| pod["metadata"]["uid"].as_str()).collect();
            let exist = table.pod_uids.keys().all(|uid| uids.contains(uid.as_str()));
            Ok((table.revoked.is_none() && exist).then_some(()))
        })
    }

    /// Kills the operator in a pod. Returns how long it was until another one wrote to what it had, in seconds.
    fn kill_one(self, number: usize) -> Result<f64> {
        let table = self.even(REPLICAS)?;
        let pods = operator::pods(self.space)?;
        ensure!(pods.len() == REPLICAS, "{pods:?}");
        let [name, uid] = ["name", "uid"].map(|field| pods[number % REPLICAS]["metadata"][field].as_str());
        let (name, uid) = (name.context("a name")?, uid.context("a UID")?);
        let shard = table.shard_of(name).context("a pod without a shard")?;
        let slots = owners(&table).remove(shard).context("a shard without slots")?;
        let since = Timestamp::now();
        kill_in(self.space.cluster().node().context("a node")?, uid, "example-operator")?;
        let written = self.first_write(slots, &[name], since)?;
        let took = written.duration_since(since).as_secs_f64();
        writeln!(stderr(), "{name} was killed; the first write of another to what it had came {took:.3} s later")?;
        if number == 0 {
            // It stays, and gets its share back once it has been there for a while.
            self.even(REPLICAS)?;
        } else {
            // Another comes in its place, which is not held back. Not by force: then nobody would see the end of it.
            self.space.kubectl(&["delete", "pod", name, "--grace-period=1"])?;
            self.rolled_out()?;
        }
        self.settled()?;
        Ok(took)
    }
}

/// The slots of each owner.
pub(crate) fn owners(table: &Ownership) -> BTreeMap<String, SlotSet> {
    let mut owners: BTreeMap<String, SlotSet> = BTreeMap::new();
    for (slot, owner) in &table.slots {
        let slots = owners.entry(owner.clone()).or_default();
        *slots = slots.union([*slot].into_iter().collect());
    }
    owners
}

#[test]
fn others_work_on_what_a_killed_replica_had() -> Result<()> {
    let _managers = read(&MANAGERS);
    bed::cluster().case("elastic", |space| {
        let operator = Operator { space, kind: Kind::Deployment, good: BUSY, is_elastic: true };
        operator.deploy(&Value::Null)?;
        for replicas in [5, 2, REPLICAS] {
            space.kubectl(&["scale", &operator.target(), &format!("--replicas={replicas}")])?;
            operator.rolled_out()?;
            operator.even(replicas)?;
        }
        operator::none_restarted(&operator::pods(space)?)?;
        let kills = if is_full() { KILLS * FULL } else { KILLS };
        let mut took: Vec<f64> = (0..kills).map(|number| operator.kill_one(number)).collect::<Result<_>>()?;
        took.sort_by(f64::total_cmp);
        let at =
            |part: usize| took.get((took.len() * part).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default();
        writeln!(stderr(), "{kills} kills: p50 {:.3} s, p99 {:.3} s", at(50), at(99))?;
        operator.witnessed()?;
        operator.remove()
    })
}

/// On trial it owns its slice, while the others follow their pods. Then each new pod takes a pod's part.
#[test]
fn a_new_version_takes_over_pod_by_pod() -> Result<()> {
    let _managers = read(&MANAGERS);
    bed::cluster().case("elastic-new", |space| {
        let operator = Operator { space, kind: Kind::Deployment, good: GOOD, is_elastic: true };
        let step = |field: &str, number: u8| json!({field: number, "pause": PAUSE});
        operator.deploy(&json!([step("slots", 1), step("percent", 25), step("percent", 100)]))?;
        good_version(operator)?;
        operator.even(REPLICAS)?;
        operator.remove()
    })
}
