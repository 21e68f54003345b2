//! Restarts all operators at once, and measures until everything is owned evenly again.

use std::time::Duration;

use tokio::time::{self, Instant};

use crate::cluster::Cluster;
use crate::simulated::processor::Spent;
use crate::{LOOK_EVERY, MANAGER, PATIENCE};

/// How often it is told how far it is.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// What a rolling restart cost.
#[derive(Clone, Debug, Default)]
pub(crate) struct Restart {
    /// Until new pods own everything, evenly.
    pub(crate) took: Duration,
    /// Processor time of the manager meanwhile.
    pub(crate) manager: Duration,
    /// The same of all programs.
    pub(crate) spent: Spent,
    /// The most memory that the manager had.
    pub(crate) kilobytes: u64,
}

/// Restarts all pods.
pub(crate) async fn measure(cluster: &Cluster) -> Restart {
    let (begun, before) = (Instant::now(), Spent::now());
    let ((), kilobytes) = tokio::join!(cluster.restart_all(1), until_even(cluster, 1));
    let took = begun.elapsed();
    let spent = Spent::now().since(&before);
    Restart { took, manager: spent.of(MANAGER), spent, kilobytes }
}

/// Waits until the pods of all operators are of this round, and own everything, evenly. Returns the most memory that
/// the manager had meanwhile.
///
/// # Panics
/// Where two pods hold the same, or nothing happens for long.
pub(crate) async fn until_even(cluster: &Cluster, round: u32) -> u64 {
    let (mut most, mut kilobytes) = ((0, 0), 0);
    let (mut moved_at, mut told_at) = (Instant::now(), Instant::now());
    loop {
        cluster.operators.assert_no_violation();
        kilobytes = cluster.manager.resident_kilobytes().unwrap().max(kilobytes);
        let even = cluster.operators.even(round);
        if even == cluster.operators.count() {
            return kilobytes;
        }
        // Each operator restarts its pods one by one, so that the first one is done late.
        let ready = cluster.operators.ready(round);
        if (even, ready) > most {
            (most, moved_at) = ((even, ready), Instant::now());
        }
        if told_at.elapsed() > TELL_EVERY {
            told_at = Instant::now();
            eprintln!("{even} of {} operators are even; {ready} pods are ready", cluster.operators.count());
        }
        let log = || cluster.manager.log().lines().rev().take(20).collect::<Vec<_>>().join("\n");
        assert!(moved_at.elapsed() < PATIENCE, "{even} operators are even, and no more come:\n{}", log());
        time::sleep(LOOK_EVERY).await;
    }
}
