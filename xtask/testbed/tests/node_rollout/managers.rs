//! Managers are killed while a version is tried.

use std::io::{Write as _, stderr};

use anyhow::{Context as _, Result};
use ctrlmesh_runtime::sync::write;
use serde_json::Value;

use crate::bed::{self, Kind, MANAGERS, NEXT, Operator, REPLICAS};
use crate::mesh::{self, in_ours};
use crate::promotions::{is_in, promoted};

/// How long a step lasts here: managers need some of it to start.
const PAUSE: &str = "15s";

#[test]
fn a_manager_that_is_killed_goes_on_where_it_was() -> Result<()> {
    if !bed::runs_in_full("a_manager_that_is_killed_goes_on_where_it_was")? {
        return Ok(());
    }
    let _managers = write(&MANAGERS);
    bed::case("managers", Kind::Deployment, PAUSE, |operator| {
        operator.change(&[NEXT])?;
        let revision = operator.revision()?;
        for step in 1..=3 {
            operator.until_rollout("the next step", |status| is_in(status, &revision, step))?;
            kill(operator, step)?;
        }
        promoted(operator, &revision, REPLICAS)?;
        mesh::ready(operator.space.cluster())
    })
}

/// Deletes the manager that leads; in the second step all of them.
fn kill(operator: Operator<'_>, step: i32) -> Result<()> {
    let cluster = operator.space.cluster();
    let pods = ["delete", "pod", "--grace-period=1", "--wait=false"];
    if step == 2 {
        let all = "--selector=app.kubernetes.io/name=ctrlmesh-manager";
        return in_ours(cluster, &[&pods[..], &[all]].concat()).map(drop);
    }
    let lease: Value = mesh::json(cluster, &["--namespace", mesh::NAMESPACE, "get", "lease", "ctrlmesh-manager"])?;
    // The pod's name, and a part that is of its process.
    let holder = lease["spec"]["holderIdentity"].as_str().and_then(|holder| holder.split('_').next());
    let holder = holder.context("a leader")?;
    writeln!(stderr(), "step {step}: {holder} led, and is killed")?;
    in_ours(cluster, &[&pods[..], &[holder]].concat()).map(drop)
}
