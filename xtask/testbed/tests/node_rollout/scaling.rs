//! Shares that follow the pods of a Deployment that a `HorizontalPodAutoscaler` scales.

use std::io::{Write as _, stderr};
use std::time::Instant;

use anyhow::Result;
use ctrlmesh_runtime::sync::read;
use serde_json::Value;

use crate::bed::{self, Kind, MANAGERS, Operator, REPLICAS};
use crate::elastic::BUSY;
use crate::mesh::{operator, until};
use crate::metrics_server::{MetricsServer, autoscaler};

/// What the autoscaler may have at most.
const MOST: usize = 6;

/// What so many pods use together: less than 100 millicores each, which the autoscaler is content with.
fn millicores(pods: usize) -> Result<u32> {
    Ok(u32::try_from(pods)? * 100 - 5)
}

impl Operator<'_> {
    /// Waits until the autoscaler has scaled it to so many pods, all are there, and all slots are theirs, evenly.
    fn scaled_to(self, replicas: usize) -> Result<()> {
        let begun = Instant::now();
        let wanted = replicas.to_string();
        let target = self.target();
        let asked = ["get", &target, "--output=jsonpath={.spec.replicas}"];
        until("the autoscaler to scale", || Ok(self.space.kubectl(&asked).ok().filter(|found| *found == wanted)))?;
        let scaled = begun.elapsed();
        self.rolled_out()?;
        let (_, pods) = self.owned_by_pods(replicas)?;
        operator::none_restarted(&pods)?;
        let even = begun.elapsed();
        writeln!(stderr(), "{replicas} pods: asked for after {scaled:?}, shares are even after {even:?}")?;
        Ok(())
    }
}

#[test]
fn shares_follow_an_autoscaler() -> Result<()> {
    let _managers = read(&MANAGERS);
    let cluster = bed::cluster();
    cluster.case("scaled", |space| {
        let operator = Operator { space, kind: Kind::Deployment, good: BUSY, is_elastic: true };
        operator.deploy(&Value::Null)?;
        let metrics = MetricsServer::start(cluster, space.name(), millicores(REPLICAS)?)?;
        autoscaler(space, MOST)?;
        for replicas in [5, 2, REPLICAS] {
            metrics.use_cpu(millicores(replicas)?);
            operator.scaled_to(replicas)?;
        }
        // It goes before its metrics, and before the pods do.
        space.kubectl(&["delete", "horizontalpodautoscaler", operator::NAME])?;
        drop(metrics);
        operator.witnessed()?;
        operator.remove()
    })
}
