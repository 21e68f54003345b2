//! The steps with the example operator (controller-runtime, with a lock).

use anyhow::Result;
use ctrlmesh_demo::steps::{ADDED, BAD, CANARY, END, LEAVE, MANAGER, PROXY, REFERENCE, REPLICA, ROLLOUT, SHARDS, WILD};
use ctrlmesh_demo::work::Work;

mod stage;

#[test]
fn three_shards_of_the_example_do_what_one_replica_does() -> Result<()> {
    let steps = [REFERENCE, SHARDS, CANARY, PROXY, ROLLOUT, MANAGER, REPLICA, ADDED, WILD, BAD, END, LEAVE];
    stage::play(Work::Websites, 60, &steps)
}
