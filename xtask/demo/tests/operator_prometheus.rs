//! The steps with prometheus-operator, which has no lock.

use anyhow::Result;
use ctrlmesh_demo::steps::{ADDED, CANARY, END, LEAVE, PROXY, REFERENCE, ROLLOUT, SHARDS};
use ctrlmesh_demo::work::Work;

mod stage;

#[test]
fn three_shards_of_prometheus_operator_do_what_one_replica_does() -> Result<()> {
    let steps = [REFERENCE, SHARDS, CANARY, PROXY, ROLLOUT, ADDED, END, LEAVE];
    stage::play(Work::Prometheuses, 60, &steps)
}
