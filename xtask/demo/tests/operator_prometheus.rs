//! prometheus-operator, which we did not write and which has no lock: once alone, then three replicas in shards.

use anyhow::Result;
use ctrlmesh_demo::steps::{ADDED, CANARY, END, PROXY, REFERENCE, ROLLOUT, SHARDS};
use ctrlmesh_demo::work::Work;

mod stage;

#[test]
fn in_shards_prometheus_operator_does_what_one_replica_does_alone_and_nothing_twice() -> Result<()>
{
    let steps = [REFERENCE, SHARDS, CANARY, PROXY, ROLLOUT, ADDED, END];
    stage::play(Work::Prometheuses, 60, &steps)
}
