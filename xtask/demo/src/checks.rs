//! Checks of the steps. They rely on the audit log and on objects, never on what ctrlmesh reports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::slots::SlotSet;
use jiff::Timestamp;

use crate::audit::Resource;
use crate::environment::Environment;
use crate::history::{Activity, ListOrWatch, RequestRecord, Span};
use crate::observer::OwnershipSample;
use crate::rules::{LastMove, shard_of};
use crate::view::{Answers, Table};
use crate::write_check::{WriteCheck, once_seen, shards_of};

/// How long it may take until everything is as it should be again: the leader-election lock of a replica that was
/// killed runs for 15 s, and others build at the same time.
pub(crate) const WHOLE_WITHIN: Duration = Duration::from_mins(10);

/// What client-go counts in place of a status where the connection broke (`tools/metrics`, `rest/request.go`).
const NO_ANSWER: &str = "<error>";

/// Changes every object, each time in another way, and waits until the operator has followed.
pub(crate) fn touched(environment: &Environment) -> Result<String> {
    static TIMES: AtomicU64 = AtomicU64::new(1000);
    changed(environment, TIMES.fetch_add(1, Ordering::Relaxed))
}

/// Makes the change of this number to every object, and waits until the operator has followed.
pub(crate) fn changed(environment: &Environment, number: u64) -> Result<String> {
    let (objects, took) = changed_in(environment, number, |_| true)?;
    Ok(format!("{objects} objects changed, and followed by the operator, in {}", seconds(took)))
}

/// The same in the namespaces that are meant; gives how many objects there are, and how long it took.
pub(crate) fn changed_in(
    environment: &Environment,
    number: u64,
    is_meant: impl Fn(&str) -> bool,
) -> Result<(usize, Duration)> {
    let clock = Instant::now();
    let objects = environment.change(number, is_meant)?;
    environment.observer.settle()?;
    environment.observer.until("every change to be followed", WHOLE_WITHIN, |table| table.pending == 0)?;
    Ok((objects, clock.elapsed()))
}

/// Changes every object; gives how long the operator took to follow, and how many bytes each replica received for it.
pub(crate) fn followed(environment: &Environment) -> Result<(String, Vec<f64>)> {
    let before = received(environment)?;
    let seen = touched(environment)?;
    let after = received(environment)?;
    let more = |(pod, bytes): (&String, &f64)| {
        let earlier = before.get(pod).with_context(|| format!("{pod} is new"))?;
        Ok(bytes - earlier)
    };
    Ok((seen, after.iter().map(more).collect::<Result<_>>()?))
}

/// How many bytes each replica has received since it was started, as soon as all say so.
fn received(environment: &Environment) -> Result<BTreeMap<String, f64>> {
    // What they say is not older than this.
    environment.observer.settle()?;
    environment.until("each replica to say how many bytes it received", WHOLE_WITHIN, || {
        let pods = environment.observer.world().pods.into_iter().filter(|(_, pod)| pod.ready);
        let bytes = pods.map(|(name, pod)| Some((name, pod.received?)));
        Ok(bytes.collect::<Option<BTreeMap<_, _>>>().filter(|bytes| !bytes.is_empty()))
    })
}

/// What `ask` finds of who changed what of the work, from `start` until now, once all of that has been seen.
pub(crate) fn written<T>(
    environment: &Environment,
    start: Timestamp,
    ask: impl FnOnce(&WriteCheck<'_>, &Span) -> Result<T>,
) -> Result<T> {
    let settle = || environment.observer.settle();
    once_seen(start, settle, |span| {
        environment.observer.both(|world, history| ask(&WriteCheck::of(world, history), span))
    })
}

/// That there was work, and no object of it was changed by two replicas, though all could be.
pub(crate) fn steady(environment: &Environment, start: Timestamp) -> Result<String> {
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method is that of one lifetime only")]
    written(environment, start, |write_check, span| write_check.steady(span))
}

/// The same of all the time since something moved last, whatever died meanwhile; and that each object was changed by a
/// replica of the shard that has its slot.
pub(crate) fn still(environment: &Environment) -> Result<String> {
    let LastMove { since, canary } =
        environment.rules(|rules| rules.still()).context("nothing was ever divided, or it moves")?;
    let replicas = shards_of(&environment.observer.table());
    let report = written(environment, since, |write_check, span| {
        write_check.own(span, &replicas, |space| vec![shard_of(space, canary)])?;
        let length = span.end.duration_since(span.start).try_into().unwrap_or_default();
        Ok(format!("{}, each by its own, in the {}", write_check.steady(span)?, seconds(length)))
    })?;
    Ok(format!("{report} since something moved last"))
}

/// Whether the API server sees the operator's pods by their own addresses where nothing of ours stands between;
/// elsewhere they are masqueraded on the way, and no address tells who came past a proxy.
pub(crate) fn is_seen(environment: &Environment, start: Timestamp) -> Result<bool> {
    let span = start..environment.observer.settle()?;
    let own = environment.observer.addresses();
    let seen = environment.observer.history(|history| come_from(history.requests(&span), &own));
    ensure!(
        seen || environment.cluster.node().is_none(),
        "the API server of our own node does not see pods' addresses: {own:?}"
    );
    Ok(seen)
}

/// Whether there are requests, and all came from such addresses.
fn come_from<'a>(requests: impl Iterator<Item = &'a RequestRecord>, own: &BTreeSet<String>) -> bool {
    let mut requests = requests.peekable();
    requests.peek().is_some() && requests.all(|one| own.contains(&one.source))
}

/// That every request of the operator since `start` came from a proxy, where their addresses are known, and in any case
/// from an address that none of its pods has ever had, those that are gone again included. Pods that were never
/// enrolled are left out.
pub(crate) fn only_by_proxy(
    environment: &Environment,
    start: Timestamp,
    unsharded: &BTreeSet<String>,
) -> Result<String> {
    let span = start..environment.observer.settle()?;
    let (own, proxies) = (environment.observer.addresses(), environment.proxies()?);
    let requests: Vec<RequestRecord> = environment.observer.history(|history| {
        let enrolled = history.requests(&span).filter(|one| !unsharded.contains(&one.pod));
        enrolled.cloned().collect()
    });
    let is_seen = *environment.is_seen.get().context("nobody looked at its addresses before")?;
    by_proxy(&requests, &own, proxies.as_ref(), is_seen)
}

/// The same; `is_seen` says whether the API server sees pods' addresses at all.
fn by_proxy(
    requests: &[RequestRecord],
    own: &BTreeSet<String>,
    proxies: Option<&BTreeSet<String>>,
    is_seen: bool,
) -> Result<String> {
    ensure!(!requests.is_empty(), "there was no request at all");
    let past = past_the_proxy(requests, own, proxies);
    ensure!(past.is_none(), "past the proxy: {past:?}; pods have had {own:?}, proxies {proxies:?}");
    let report = if is_seen {
        "0 past the proxy"
    } else {
        "whether past the proxy cannot be told on this cluster: its API server does not see pods' own addresses"
    };
    Ok(format!("audit log: {} requests of the operator, {report}", requests.len()))
}

/// The first request that came from one of the operator's own addresses, or from one that is none of the proxies'.
fn past_the_proxy<'a>(
    requests: &'a [RequestRecord],
    own: &BTreeSet<String>,
    proxies: Option<&BTreeSet<String>>,
) -> Option<&'a RequestRecord> {
    requests.iter().find(|one| own.contains(&one.source) || proxies.is_some_and(|known| !known.contains(&one.source)))
}

/// That what runs now of a workload of ours is another container each: so it was killed, or restarted, indeed.
pub(crate) fn all_replaced(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Result<()> {
    ensure!(!before.is_empty() && !after.is_empty(), "nothing runs: {before:?} -> {after:?}");
    let stayed = after.values().find(|one| one.is_empty() || before.values().any(|old| old == *one));
    ensure!(stayed.is_none(), "it was not replaced: {before:?} -> {after:?}");
    Ok(())
}

/// That the operator's client saw nothing that it would not have seen without us but broken connections, which it makes
/// anew: of answers only success, 404 and 409, with which an operator works, and 410, which ends a watch. How many
/// connections broke is only said, of each replica: one for each request that was under way, and one more each time it
/// was tried again before a proxy was there.
pub(crate) fn only_retried(before: &BTreeMap<String, Answers>, after: &BTreeMap<String, Answers>) -> Result<String> {
    let (mut answered, mut broken) = (0.0, Vec::new());
    for (pod, answers) in after {
        let earlier = before.get(pod).with_context(|| format!("{pod} is new"))?;
        let mut broke = 0.0;
        for (status, count) in answers {
            let more = count - earlier.get(status).copied().unwrap_or_default();
            match status.parse::<u16>() {
                Ok(200..300 | 404 | 409 | 410) => answered += more,
                Err(_) if status == NO_ANSWER => broke += more,
                _ => ensure!(more <= 0.0, "{pod} was answered {status} {more} times"),
            }
        }
        broken.push(broke.to_string());
    }
    ensure!(answered > 0.0, "the operator asked for nothing");
    Ok(format!(
        "the operator's own count: {answered} answers as ever, no error; connections broken and made anew, by replica: {}",
        broken.join(" + ")
    ))
}

/// That each replica has asked for objects of work of its own shard's slots only. Pods that were never enrolled are
/// left out, and those of a version that was tried: the rule says nothing of its shards.
pub(crate) fn only_own(environment: &Environment, start: Timestamp, unsharded: &BTreeSet<String>) -> Result<String> {
    let divided: Vec<Resource> = environment.work.kinds().iter().map(|kind| kind.resource()).collect();
    let (shards, asked) = environment.observer.both(|world, history| {
        let of = |(pod, one): (&String, &Activity)| -> Vec<(String, ListOrWatch)> {
            one.asked().iter().map(|asked| (pod.clone(), asked.clone())).collect()
        };
        let is_tried = |pod: &String| {
            world.shards.get(pod).is_some_and(|shards| shards.iter().all(|shard| has_second_name(shard)))
        };
        let mut all: Vec<_> = history.pods().iter().flat_map(of).collect();
        all.retain(|(pod, asked)| {
            let counts = !unsharded.contains(pod) && !is_tried(pod);
            counts && asked.at >= start && divided.contains(&asked.resource)
        });
        (world.shards.clone(), all)
    });
    environment.rules(|rules| rules.limit(&shards, &asked))?;
    let count = asked.len();
    Ok(format!("audit log: {count} lists and watches of the work, each of its shard's slots only"))
}

/// Whether a shard is that of a version on trial, as long as none was promoted.
fn has_second_name(shard: &str) -> bool {
    shard.ends_with("-second")
}

/// That each namespace is with the shard that the rule gives its slot to; reckoned here, from its name.
pub(crate) fn landed(environment: &Environment, canary: SlotSet) -> Result<()> {
    environment.observer.both(|world, history| {
        for work in &world.work {
            let wanted = shard_of(&work.namespace, canary);
            let owners: Vec<_> = world.owners(work, history).collect();
            let shards: Vec<_> = owners.iter().map(|owner| world.pods[*owner].shard.as_deref()).collect();
            ensure!(shards == [Some(wanted.as_str())], "{}: {owners:?} of {shards:?}, not {wanted}", work.namespace);
        }
        Ok(())
    })
}

/// That the replicas are those that there were, and none was started again.
pub(crate) fn same_replicas(before: &Table, after: &Table) -> Result<()> {
    let known = |table: &Table| -> BTreeMap<String, u64> {
        table.replicas.iter().map(|(name, one)| (name.clone(), one.restarts)).collect()
    };
    ensure!(known(before) == known(after), "restarts: {:?} -> {:?}", known(before), known(after));
    Ok(())
}

pub(crate) fn shards(table: &Table) -> BTreeSet<&str> {
    table.replicas.values().filter_map(|one| one.shard.as_deref()).collect()
}

/// The replica of a shard, and how many namespaces it has.
pub(crate) fn of_shard(table: &Table, shard: &str) -> Result<(String, usize)> {
    let found = table.replicas.iter().find(|(_, one)| one.shard.as_deref() == Some(shard));
    let (name, one) = found.with_context(|| format!("no replica is of {shard}"))?;
    Ok((name.clone(), one.namespaces))
}

/// The most that was unowned and owned twice, and for how long at most: until we looked next.
pub(crate) fn worst(samples: &[OwnershipSample], when: &str) -> String {
    let unowned = samples.iter().map(|sample| sample.unowned).max().unwrap_or_default();
    let twice = samples.iter().map(|sample| sample.twice).max().unwrap_or_default();
    format!(
        "{when}: at most {unowned} objects without owner{}, {twice} watched by two{}",
        lasted(samples, |sample| sample.unowned > 0),
        lasted(samples, |sample| sample.twice > 0),
    )
}

/// The same where nothing moves, so that nothing may be watched by two at any moment.
pub(crate) fn one_owner(samples: &[OwnershipSample], when: &str) -> Result<String> {
    let report = worst(samples, when);
    ensure!(!samples.is_empty(), "{when}: nobody looked");
    ensure!(samples.iter().all(|sample| sample.twice == 0), "though nothing moved, {report}");
    Ok(report)
}

fn lasted(samples: &[OwnershipSample], is: impl Fn(&OwnershipSample) -> bool) -> String {
    let mut longest = Duration::ZERO;
    let mut begun: Option<Timestamp> = None;
    for sample in samples {
        if let Some(begun) = begun {
            let length = sample.at.duration_since(begun).try_into().unwrap_or_default();
            longest = longest.max(length);
        }
        begun = is(sample).then(|| begun.unwrap_or(sample.at));
    }
    if longest.is_zero() { String::new() } else { format!(" (for less than {})", seconds(longest)) }
}

pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

pub(crate) fn count(number: usize, one: &str, several: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {several}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(one, other)| ((*one).to_owned(), (*other).to_owned())).collect()
    }

    #[test]
    fn what_was_not_replaced_or_was_never_there_is_seen() {
        let before = named(&[("p", "c1")]);
        assert!(all_replaced(&before, &named(&[("p", "c2")])).is_ok());
        assert!(all_replaced(&before, &named(&[("q", "c3"), ("r", "c4")])).is_ok());
        assert!(all_replaced(&before, &named(&[("p", "c1")])).is_err());
        assert!(all_replaced(&before, &named(&[("p", "")])).is_err(), "it does not run yet");
        assert!(all_replaced(&named(&[]), &before).is_err());
        assert!(all_replaced(&before, &named(&[])).is_err());
    }

    #[test]
    fn bypasses_cannot_be_ruled_out_where_pods_are_masqueraded() {
        let asked =
            |source: &str| RequestRecord { at: Timestamp::UNIX_EPOCH, pod: "op".to_owned(), source: source.to_owned() };
        let own = BTreeSet::from(["10.0.0.7".to_owned()]);
        assert!(come_from([asked("10.0.0.7")].iter(), &own));
        assert!(!come_from([asked("10.0.0.7"), asked("192.0.2.1")].iter(), &own));
        assert!(!come_from([].iter(), &own), "there is nothing to tell by");
        let report = |is_seen| by_proxy(&[asked("192.0.2.1")], &own, None, is_seen).unwrap();
        assert!(report(true).contains("0 past the proxy"), "{}", report(true));
        assert!(report(false).contains("cannot be told on this cluster"), "{}", report(false));
        assert!(by_proxy(&[asked("10.0.0.7")], &own, None, false).is_err());
        assert!(by_proxy(&[], &own, None, true).is_err());
    }

    #[test]
    fn requests_from_former_or_unknown_pod_addresses_are_bypasses() {
        let asked =
            |source: &str| RequestRecord { at: Timestamp::UNIX_EPOCH, pod: "op".to_owned(), source: source.to_owned() };
        let own = BTreeSet::from(["10.0.0.7".to_owned()]);
        let proxies = BTreeSet::from(["192.0.2.1".to_owned()]);
        let past =
            |source: &str, known: bool| past_the_proxy(&[asked(source)], &own, known.then_some(&proxies)).is_some();
        assert!(past("10.0.0.7", true) && past("10.0.0.7", false));
        assert!(past("10.0.0.8", true) && !past("10.0.0.8", false));
        assert!(!past("192.0.2.1", true));
    }

    #[test]
    fn what_two_watch_though_nothing_moves_is_found() {
        let sample = |twice| OwnershipSample { at: Timestamp::UNIX_EPOCH, unowned: 3, twice };
        assert!(one_owner(&[sample(0), sample(0)], "meanwhile").is_ok());
        let found = one_owner(&[sample(0), sample(2)], "meanwhile").unwrap_err().to_string();
        assert!(found.contains("2 watched by two"), "{found}");
        assert!(one_owner(&[], "meanwhile").is_err());
    }

    #[test]
    fn a_client_that_saw_more_than_broken_connections_is_found() {
        let answers = |pairs: &[(&str, f64)]| -> BTreeMap<String, Answers> {
            let one = pairs.iter().map(|(status, count)| ((*status).to_owned(), *count));
            [("op".to_owned(), one.collect())].into()
        };
        let before = answers(&[("200", 5.0), ("503", 1.0)]);
        let only = |after: &[(&str, f64)]| only_retried(&before, &answers(after));
        let report = only(&[("200", 9.0), ("409", 1.0), ("503", 1.0), ("<error>", 2.0)]).unwrap();
        assert!(report.contains("5 answers") && report.ends_with("by replica: 2"), "{report}");
        assert!(only(&[("200", 9.0), ("refused", 1.0)]).is_err(), "nobody knows what that is");
        assert!(only(&[("200", 9.0), ("503", 2.0)]).is_err());
        assert!(only(&[("200", 5.0), ("<error>", 2.0)]).is_err(), "nothing was asked");
        assert!(only_retried(&BTreeMap::new(), &before).is_err(), "it is another pod");
    }
}
