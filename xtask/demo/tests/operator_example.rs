//! An ordinary operator of controller-runtime, with a lock: once alone, then three replicas in shards, while everything
//! dies that can.

use anyhow::Result;
use ctrlmesh_demo::steps::{
    ADDED, CANARY, END, MANAGER, PROXY, REFERENCE, REPLICA, ROLLOUT, SHARDS,
};
use ctrlmesh_demo::work::Work;

mod stage;

#[test]
fn in_shards_the_operator_does_what_one_replica_does_alone_and_nothing_twice_whatever_dies()
-> Result<()> {
    let steps = [REFERENCE, SHARDS, CANARY, PROXY, ROLLOUT, MANAGER, REPLICA, ADDED, END];
    stage::play(Work::Websites, 60, &steps)
}
