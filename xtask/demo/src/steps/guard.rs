//! A step in which a replica runs wild, and a CircuitBreaker stops it.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::{self, annotation, label};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::later;
use crate::audit::Resource;
use crate::checks::{WHOLE_WITHIN, changed_in, seconds, steady};
use crate::environment::Environment;
use crate::install::{self, ROLLED_OUT_WITHIN};
use crate::rules::shard_of;

/// Name of the CircuitBreaker, and of its limit.
const BREAKER: &str = "deletes";

/// Of the objects of its share, what a replica may delete.
const PERCENT: u64 = 2;

/// The bug of the example operator: while a website says so, its replica deletes every page that it sees.
const BUG: &str = "web.example.com/bug";

/// For how long nothing more may be deleted.
const LOOKED_FOR: Duration = Duration::from_secs(5);

/// The change that websites get, to see whether their replicas follow.
const CHANGE: u64 = 500;

/// The replica with the bug.
struct Wild<'a> {
    environment: &'a Environment,
    start: Timestamp,
    replica: String,
    /// The website that has it run wild.
    website: String,
    /// The objects of its share, and how many of them it may delete.
    objects: u64,
    allowed: usize,
}

pub(super) fn wild(environment: &Environment) -> Result<Vec<String>> {
    let wild = Wild::limited(environment)?;
    let clock = Instant::now();
    environment.api.merge(&wild.website, &bug(&json!("delete-pages")))?;
    wild.until_open()?;
    let took = clock.elapsed();
    let first = wild.deleted()?;
    ensure!((1..=wild.allowed).contains(&first), "{first} objects were deleted, not up to {}", wild.allowed);
    thread::sleep(LOOKED_FOR);
    let more = wild.deleted()? - first;
    ensure!(more == 0, "{more} more objects were deleted, though the breaker is open");
    let others = wild.others_follow()?;
    // A reset: it goes on, as far as the budget goes.
    let reset = json!({"metadata": {"annotations": {annotation::RESET_CIRCUIT_BREAKER: BREAKER}}});
    environment.api.merge(&breaker(environment), &reset)?;
    environment.until("the replica to go on", WHOLE_WITHIN, || Ok((wild.deleted()? > first).then_some(())))?;
    wild.until_open()?;
    thread::sleep(LOOKED_FOR);
    let all = wild.deleted()?;
    ensure!(all <= 2 * wild.allowed, "{all} objects were deleted, not up to twice {}", wild.allowed);
    let mended = wild.mended()?;
    Ok(vec![
        format!(
            "{} of {} objects of its share may be deleted in 5 min; {} deleted {first}, and its breaker opened, in {}",
            wild.allowed,
            wild.objects,
            wild.replica,
            seconds(took)
        ),
        format!("audit log: 0 more in the next {}, 0 by the others; {others}", seconds(LOOKED_FOR)),
        format!("after a reset it deleted {} more, and its breaker opened again", all - first),
        mended,
        steady(environment, wild.start)?,
    ])
}

impl<'a> Wild<'a> {
    /// Limits what every replica deletes, and waits until their proxies know.
    fn limited(environment: &'a Environment) -> Result<Self> {
        let start = Timestamp::now();
        let pods = json!([{"key": label::ENABLE_PROXY, "operator": "Exists"}]);
        let pages = json!({"apiGroups": [""], "resources": ["configmaps"], "verbs": ["delete"], "namespaces": ["*"]});
        let limit = json!({
            "name": BREAKER,
            "bucket": {"percentOfShare": PERCENT, "interval": "5m"},
            "recoverPolicy": {"type": "Manual"},
            "resourceRules": [pages],
        });
        let object = json!({
            "apiVersion": format!("{}/{}", names::GROUP, names::VERSION),
            "kind": "CircuitBreaker",
            "metadata": {"name": BREAKER},
            "spec": {"selector": {"matchExpressions": pods}, "rateLimitings": [limit]},
        });
        environment.api.apply(&breaker(environment), &object)?;
        let namespace = install::namespace(0);
        let shard = shard_of(&namespace, later(environment));
        let operator = environment.observer.operator();
        let owner = format!("{}/{}/{shard}", operator.namespace, operator.name);
        let objects = environment.until("every proxy to know the limit", ROLLED_OUT_WITHIN, || {
            let status = environment.api.get(&breaker(environment))?["status"].take();
            let sizes = status["shares"].as_array().into_iter().flatten();
            let size = sizes.filter(|one| one["shard"] == owner).find_map(|one| one["objects"].as_u64());
            Ok(size.filter(|_| is_true(&status, "Programmed")))
        })?;
        let table = environment.observer.table();
        let working = table.replicas.iter().find(|(_, one)| one.works && one.shard.as_ref() == Some(&shard));
        let (replica, _) = working.with_context(|| format!("nobody works for {shard}"))?;
        let allowed = usize::try_from(objects * PERCENT / 100)?.max(1);
        let website = environment.work.main().path(&namespace, "site-0");
        Ok(Self { environment, start, replica: replica.clone(), website, objects, allowed })
    }

    fn until_open(&self) -> Result<()> {
        self.environment.until("the breaker to open", WHOLE_WITHIN, || {
            let status = self.environment.api.get(&breaker(self.environment))?["status"].take();
            Ok(is_true(&status, "Open").then_some(()))
        })
    }

    /// How many pages the replica has deleted, and nobody else any.
    fn deleted(&self) -> Result<usize> {
        let pages = Resource::new("", "configmaps");
        let span = self.start..self.environment.observer.settle()?;
        self.environment.observer.history(|history| {
            let deleted = history.writes(&span).filter(|write| write.is_delete && write.object.resource == pages);
            let (own, others): (Vec<_>, Vec<_>) = deleted.partition(|write| write.pod == self.replica);
            ensure!(others.is_empty(), "others deleted, too: {:?}", others.first());
            Ok(own.len())
        })
    }

    /// Changes what is not the replica's own, and waits until the operator has followed.
    fn others_follow(&self) -> Result<String> {
        let (objects, took) = self.followed(false)?;
        Ok(format!("{objects} objects of the other shares changed, and followed, in {}", seconds(took)))
    }

    /// Changes the replica's own objects, or all others, and waits until the operator has followed.
    fn followed(&self, of_its_own: bool) -> Result<(usize, Duration)> {
        let slots = later(self.environment);
        let own = shard_of(&install::namespace(0), slots);
        let is_meant = |namespace: &str| (shard_of(namespace, slots) == own) == of_its_own;
        let (objects, took) = changed_in(self.environment, CHANGE, is_meant)?;
        ensure!(objects > 0, "all is of one share");
        Ok((objects, took))
    }

    /// Mends the bug, takes the limit away, and waits until every page is there again.
    fn mended(&self) -> Result<String> {
        let (environment, clock) = (self.environment, Instant::now());
        environment.api.merge(&self.website, &bug(&Value::Null))?;
        // What the replica has read of the website may be a moment old. Without the limit it would delete on, also
        // after every page was there again.
        self.followed(true)?;
        environment.api.delete(&breaker(environment), &json!({}))?;
        let reference = environment.reference.get().context("there is no reference")?;
        environment.until("every page to be there again", WHOLE_WITHIN, || {
            let made = environment.made(0..environment.namespaces)?;
            Ok(made.keys().eq(reference.keys()).then_some(()))
        })?;
        Ok(format!(
            "the bug mended, and the limit taken away: every page is there again after {}",
            seconds(clock.elapsed())
        ))
    }
}

/// The path of the CircuitBreaker.
fn breaker(environment: &Environment) -> String {
    let namespace = environment.observer.operator().namespace;
    format!("/apis/{}/{}/namespaces/{namespace}/circuitbreakers/{BREAKER}", names::GROUP, names::VERSION)
}

fn bug(value: &Value) -> Value {
    json!({"metadata": {"annotations": {BUG: value}}})
}

fn is_true(status: &Value, condition: &str) -> bool {
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    conditions.any(|one| one["type"] == condition && one["status"] == "True")
}
