//! Handovers under load, while processes are paused and killed at random.

use std::collections::BTreeSet;
use std::env;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use ctrlmesh_common::slots::Slot;
use nix::sys::signal::Signal;
use tokio::time;

use crate::bed::{Bed, slots_of};
use crate::load::Load;
use crate::moves::{CANARY, UNCACHED, sliced, times};
use crate::process::Process;

/// How many handovers there are where nobody says; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const HANDOVERS: usize = 10;

/// What `cargo xtask torture` asks for.
const HANDOVERS_WANTED: &str = "CTRLMESH_TORTURE_HANDOVERS";
const SEED_WANTED: &str = "CTRLMESH_TORTURE_SEED";

/// How long a process is paused, in milliseconds.
const PAUSE: std::ops::Range<u64> = 100..6_000;

/// For how long a slot may be nobody's: a pause of the one that must acknowledge, of the manager that writes, or the
/// takeover of a manager that was killed, one after the other.
const UNOWNED: Duration = Duration::from_mins(1);

/// Numbers that look random, and are the same for the same seed (splitmix64).
struct Random(u64);

/// What is done to a process.
#[derive(Clone, Copy, Debug)]
enum Blow {
    Pause(Duration),
    Kill,
    /// The API server is killed.
    ApiServer,
    /// etcd forgets.
    Compaction,
}

/// Whose process.
#[derive(Clone, Debug)]
enum Victim {
    Operator(String),
    Proxy(String),
    Manager(usize),
}

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Some slots, and never none.
    fn slots(&mut self) -> Result<BTreeSet<Slot>> {
        let count = 1 + self.below(16);
        (0..count).map(|_| Ok(Slot::try_from(i64::try_from(self.below(32))?)?)).collect()
    }

    fn victim(&mut self, bed: &Bed) -> Result<Victim> {
        let mut pods = bed.pods.keys();
        let chosen = usize::try_from(self.below(3))?;
        let pod = pods.nth(chosen).context("a pod")?.clone();
        Ok(match self.below(3) {
            0 => Victim::Operator(pod),
            1 => Victim::Proxy(pod),
            _ => Victim::Manager(chosen % bed.managers.len()),
        })
    }

    fn blow(&mut self) -> Blow {
        match self.below(20) {
            0 => Blow::ApiServer,
            1 => Blow::Compaction,
            2..=12 => Blow::Pause(Duration::from_millis(PAUSE.start + self.below(PAUSE.end - PAUSE.start))),
            _ => Blow::Kill,
        }
    }
}

impl Bed {
    fn process(&self, victim: &Victim) -> Result<&Process> {
        Ok(match victim {
            Victim::Operator(pod) => &self.pods.get(pod).context("no such pod")?.operator,
            Victim::Proxy(pod) => self.pods.get(pod).and_then(|pod| pod.proxy.as_ref()).context("no such proxy")?,
            Victim::Manager(number) => &self.managers[*number].process,
        })
    }

    /// Does it, and undoes it; what was killed is started again by itself.
    async fn strike(&mut self, random: &mut Random) -> Result<()> {
        let (victim, blow) = (random.victim(self)?, random.blow());
        // So that it falls into any part of the handover.
        time::sleep(Duration::from_millis(random.below(400))).await;
        eprintln!("  {blow:?} {victim:?}");
        match blow {
            Blow::Pause(pause) => {
                self.process(&victim)?.send(Signal::SIGSTOP)?;
                time::sleep(pause).await;
                self.process(&victim)?.send(Signal::SIGCONT)?;
            }
            Blow::Kill => self.process(&victim)?.kill(),
            Blow::ApiServer => self.plane.restart_apiserver_of(usize::try_from(random.below(2))?, || Ok(()))?,
            Blow::Compaction => self.plane.compact()?,
        }
        Ok(())
    }
}

fn wanted(variable: &str) -> Result<Option<u64>> {
    env::var(variable).ok().map(|value| value.parse().with_context(|| format!("{variable}={value}"))).transpose()
}

#[tokio::test]
async fn tortured_handovers_leave_one_writer() -> Result<()> {
    let handovers = match wanted(HANDOVERS_WANTED)? {
        Some(number) => usize::try_from(number)?,
        None => times(HANDOVERS),
    };
    let seed = match wanted(SEED_WANTED)? {
        Some(seed) => seed,
        None => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
    };
    eprintln!(
        "{handovers} handovers; to have the same again: cargo xtask torture --handovers {handovers} --seed {seed}"
    );
    let mut random = Random(seed);
    let Some(mut bed) = Bed::start("tortured_handovers_leave_one_writer").await? else { return Ok(()) };
    bed.sharded("Server", &UNCACHED).await?;
    let load = Load::begin(&bed);
    for handover in 1..=handovers {
        let slots = random.slots()?;
        eprintln!("handover {handover} of {handovers}: {} slots", slots.len());
        bed.root(&sliced("Server", &slots)).await?;
        bed.strike(&mut random).await.with_context(|| format!("seed {seed}, handover {handover}"))?;
        let moved = bed.settled(|table| slots_of(table, CANARY) == slots).await;
        moved.with_context(|| format!("seed {seed}, handover {handover}"))?;
    }
    bed.verdict(load, UNOWNED).await.map(drop).with_context(|| format!("seed {seed}"))
}
