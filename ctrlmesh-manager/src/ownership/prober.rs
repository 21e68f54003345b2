//! Keeps what every root's fence has been shown to enforce up to date.
//!
//! A root is asked about at once when its table or its policy changes, then at growing intervals until every endpoint
//! has shown both, and at long intervals after that. Several roots are asked about at the same time.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt as _};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{self, Instant};
use tracing::{info, warn};

use super::endpoints::{self, Clients};
use super::fence_names::object_name;
use super::fence_plan;
use super::fence_state::{FenceState, Proof, States, Unfenced};
use super::fence_table::{self, Step, Version};
use super::probe::{self, Answer, Question};
use crate::cluster::cache::Cache;
use crate::cluster::write_error::{WriteError, within};
use crate::telemetry;

/// First and longest delay while something is not shown yet.
const RETRY: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(250));

/// After so many rounds the delay grows again.
const PATIENCE: u32 = 40;

/// Longest delay then.
const TIRED: Duration = Duration::from_secs(5);

/// Delay while everything is shown.
const CALM: Duration = Duration::from_secs(30);

/// How long a proof holds while endpoints do not answer. None that answers otherwise is waited for.
const GRACE: Duration = Duration::from_secs(5);

/// Limit for the write of a table.
const DEADLINE: Duration = Duration::from_secs(2);

const FIELD_MANAGER: &str = "ctrlmesh-manager";

pub(super) struct Prober<'a, Dial> {
    pub(super) client: &'a Client,
    pub(super) cache: &'a Cache,
    /// The manager's namespace.
    pub(super) home: &'a str,
    pub(super) dial: &'a Dial,
    pub(super) states: &'a watch::Sender<Arc<States>>,
}

/// What is to be known of a root's fence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Ask(Question),
    Open(Unfenced),
}

/// By `NAMESPACE/NAME` of the root.
pub(super) type Targets = BTreeMap<String, Target>;

/// What came of one round: the endpoints' answers.
struct Round {
    root: String,
    question: Question,
    answers: Result<Vec<(SocketAddr, Answer)>, String>,
    /// Of all endpoints that there are.
    clients: Clients,
}

/// How one root is asked about, and what its endpoints have proved.
#[derive(Debug)]
struct RootProbe {
    question: Question,
    /// Of its table.
    version: Version,
    proof: Option<Proof>,
    /// Since when there is no new proof, and why.
    failing: Option<(Instant, String)>,
    /// Rounds since the last change.
    rounds: u32,
    due: Instant,
    is_busy: bool,
}

impl<Dial: Fn(SocketAddr) -> Option<Client>> Prober<'_, Dial> {
    /// Asks until it is dropped.
    pub(super) async fn run(&self, mut targets: watch::Receiver<Targets>) {
        let (mut probes, mut clients) = (BTreeMap::<String, RootProbe>::new(), Clients::new());
        let mut changes = self.cache.changes();
        let mut rounds = FuturesUnordered::new();
        loop {
            let open = follow(&targets.borrow_and_update(), &mut probes, Instant::now());
            changes.mark_unchanged();
            for (root, version) in self.cache.in_configs(fence_plan::fenced_version) {
                if let Some(probe) = probes.get_mut(&root) {
                    probe.follow(version, Instant::now());
                }
            }
            let now = Instant::now();
            for (root, probe) in probes.iter_mut().filter(|(_, probe)| !probe.is_busy && probe.due <= now) {
                probe.is_busy = true;
                rounds.push(self.round(root.clone(), probe.question.clone(), clients.clone()));
            }
            self.publish(&open, &probes);
            let waiting = probes.values().filter(|probe| !probe.is_busy);
            let due = waiting.map(|probe| probe.due).min().unwrap_or(now + CALM);
            tokio::select! {
                ok = targets.changed() => if ok.is_err() { return std::future::pending().await },
                // The cache outlives this.
                _ = changes.changed() => {}
                Some(Round { root, question, answers, clients: all }) = rounds.next() => {
                    clients = all;
                    if let Some(probe) = probes.get_mut(&root) {
                        probe.is_busy = false;
                        if probe.question == question {
                            probe.take(&root, answers, Instant::now());
                        }
                    }
                }
                () = time::sleep_until(due) => {}
            }
        }
    }

    /// Writes the table where it is another, and asks every endpoint. The endpoints are listed meanwhile, and those
    /// that are new are asked, too.
    async fn round(&self, root: String, question: Question, mut clients: Clients) -> Round {
        if let Err(error) = self.write_table(&root, &question).await {
            let why = format!("the table is not written: {}", telemetry::chain(&error));
            return Round { root, question, answers: Err(why), clients };
        }
        let (listed, answers) = tokio::join!(endpoints::list(self.client), ask(&clients, &question));
        let listed = match listed {
            Ok(listed) => listed,
            Err(error) => return Round { root, question, answers: Err(telemetry::chain(&error)), clients },
        };
        clients.retain(|address, _| listed.contains(address));
        let mut answers: Vec<_> = answers.into_iter().filter(|(address, _)| listed.contains(address)).collect();
        let new = listed.iter().filter(|address| !clients.contains_key(address));
        let new: Clients = new.filter_map(|address| Some((*address, (self.dial)(*address)?))).collect();
        answers.extend(ask(&new, &question).await);
        clients.extend(new);
        if let Some(address) = listed.iter().find(|address| !clients.contains_key(address)) {
            let why = format!("{address} cannot be dialled");
            return Round { root, question, answers: Err(why), clients };
        }
        Round { root, question, answers: Ok(answers), clients }
    }

    /// Writes the table of the root as it is in the cache, unless a newer one is there.
    async fn write_table(&self, root: &str, question: &Question) -> Result<(), WriteError> {
        let mut found = self.cache.in_config(root, fence_table::data);
        let Some(wanted) = found.take() else { return Ok(()) };
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), self.home);
        let name = object_name(&question.namespace, &question.root);
        let work = async {
            let there = maps.get_opt(&name).await?;
            let data = there.as_ref().and_then(|there| there.data.clone()).unwrap_or_default();
            if fence_table::step(&data, &wanted) != Step::Write {
                return Ok(());
            }
            let version = there.and_then(|there| there.metadata.resource_version);
            let is_new = version.is_none();
            let map = fence_table::config_map(&question.namespace, &question.root, self.home, wanted, version);
            let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
            if is_new { maps.create(&params, &map).await } else { maps.replace(&name, &params, &map).await }.map(drop)
        };
        within(DEADLINE, Box::pin(work)).await
    }

    fn publish(&self, open: &States, probes: &BTreeMap<String, RootProbe>) {
        let asked = probes.iter().map(|(root, probe)| (root.clone(), probe.state()));
        let now: States = open.iter().map(|(root, state)| (root.clone(), state.clone())).chain(asked).collect();
        self.states.send_if_modified(|before| {
            let differs = **before != now;
            if differs {
                *before = Arc::new(now);
            }
            differs
        });
    }
}

async fn ask(clients: &Clients, question: &Question) -> Vec<(SocketAddr, Answer)> {
    join_all(clients.iter().map(async |(address, client)| (*address, probe::ask(client, question).await))).await
}

/// Takes over what is to be asked; returns the roots about which nobody need be asked.
fn follow(targets: &Targets, probes: &mut BTreeMap<String, RootProbe>, now: Instant) -> States {
    let is_asked = |root: &String| matches!(targets.get(root), Some(Target::Ask(_)));
    probes.retain(|root, _| is_asked(root));
    let mut open = States::new();
    for (root, target) in targets {
        match target {
            Target::Open(why) => drop(open.insert(root.clone(), FenceState::Open(why.clone()))),
            Target::Ask(question) => {
                let probe = probes.entry(root.clone()).or_insert_with(|| RootProbe::new(question.clone(), now));
                if probe.question != *question {
                    let is_busy = probe.is_busy;
                    let version = probe.version.clone();
                    *probe = RootProbe { version, is_busy, ..RootProbe::new(question.clone(), now) };
                }
            }
        }
    }
    open
}

impl RootProbe {
    fn new(question: Question, now: Instant) -> Self {
        Self { question, version: Version::default(), proof: None, failing: None, rounds: 0, due: now, is_busy: false }
    }

    /// Follows its table.
    fn follow(&mut self, version: Version, now: Instant) {
        if self.version != version {
            (self.version, self.rounds, self.due) = (version, 0, now);
        }
    }

    /// Takes the answers of a round that is over.
    fn take(&mut self, root: &str, answers: Result<Vec<(SocketAddr, Answer)>, String>, now: Instant) {
        let is_open = answers.as_ref().is_ok_and(|all| {
            all.iter().any(|(_, answer)| match answer {
                Answer::Passed => true,
                Answer::Enforces { revision, .. } => *revision != self.question.revision,
                Answer::Unclear { .. } => false,
            })
        });
        match answers.and_then(|answers| probe::proof(&self.question.revision, &answers)) {
            Ok(proof) => {
                if self.proof.is_none() {
                    info!(
                        root,
                        revision = proof.revision,
                        endpoints = proof.endpoints,
                        "every API server enforces the fence"
                    );
                }
                (self.proof, self.failing) = (Some(proof), None);
            }
            Err(why) => {
                let (since, _) = self.failing.take().unwrap_or_else(|| (now, String::new()));
                let is_over = is_open || now.duration_since(since) >= GRACE;
                if is_over && self.proof.take().is_some() {
                    warn!(root, why, "the fence is not enforced by every API server");
                }
                self.failing = Some((since, why));
            }
        }
        self.due = now + self.delay();
        self.rounds = self.rounds.saturating_add(1);
    }

    fn delay(&self) -> Duration {
        let shown = self.proof.as_ref().is_some_and(|proof| proof.epoch >= self.version.epoch);
        if shown && self.failing.is_none() {
            return CALM;
        }
        let grown = |first: Duration, rounds: u32| first.saturating_mul(1 << rounds.min(16));
        match self.rounds.checked_sub(PATIENCE) {
            None => grown(RETRY.0, self.rounds).min(RETRY.1),
            Some(more) => grown(RETRY.1, more).min(TIRED),
        }
    }

    fn state(&self) -> FenceState {
        match (&self.proof, &self.failing) {
            (Some(proof), _) => FenceState::Enforced(proof.clone()),
            (None, Some((_, why))) => FenceState::Open(Unfenced::NotProved { why: why.clone() }),
            (None, None) => FenceState::Open(Unfenced::NotProved { why: "no endpoint was asked yet".to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests;
