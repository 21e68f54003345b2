//! What every endpoint of the API server has shown.

use std::net::Ipv4Addr;
use std::sync::mpsc;

use anyhow::Result;
use ctrlmesh_manager::ownership::fence_state::{FenceState, Unfenced};
use ctrlmesh_testbed::{ControlPlane, Network, Options, skipped};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::task;
use xtask::tools;

use crate::bed;

#[tokio::test]
async fn what_is_proved_follows_the_table() -> Result<()> {
    let bed = bed::shared().await?;
    let operator = bed.operator().await?;
    for epoch in 2..12 {
        let owner = if epoch % 2 == 0 { "op-2-normal" } else { "op-1-normal" };
        bed.write_table(&operator, epoch, json!({"slots": {"7": owner}})).await?;
        bed.enforced(&operator, epoch).await?;
    }
    Ok(())
}

/// Of how many endpoints there is a proof of this epoch.
fn endpoints(state: Option<&FenceState>, epoch: u64) -> Option<usize> {
    match state {
        Some(FenceState::Enforced(proof)) if proof.epoch == epoch => Some(proof.endpoints),
        _ => None,
    }
}

#[tokio::test]
async fn an_endpoint_that_shows_nothing_is_waited_for() -> Result<()> {
    let addresses = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
    let network = match Network::make(&addresses) {
        Ok(network) => network,
        Err(error) if tools::on_path("ip") => return Err(error),
        Err(error) => return Ok(skipped("an_endpoint_that_shows_nothing_is_waited_for", &format!("{error:#}"))?),
    };
    let _entered = network.enter()?;
    let mut plane = ControlPlane::start(&Options { addresses: addresses.to_vec(), ..Options::default() })?;
    let bed = bed::of_several(&plane).await?;
    let operator = bed.operator().await?;
    bed.state(&operator, |state| endpoints(state, 1) == Some(2)).await?;
    let (down, is_down) = oneshot::channel();
    let (start, started) = mpsc::channel::<()>();
    let restarted = task::spawn_blocking(move || {
        plane.restart_apiserver_of(1, || {
            // Whoever waits may have failed.
            let _ended = (down.send(()), started.recv());
            Ok(())
        })?;
        anyhow::Ok(plane)
    });
    is_down.await?;
    bed.write_table(&operator, 2, json!({"slots": {"7": "op-2-normal"}})).await?;
    // The other server has it, and that is not enough, until the Service does not name this one any more.
    let known = |state: Option<&FenceState>| {
        assert_ne!(endpoints(state, 2), Some(2));
        let is_open = matches!(state, Some(FenceState::Open(Unfenced::NotProved { .. })));
        is_open || endpoints(state, 2) == Some(1)
    };
    bed.state(&operator, known).await?;
    start.send(())?;
    let _plane = restarted.await??;
    bed.state(&operator, |state| endpoints(state, 2) == Some(2)).await?;
    Ok(())
}
