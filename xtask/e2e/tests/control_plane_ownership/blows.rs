//! What the torture does to processes, to their connections and to the control plane.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use tokio::task::JoinHandle;
use tokio::time;

use crate::bed::Bed;
use crate::operators::{self, Operator};
use crate::partition::{self, Partitions, Way};
use crate::process::Process;
use crate::random::Random;

/// How long most blows last, in milliseconds; and some of them, where there is time.
const SHORT: Range<u64> = 100..6_000;
const LONG: Range<u64> = 10_000..120_000;

/// One of so many is long.
const LONG_ONE_OF: u64 = 10;

/// How long an API server is away before it is started again, in milliseconds.
const OUTAGE: Range<u64> = 0..3_000;

/// Where a victim has several that it speaks to, one of them is chosen: this is divisible by how many there may be.
const PEERS: usize = 12;

/// By how many seconds a wall clock is wrong at most. Those of managers less: the certificates that they sign count
/// from five minutes earlier, and who was given one would be believed by nobody for as long as the step was.
const STEP: i64 = 3_600;
const MANAGER_STEP: i64 = 240;

/// What partitions are counted as.
const CUTS: &str = "partitions";

/// Whose process.
#[derive(Clone, Debug)]
pub(crate) enum Victim {
    Operator(String),
    Proxy(String),
    Manager(usize),
}

/// What is done.
#[derive(Clone, Debug)]
pub(crate) enum Blow {
    /// SIGSTOP, and SIGCONT after so long.
    Pause(Victim, Duration),
    /// SIGKILL; it is started again by itself. An operator comes back as any of them, as with another image.
    Kill(Victim),
    /// What it sends to one of those that it speaks to is lost, and so is the answer, for so long.
    Cut(Victim, SocketAddr, Duration),
    /// The API server of this number is killed, and started again after so long.
    Outage(usize, Duration),
    /// Its wall clock is wrong by so many seconds, for so long.
    Step(Victim, i64, Duration),
    /// etcd forgets.
    Compaction,
}

/// A kind of blow.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Pause,
    Kill,
    Cut,
    Step,
    Outage,
    Compaction,
}

/// So often each, in every ten blows.
const TEN: [Kind; 10] = [
    Kind::Pause,
    Kind::Pause,
    Kind::Pause,
    Kind::Kill,
    Kind::Kill,
    Kind::Cut,
    Kind::Cut,
    Kind::Step,
    Kind::Outage,
    Kind::Compaction,
];

/// What was done, and what still lasts.
pub(crate) struct Blows {
    partitions: Partitions,
    longest: Duration,
    operators: Vec<Operator>,
    /// Which of them runs in which pod.
    running: BTreeMap<String, usize>,
    /// Of the present ten, those that were not done yet.
    left: Vec<Kind>,
    lasting: Vec<Lasting>,
    counts: BTreeMap<&'static str, usize>,
}

struct Lasting {
    /// Whether it may keep ownership from moving.
    is_of_manager: bool,
    end: JoinHandle<Result<()>>,
}

impl Victim {
    fn is_manager(&self) -> bool {
        matches!(self, Self::Manager(_))
    }
}

/// After so many partitions some packet was lost.
const CUTS_THAT_TELL: usize = 10;

impl Blow {
    fn kind(&self) -> &'static str {
        match self {
            Self::Pause(..) => "pauses",
            Self::Kill(..) => "kills",
            Self::Cut(..) => CUTS,
            Self::Step(..) => "clock steps",
            Self::Outage(..) => "API server restarts",
            Self::Compaction => "compactions",
        }
    }

    /// Whether ownership may not move while it lasts, which the other manager and the other API server make good.
    fn holds_up(&self) -> bool {
        match self {
            Self::Pause(victim, _) | Self::Kill(victim) | Self::Cut(victim, ..) | Self::Step(victim, ..) => {
                victim.is_manager()
            }
            Self::Outage(..) => true,
            Self::Compaction => false,
        }
    }
}

impl Blows {
    /// Of which none lasts longer than `longest`.
    pub(crate) fn on(bed: &Bed, longest: Duration) -> Result<Self> {
        let pods = bed.pods.values().flat_map(|pod| pod.proxy.iter().chain([&pod.operator]));
        let all = pods.chain(bed.managers.iter().map(|manager| &manager.process));
        let partitions = Partitions::among(all.map(Process::group))?;
        let mut this = Self {
            operators: operators::all(bed)?,
            running: BTreeMap::new(),
            partitions,
            longest,
            left: Vec::new(),
            lasting: Vec::new(),
            counts: BTreeMap::new(),
        };
        for (number, pod) in bed.pods.keys().enumerate() {
            this.start(number % this.operators.len(), bed, pod)?;
        }
        Ok(this)
    }

    /// How many operators there are to choose from.
    pub(crate) fn operators(&self) -> usize {
        self.operators.len()
    }

    /// Takes in a pod that came later, whose operator is the one of this number.
    pub(crate) fn join(&mut self, number: usize, bed: &Bed, pod: &str) -> Result<()> {
        let running = bed.pods.get(pod).context("no such pod")?;
        partition::join(running.proxy.iter().chain([&running.operator]).map(Process::group))?;
        self.start(number, bed, pod)
    }

    /// Does one; most of them last on, while more is done.
    pub(crate) async fn strike(&mut self, bed: &mut Bed, random: &mut Random) -> Result<()> {
        self.collect().await?;
        let blow = self.choose(bed, random)?;
        // So that it falls into any part of the handover.
        time::sleep(random.millis(0..400)).await;
        eprintln!("  {blow:?}");
        *self.counts.entry(blow.kind()).or_default() += 1;
        let is_of_manager = blow.holds_up();
        match blow {
            Blow::Kill(Victim::Operator(name)) => {
                let number = random.index(self.operators.len());
                eprintln!("    it comes back as the one in {}", self.operators[number].name);
                self.start(number, bed, &name)?;
            }
            Blow::Kill(victim) => bed.process(&victim)?.kill(),
            Blow::Step(victim, seconds, duration) => {
                let clock = bed.process(&victim)?.clock();
                clock.step(seconds)?;
                self.last(is_of_manager, duration, move || clock.step(0));
            }
            Blow::Compaction => bed.plane.compact()?,
            Blow::Outage(number, duration) => bed.outage(number, duration).await?,
            Blow::Pause(victim, duration) => {
                let process = bed.process(&victim)?.clone();
                process.send(Signal::SIGSTOP)?;
                self.last(is_of_manager, duration, move || process.send(Signal::SIGCONT));
            }
            Blow::Cut(victim, to, duration) => {
                let way = Way { group: bed.process(&victim)?.group(), to };
                let partitions = self.partitions.clone();
                partitions.cut(way)?;
                self.last(is_of_manager, duration, move || partitions.mend(way));
            }
        }
        Ok(())
    }

    /// Waits until nothing lasts, and sees that partitions were some.
    pub(crate) async fn end(&mut self) -> Result<()> {
        for lasting in self.lasting.drain(..) {
            lasting.end.await??;
        }
        // One by itself may meet a process that says nothing meanwhile.
        if self.counts.get(CUTS).is_some_and(|cuts| *cuts >= CUTS_THAT_TELL) {
            ensure!(partition::lost()? > 0, "the partitions lost no packet");
        }
        Ok(())
    }

    fn choose(&mut self, bed: &Bed, random: &mut Random) -> Result<Blow> {
        if self.left.is_empty() {
            self.left = TEN.to_vec();
        }
        let kind = self.left.swap_remove(random.index(self.left.len()));
        let is_long = random.below(LONG_ONE_OF) == 0;
        let duration = random.millis(if is_long { LONG } else { SHORT }).min(self.longest);
        let (victim, pod, choice) = (random.victim(bed)?, random.pod(bed)?, random.index(PEERS));
        let (server, outage) = (random.index(bed.managers.len()), random.millis(OUTAGE));
        let step = random.between(-STEP, STEP);
        let of = |victim: Victim| {
            let peers = bed.peers(&victim)?;
            Ok(match kind {
                Kind::Pause => Blow::Pause(victim, duration),
                Kind::Kill => Blow::Kill(victim),
                Kind::Cut => Blow::Cut(victim, peers[choice % peers.len()], duration),
                Kind::Step if self.has_clock(&victim) => {
                    let most = if victim.is_manager() { MANAGER_STEP } else { STEP };
                    Blow::Step(victim, step % (most + 1), duration)
                }
                Kind::Step => Blow::Step(Victim::Proxy(pod.clone()), step, duration),
                Kind::Outage => Blow::Outage(server, outage),
                Kind::Compaction => Blow::Compaction,
            })
        };
        let blow = of(victim)?;
        // One manager and one API server are whole at any time: only then does the bound hold.
        if !blow.holds_up() || self.lasting.iter().all(|one| !one.is_of_manager) {
            return Ok(blow);
        }
        let proxy = Victim::Proxy(pod.clone());
        if matches!(kind, Kind::Outage) { Ok(Blow::Kill(proxy)) } else { of(proxy) }
    }

    /// Starts the operator of this number in a pod, in the place of another.
    fn start(&mut self, number: usize, bed: &Bed, pod: &str) -> Result<()> {
        let Operator { program, arguments, .. } = &self.operators[number];
        bed.pods.get(pod).context("no such pod")?.operator.replace(program, arguments);
        self.running.insert(pod.to_owned(), number);
        Ok(())
    }

    /// Whether the wall clock can be stepped.
    fn has_clock(&self, victim: &Victim) -> bool {
        let Victim::Operator(pod) = victim else { return true };
        self.running.get(pod).is_some_and(|number| self.operators[*number].has_clock)
    }

    fn last(&mut self, is_of_manager: bool, duration: Duration, end: impl FnOnce() -> Result<()> + Send + 'static) {
        let end = tokio::spawn(async move {
            time::sleep(duration).await;
            end()
        });
        self.lasting.push(Lasting { is_of_manager, end });
    }

    /// Forgets what is over.
    async fn collect(&mut self) -> Result<()> {
        let (over, lasting) = self.lasting.drain(..).partition::<Vec<_>, _>(|one| one.end.is_finished());
        self.lasting = lasting;
        for one in over {
            one.end.await??;
        }
        Ok(())
    }
}

impl fmt::Display for Blows {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<String> = self.counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        out.write_str(&counts.join(", "))
    }
}

impl Random {
    fn pod(&mut self, bed: &Bed) -> Result<String> {
        Ok(bed.pods.keys().nth(self.index(bed.pods.len())).context("a pod")?.clone())
    }

    fn victim(&mut self, bed: &Bed) -> Result<Victim> {
        let (pod, manager) = (self.pod(bed)?, self.index(bed.managers.len()));
        Ok(match self.below(3) {
            0 => Victim::Operator(pod),
            1 => Victim::Proxy(pod),
            _ => Victim::Manager(manager),
        })
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

    /// Those that it connects to.
    fn peers(&self, victim: &Victim) -> Result<Vec<SocketAddr>> {
        Ok(match victim {
            Victim::Operator(pod) => vec![self.pods.get(pod).context("no such pod")?.server],
            Victim::Proxy(pod) => self.pods.get(pod).context("no such pod")?.proxy_peers.clone(),
            Victim::Manager(_) => self.plane.urls().map(address).collect::<Result<_>>()?,
        })
    }

    /// Ends an API server and starts it again.
    async fn outage(&mut self, number: usize, duration: Duration) -> Result<()> {
        self.plane.stop_apiserver_of(number)?;
        time::sleep(duration).await;
        self.plane.start_apiserver_of(number)?;
        let client = self.plane.client_of(number).await?;
        self.until("the API server to be ready", async || {
            let request = http::Request::get("/readyz").body(Vec::new())?;
            Ok(client.request_text(request).await?)
        })
        .await
        .map(drop)
    }
}

/// The address of an API server of the bed.
pub(crate) fn address(url: &str) -> Result<SocketAddr> {
    url.trim_start_matches("https://").parse().with_context(|| url.to_owned())
}
