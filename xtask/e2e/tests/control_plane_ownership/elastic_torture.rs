//! Replicas come, go, fail, are killed and vanish with their node at random under load, while processes are paused,
//! killed and cut off, and API servers restart.

use std::collections::BTreeSet;
use std::mem;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::shares::are_even;
use nix::sys::signal::Signal;
use nix::unistd::getuid;
use serde_json::json;

use crate::bed::{Bed, ROOT};
use crate::blows::Blows;
use crate::load::Load;
use crate::moves::{UNCACHED, times};
use crate::process::Process;
use crate::random::Random;
use crate::torture::{BRIEF, HANDOVERS_WANTED, MANY, UNOWNED, seed, wanted};
use crate::{operators, pods};

/// How many changes there are where nobody says; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const CHANGES: usize = 6;

/// How many pods there are at first and at the end, and at most.
const FIRST: u16 = 3;
const MOST: u16 = 8;

/// How long a pod that is deleted may work on, in milliseconds.
const GRACE: Range<u64> = 0..1_500;

/// A kind of change.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Scale,
    Fail,
    Kill,
    Recover,
    Vanish,
}

/// So often each, in every six changes.
const SIX: [Kind; 6] = [Kind::Scale, Kind::Scale, Kind::Scale, Kind::Fail, Kind::Kill, Kind::Recover];

/// On how many nodes the pods are, by turns.
const NODES: u16 = 2;

/// What happens to the pods.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// There are to be so many.
    Scale(u16),
    /// The pod of this number is not ready any more, and works on.
    Fail(u16),
    /// The operator in it is killed and started again, and the pod is not ready.
    Kill(u16),
    /// It is ready again.
    Recover(u16),
    /// All processes on the node of this number stand still, until the pods of the others own all.
    Vanish(u16),
}

/// The pods `op-0` to `op-<count - 1>`.
#[derive(Debug)]
struct Replicas {
    count: u16,
    unready: BTreeSet<u16>,
    /// Of the present six, or seven, those that were not done yet.
    left: Vec<Kind>,
    /// Whether a node vanishes once in each seven.
    vanish: bool,
}

impl Replicas {
    fn ready(&self) -> impl Iterator<Item = u16> {
        (0..self.count).filter(move |number| !self.unready.contains(number))
    }

    /// A change after which one pod is ready at least.
    fn choose(&mut self, random: &mut Random) -> Change {
        if self.left.is_empty() {
            self.left = SIX.to_vec();
            self.left.extend(self.vanish.then_some(Kind::Vanish));
        }
        let kind = self.left.swap_remove(random.index(self.left.len()));
        let ready: Vec<u16> = self.ready().collect();
        let unready: Vec<u16> = self.unready.iter().copied().collect();
        let (one, back) = (random.index(ready.len()), random.index(unready.len().max(1)));
        match kind {
            Kind::Fail if ready.len() > 1 => Change::Fail(ready[one]),
            Kind::Kill if ready.len() > 1 => Change::Kill(ready[one]),
            Kind::Recover if !unready.is_empty() => Change::Recover(unready[back]),
            Kind::Vanish if self.ready().any(|other| other % NODES != ready[one] % NODES) => {
                Change::Vanish(ready[one] % NODES)
            }
            _ => self.scale(random),
        }
    }

    /// Another number of pods. Those with the greatest numbers go, as of every StatefulSet.
    fn scale(&self, random: &mut Random) -> Change {
        let least = self.ready().next().map_or(1, |first| first + 1);
        let counts: Vec<u16> = (least..=MOST).filter(|count| *count != self.count).collect();
        let one = random.index(counts.len().max(1));
        Change::Scale(counts.get(one).copied().unwrap_or(self.count))
    }

    fn note(&mut self, change: Change) {
        match change {
            Change::Scale(count) => {
                self.count = count;
                self.unready.retain(|number| *number < count);
            }
            Change::Fail(number) | Change::Kill(number) => self.unready.extend([number]),
            Change::Recover(number) => self.unready.retain(|one| *one != number),
            Change::Vanish(_) => {}
        }
    }
}

/// What happens, and what is done to those that it happens to.
struct Torture {
    bed: Bed,
    blows: Blows,
    random: Random,
    replicas: Replicas,
}

impl Torture {
    /// Makes a change, strikes meanwhile, and waits until the ready pods own all, whoever knows of it yet.
    async fn change(&mut self, change: Change) -> Result<()> {
        match change {
            Change::Scale(count) => self.scale(count).await?,
            Change::Fail(number) => {
                self.bed.say_ready(number, false).await?;
                self.strike().await?;
            }
            Change::Kill(number) => {
                self.bed.pods.get(&name(number)).context("no such pod")?.operator.kill();
                self.bed.say_ready(number, false).await?;
                self.strike().await?;
            }
            Change::Recover(number) => {
                self.bed.say_ready(number, true).await?;
                self.strike().await?;
            }
            Change::Vanish(node) => self.vanish(node).await?,
        }
        self.replicas.note(change);
        self.until_shared(|_| true).await
    }

    /// Nothing strikes meanwhile: it would start some of the processes again.
    async fn vanish(&mut self, node: u16) -> Result<()> {
        self.blows.end().await?;
        // One that was killed just now is about to start again.
        self.bed
            .until("all processes on the node to run", async || {
                let run = self.processes(node)?.iter().all(|process| process.runs());
                ensure!(run, "some do not");
                Ok(())
            })
            .await?;
        self.send(node, Signal::SIGSTOP)?;
        let shared = self.until_shared(|number| number % NODES != node).await;
        let resumed = self.send(node, Signal::SIGCONT);
        shared.and(resumed)
    }

    /// Sends a signal to all processes on a node.
    fn send(&self, node: u16, signal: Signal) -> Result<()> {
        self.processes(node)?.into_iter().try_for_each(|process| process.send(signal))
    }

    fn processes(&self, node: u16) -> Result<Vec<&Process>> {
        let mut processes = Vec::new();
        for number in (0..self.replicas.count).filter(|number| number % NODES == node) {
            let pod = self.bed.pods.get(&name(number)).context("no such pod")?;
            processes.extend(pod.proxy.iter().chain([&pod.operator]));
        }
        Ok(processes)
    }

    async fn scale(&mut self, count: u16) -> Result<()> {
        let before = self.replicas.count;
        pods::workload(&self.bed, usize::from(count), true).await?;
        for number in (count..before).rev() {
            self.bed.terminate_pod(number).await?;
        }
        self.strike().await?;
        for number in (count..before).rev() {
            let grace = self.random.millis(GRACE);
            self.bed.bury_pod(number, grace).await?;
        }
        for number in before..count {
            self.bed.start_pod(number, true, &UNCACHED).await?;
            let operator = self.random.index(self.blows.operators());
            self.blows.join(operator, &self.bed, &name(number))?;
        }
        Ok(())
    }

    async fn strike(&mut self) -> Result<()> {
        self.blows.strike(&mut self.bed, &mut self.random).await
    }

    /// Waits until all slots are granted, evenly, to the shards of the pods that are ready and count.
    async fn until_shared(&self, counts: impl Fn(u16) -> bool) -> Result<()> {
        let ready: Vec<String> = self.replicas.ready().filter(|number| counts(*number)).map(name).collect();
        self.bed
            .until("the ready pods to own all slots", async || {
                let status = self.bed.configs().get(ROOT).await?.status.context("no status")?;
                let table = status.ownership.context("no table")?;
                let owners: BTreeSet<&str> = table.slots.values().map(String::as_str).collect();
                let shards: Option<BTreeSet<&str>> = ready.iter().map(|pod| table.shard_of(pod)).collect();
                ensure!(are_even(&table, ready.len()) && shards == Some(owners), "of {ready:?}: {table:?}");
                Ok(())
            })
            .await
    }

    /// Ends the blows, has the first number of pods again, all of them ready, and waits until their proxies know it.
    async fn end(&mut self) -> Result<()> {
        self.blows.end().await?;
        for number in mem::take(&mut self.replicas.unready) {
            self.bed.say_ready(number, true).await?;
        }
        self.change(Change::Scale(FIRST)).await?;
        self.blows.end().await?;
        self.bed.settled(|table| are_even(table, usize::from(FIRST))).await.map(drop)
    }
}

fn name(number: u16) -> String {
    format!("op-{number}")
}

async fn tortured(changes: usize, seed: u64) -> Result<()> {
    if getuid().is_root() {
        operators::fetch_libraries()?;
    }
    let test = "tortured_elastic_shares_leave_one_writer";
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    bed.nodes = NODES;
    pods::workload(&bed, usize::from(FIRST), true).await?;
    // Who comes back gets slots at once: so more of them move.
    bed.root(&json!({"fence": "Server", "auto": {"shardingSize": MOST, "elastic": {"settle": "0s"}}})).await?;
    for number in 0..FIRST {
        bed.start_pod(number, true, &UNCACHED).await?;
    }
    bed.settled(|table| are_even(table, usize::from(FIRST))).await?;
    let blows = Blows::on(&bed, if changes < MANY { BRIEF } else { Duration::MAX })?;
    let load = Load::begin(&bed);
    let replicas = Replicas { count: FIRST, unready: BTreeSet::new(), left: Vec::new(), vanish: changes > CHANGES };
    let mut torture = Torture { bed, blows, random: Random::of(seed), replicas };
    let begun = Instant::now();
    for number in 1..=changes {
        let change = torture.replicas.choose(&mut torture.random);
        eprintln!("{:?}: change {number} of {changes}: {change:?} of {:?}", begun.elapsed(), torture.replicas);
        torture.change(change).await.with_context(|| format!("change {number}: {change:?}"))?;
    }
    torture.end().await?;
    eprintln!("{changes} changes in {:?} with {}", begun.elapsed(), torture.blows);
    let verdict = torture.bed.verdict(load, UNOWNED).await?;
    eprintln!("no slot was unowned beyond {UNOWNED:?}; the longest for {:?}", verdict.longest_unowned());
    Ok(())
}

#[tokio::test]
async fn tortured_elastic_shares_leave_one_writer() -> Result<()> {
    let changes = match wanted(HANDOVERS_WANTED)? {
        Some(number) => usize::try_from(number)?,
        None => times(CHANGES),
    };
    let seed = seed()?;
    eprintln!(
        "{changes} changes; to have the same again: cargo xtask torture --elastic --handovers {changes} --seed {seed}"
    );
    tortured(changes, seed).await.with_context(|| format!("seed {seed}"))
}
