//! The steps of the demo: what each does, and what has to hold meanwhile.
//!
//! Each step does something, waits until the table is whole again, and then asks the audit log whether anything
//! happened that must not. It gives what it saw, or says what did not hold.

use anyhow::Result;
use ctrlmesh_common::slots::{NamespaceHash, SlotSet};
use serde_json::{Value, json};

use crate::environment::Environment;
use crate::install;
use crate::rules::third;

mod failures;
mod share;

mod elastic;
mod enrolment;
mod guard;
mod upgrade;

/// How many of the first namespaces a change of the rule moves.
const MOVED: usize = 20;

/// A step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// What is done.
    pub title: &'static str,
    /// What has to hold.
    pub promise: &'static str,
    /// Does it and looks; gives what was seen.
    pub run: fn(&Environment) -> Result<Vec<String>>,
}

/// One replica alone; what it makes is what is compared with later.
pub const REFERENCE: Step = Step {
    title: "an ordinary operator, without us",
    promise: "one replica does all the work; others, where it has a lock, stand by",
    run: share::unsharded,
};

/// From one replica to three.
pub const SHARDS: Step = Step {
    title: "a root ShardingConfig and one label: shards appear",
    promise: "a rolling update under load: three replicas each work on a third, and none gets past the proxy; each object \
              changes hands once, from the unsharded leader to its shard's replica",
    run: enrolment::sharded,
};

/// The rule changes.
pub const CANARY: Step = Step {
    title: "a canary slice moves to replica 0",
    promise: "no restart; no object missed; the old owner changes nothing after the new one",
    run: share::canary,
};

/// The node proxy dies.
pub const PROXY: Step = Step {
    title: "the node proxy is killed and comes back",
    promise: "no replica restarts, and none reaches the API server past the proxy",
    run: failures::proxy_killed,
};

/// The manager dies.
pub const MANAGER: Step = Step {
    title: "the manager is killed and stays away",
    promise: "every replica goes on with its share",
    run: failures::manager_killed,
};

/// A replica dies.
pub const REPLICA: Step = Step {
    title: "a replica is killed",
    promise: "the standby of its shard takes over; the replicas of the other shards do not restart",
    run: failures::replica_killed,
};

/// There is more to do.
pub const ADDED: Step = Step {
    title: "namespaces are added",
    promise: "each lands with the replica whose slots it falls into, and with no other",
    run: share::added,
};

/// A replica runs wild.
pub const WILD: Step = Step {
    title: "a replica runs wild: it deletes what it has made",
    promise: "a CircuitBreaker stops it at 2 % of its share; the others work on; a reset lets it go on",
    run: guard::wild,
};

/// A bad version of the operator comes.
pub const BAD: Step = Step {
    title: "a bad version is rolled out, and nobody notices",
    promise: "under load: it deletes what the old version has made, in dry runs only; it is found out and taken back, and the \
              old replicas do not restart",
    run: upgrade::upgraded,
};

/// A newer version of an operator that is not ours comes.
pub const NEWER: Step = Step {
    title: "a newer version is rolled out",
    promise: "under load: it goes through all steps, from a shadow on, and is promoted",
    run: upgrade::newer,
};

/// Proxies and manager are replaced.
pub const ROLLOUT: Step = Step {
    title: "proxies and manager are restarted, one after the other, under load",
    promise: "no replica restarts, none reaches the API server past the proxy, no object has two owners",
    run: failures::rolled,
};

/// What came of it all.
pub const END: Step = Step {
    title: "everything is set back to what it was at first",
    promise: "the end state is what one replica alone has made",
    run: share::end_state,
};

/// Replicas come and go.
pub const ELASTIC: Step = Step {
    title: "the operator is scaled to five replicas, and to two",
    promise: "under load: the shares follow, each as large as the others; no replica that stays restarts, and no object has \
              two owners",
    run: elastic::followed,
};

/// The operator is as it was before.
pub const LEAVE: Step = Step {
    title: "the label goes, and then the root: the operator leaves",
    promise: "a rolling update under load: each object changes hands once, from its shard's replica to the unsharded leader",
    run: enrolment::left,
};

/// The steps of the demo.
pub const DEMO: [Step; 11] = [REFERENCE, SHARDS, CANARY, PROXY, MANAGER, REPLICA, ADDED, WILD, BAD, END, ELASTIC];

/// The names of all namespaces that the steps make, where there are so many at first.
pub fn namespaces(first: usize) -> Vec<String> {
    (0..first + share::ADDED).map(install::namespace).collect()
}

/// The slots of the canary later: as many more as have [`MOVED`] of the namespaces that there are at first.
fn later(environment: &Environment) -> SlotSet {
    let mut slots = third();
    for slot in slots.complement().iter() {
        let first = (0..environment.namespaces).map(|number| NamespaceHash::Fnv1a.slot(&install::namespace(number)));
        let moved = first.filter(|slot| slots.contains(*slot) && !third().contains(*slot)).count();
        // The others have to be left with something.
        if moved >= MOVED || slots.len() + 2 >= SlotSet::ALL.len() {
            break;
        }
        slots = slots.union([slot].into_iter().collect());
    }
    slots
}

/// Three shards, each of one replica: the canary has `slots`, the others share the rest.
fn rule(slots: SlotSet) -> Value {
    let slots: Vec<String> = slots.iter().map(|slot| slot.to_string()).collect();
    json!({"canary": {"replicas": 1, "inShardHash": slots}, "auto": {"shardingSize": 2, "everyShardReplicas": 1}})
}
