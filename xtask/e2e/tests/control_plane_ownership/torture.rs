//! Handovers under load, while processes are paused, killed and cut off at random, and API servers restart.

use std::collections::BTreeSet;
use std::env;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::slots::Slot;
use nix::unistd::getuid;

use crate::bed::{Bed, ROOT, slots_of};
use crate::blows::Blows;
use crate::load::Load;
use crate::moves::{CANARY, UNCACHED, sliced, times};
use crate::operators;
use crate::random::Random;

/// How many handovers there are where nobody says; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const HANDOVERS: usize = 10;

/// What `cargo xtask torture` asks for.
pub(crate) const HANDOVERS_WANTED: &str = "CTRLMESH_TORTURE_HANDOVERS";
const SEED_WANTED: &str = "CTRLMESH_TORTURE_SEED";

/// From how many handovers on there is time for blows that last for minutes, and how long they last with fewer.
pub(crate) const MANY: usize = 100;
pub(crate) const BRIEF: Duration = Duration::from_secs(10);

/// For how long a slot may be nobody's: until another manager leads in place of one that is paused, killed or cut off;
/// until an API server that is away is no endpoint any more; and a drain of writes. One after the other.
pub(crate) const UNOWNED: Duration = Duration::from_mins(1);

impl Bed {
    /// Moves the canary's share to these slots, and waits until they are granted, whoever knows of it yet.
    async fn hand_over(&mut self, slots: &BTreeSet<Slot>, blows: &mut Blows, random: &mut Random) -> Result<()> {
        self.until("the root to be changed", async || self.root(&sliced("Server", slots)).await).await?;
        blows.strike(self, random).await?;
        self.until("the slots to be granted", async || {
            let status = self.configs().get(ROOT).await?.status.context("no status")?;
            let table = status.ownership.context("no table")?;
            ensure!(table.revoked.is_none() && slots_of(&table, CANARY) == *slots, "{table:?}");
            Ok(())
        })
        .await
    }
}

/// Some slots, and never none.
fn some_slots(random: &mut Random) -> Result<BTreeSet<Slot>> {
    let count = 1 + random.below(16);
    (0..count).map(|_| Ok(Slot::try_from(i64::try_from(random.below(32))?)?)).collect()
}

/// The number that a variable asks for.
pub(crate) fn wanted(variable: &str) -> Result<Option<u64>> {
    env::var(variable).ok().map(|value| value.parse().with_context(|| format!("{variable}={value}"))).transpose()
}

/// The seed that is asked for, and another each time where none is.
pub(crate) fn seed() -> Result<u64> {
    match wanted(SEED_WANTED)? {
        Some(seed) => Ok(seed),
        None => Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs()),
    }
}

async fn tortured(handovers: usize, seed: u64) -> Result<()> {
    let mut random = Random::of(seed);
    if getuid().is_root() {
        operators::fetch_libraries()?;
    }
    let Some(mut bed) = Bed::start("tortured_handovers_leave_one_writer").await? else { return Ok(()) };
    bed.sharded("Server", &UNCACHED).await?;
    let mut blows = Blows::on(&bed, if handovers < MANY { BRIEF } else { Duration::MAX })?;
    let load = Load::begin(&bed);
    let mut slots = BTreeSet::new();
    let begun = Instant::now();
    for handover in 1..=handovers {
        slots = some_slots(&mut random)?;
        eprintln!("{:?}: handover {handover} of {handovers}: {} slots", begun.elapsed(), slots.len());
        bed.hand_over(&slots, &mut blows, &mut random).await.with_context(|| format!("handover {handover}"))?;
    }
    blows.end().await?;
    eprintln!("{handovers} handovers in {:?} with {blows}", begun.elapsed());
    // Now all proxies know of it, too.
    bed.settled(|table| slots_of(table, CANARY) == slots).await?;
    let verdict = bed.verdict(load, UNOWNED).await?;
    eprintln!("no slot was unowned beyond {UNOWNED:?}; the longest for {:?}", verdict.longest_unowned());
    Ok(())
}

#[tokio::test]
async fn tortured_handovers_leave_one_writer() -> Result<()> {
    let handovers = match wanted(HANDOVERS_WANTED)? {
        Some(number) => usize::try_from(number)?,
        None => times(HANDOVERS),
    };
    let seed = seed()?;
    eprintln!(
        "{handovers} handovers; to have the same again: cargo xtask torture --handovers {handovers} --seed {seed}"
    );
    tortured(handovers, seed).await.with_context(|| format!("seed {seed}"))
}
