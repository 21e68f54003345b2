//! Ensures that a reconnecting proxy is not sent older state than it has.
//!
//! The watches usually bring newer state at once or in a moment. Otherwise the API server is asked, because only it
//! knows what was deleted and what this replica has not seen yet. A proxy that knows more is disconnected, and tries
//! this or another replica again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::wire::PolicySummary;
use tokio::time::{self, Instant};
use tonic::Status;
use tracing::{info, warn};

use super::PushService;
use super::delivery::is_of;
use crate::push::policy_store::{EnrolledPod, Reader};
use crate::push::staleness::{StaleCandidate, Staleness};
use crate::rules::compile::CompiledPolicy;
use crate::rules::pod::PodName;
use crate::telemetry;

/// How long to wait for the watches, before the API server is asked.
const MOMENT: Duration = Duration::from_millis(500);

/// How long a replica that is behind waits, in all.
const CATCH_UP: Duration = Duration::from_secs(3);

/// How long one answer is used. The watches may skip the very state that it describes.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// By pod: a ShardingConfig and its version. Older policies are not sent.
pub(super) type MinimumVersions = HashMap<PodName, (String, u64)>;

/// Waits where the proxy may have newer state. Older state would give it objects of another shard, or make it drop
/// existing pods.
///
/// Returns which policies must not be sent yet all the same.
pub(super) async fn catch_up(
    push: &PushService,
    reader: &mut Reader,
    known: &HashMap<PodName, PolicySummary>,
) -> Result<MinimumVersions, Status> {
    let now = Instant::now();
    while !candidates(&reader.read(), known).is_empty() {
        if time::timeout_at(now + MOMENT, reader.changed()).await.is_err() {
            return settle(push, reader, known, now + CATCH_UP).await;
        }
    }
    Ok(MinimumVersions::new())
}

/// Waits until the stored policies are as new as the API server's answer.
async fn settle(
    push: &PushService,
    reader: &mut Reader,
    known: &HashMap<PodName, PolicySummary>,
    end: Instant,
) -> Result<MinimumVersions, Status> {
    let subject = reader.subject().clone();
    let mut plans = push.staleness.published();
    loop {
        let asked = candidates(&reader.read(), known);
        let answer = push.staleness.ask(&subject, &asked).await.map_err(|error| {
            warn!(error = telemetry::chain(&error), "a proxy is sent away, it may know more");
            Status::unavailable("what the proxy knows cannot be compared with the cluster now")
        })?;
        let again = end.min(Instant::now() + ASK_AGAIN);
        loop {
            // Taken first, so that what is read from the store is at least as new.
            let plan = plans.borrow_and_update().clone();
            let left = candidates(&reader.read(), known);
            let compared = plan.map_or_else(
                || vec![Staleness::Behind; left.len()],
                |plan| answer.compare(&left, &subject, &plan.snapshot),
            );
            let is_over = Instant::now() >= end;
            if let Some(held_back) = settled(left, &compared, is_over)? {
                return Ok(held_back);
            }
            if !matches!(time::timeout_at(again, plans.changed()).await, Ok(Ok(()))) {
                break;
            }
        }
    }
}

/// The policies to hold back; none where the caller has to wait on. `is_over` says that it must not.
fn settled(
    left: Vec<StaleCandidate>,
    compared: &[Staleness],
    is_over: bool,
) -> Result<Option<MinimumVersions>, Status> {
    let mut held_back = MinimumVersions::new();
    for (StaleCandidate { pod, operators, newer }, compared) in left.into_iter().zip(compared) {
        match (compared, newer) {
            (Staleness::UpToDate, None) => {}
            (Staleness::UpToDate, Some(_)) => {
                warn!(%pod, "the pod's proxy has a newer policy than any status; it gets the one of the status");
            }
            (_, _) if !is_over => return Ok(None),
            (Staleness::Unwritten, Some(newer)) => {
                info!(%pod, "the pod's proxy has a policy whose epoch no status has yet; it keeps that policy until then");
                held_back.extend(operators.into_iter().map(|operator| (pod.clone(), (operator, newer))));
            }
            _ => {
                info!(%pod, "a proxy knows more of the pod than this replica, and is sent away");
                let status = "this replica knows less than the proxy; try another";
                return Err(Status::unavailable(status));
            }
        }
    }
    Ok(Some(held_back))
}

/// Whether the policy must not be sent yet. Once it may be, the entry is dropped.
pub(super) fn is_held(held_back: &mut MinimumVersions, pod: &PodName, policy: &CompiledPolicy) -> bool {
    let Some((operator, version)) = held_back.get(pod) else { return false };
    let is_older = policy.operator.as_ref() == Some(operator) && policy.version < *version;
    if !is_older {
        held_back.remove(pod);
    }
    is_older
}

/// Pods of which the proxy may have a newer policy: those that are not stored, and those with another or an older
/// ShardingConfig.
///
/// A pod without a policy keeps what it has.
fn candidates(pods: &[Arc<EnrolledPod>], known: &HashMap<PodName, PolicySummary>) -> Vec<StaleCandidate> {
    let pods: HashMap<&PodName, &EnrolledPod> = pods.iter().map(|one| (&one.name, &**one)).collect();
    let candidate = |(pod, known): (&PodName, &PolicySummary)| {
        let candidate = |operators: &[&str], newer| {
            let operators = operators.iter().filter(|one| !one.is_empty());
            let operators = operators.map(|one| (*one).to_owned()).collect();
            Some(StaleCandidate { pod: pod.clone(), operators, newer })
        };
        let Some(stored) = pods.get(pod).filter(|stored| is_of(known, stored)) else {
            return candidate(&[], None);
        };
        let policy = stored.policy.as_ref()?;
        let operator = policy.operator.as_deref().unwrap_or_default();
        if operator != known.operator {
            return candidate(&[operator, &known.operator], None);
        }
        let newer = known.version > policy.version;
        newer.then(|| candidate(&[operator], Some(known.version))).flatten()
    };
    known.iter().filter_map(candidate).collect()
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::Policy;
    use ctrlmesh_common::wire::PodId;

    use super::super::delivery::known;
    use super::*;
    use crate::push::policy_store::{PolicyStore, Subject};

    /// What a proxy of `ops/a` reports.
    fn known_by(operator: &str, version: u64) -> HashMap<PodName, PolicySummary> {
        let pod = Some(PodId::of(&"ops/a".parse().unwrap(), "1"));
        let operator = operator.to_owned();
        known(vec![PolicySummary { pod, operator, version, ..PolicySummary::default() }])
    }

    /// That pod in the store.
    fn stored(uid: &str, policy: impl Into<Option<CompiledPolicy>>) -> Vec<Arc<EnrolledPod>> {
        let (store, name) = (Arc::<PolicyStore>::default(), "ops/a".parse::<PodName>().unwrap());
        let policy = policy.into().map(Arc::new);
        store.publish([EnrolledPod { name: name.clone(), uid: uid.to_owned(), node: None, policy }]);
        store.follow(Subject::Pod(name, uid.to_owned())).read()
    }

    fn by(operator: &str, version: u64) -> CompiledPolicy {
        let operator = Some(operator.to_owned());
        CompiledPolicy::new(None, operator, version, Policy::default())
    }

    #[test]
    fn only_an_unwritten_policy_is_held_back() {
        let candidate = |pod: &str, newer| StaleCandidate {
            pod: pod.parse().unwrap(),
            operators: vec!["ops/op".to_owned()],
            newer,
        };
        let both = || vec![candidate("ops/a", None), candidate("ops/b", Some(5))];
        let (up_to_date, unwritten) = (Staleness::UpToDate, Staleness::Unwritten);
        let all = settled(both(), &[up_to_date, up_to_date], false).unwrap();
        assert_eq!(all, Some(MinimumVersions::new()));
        let of = |is_over| settled(both(), &[up_to_date, unwritten], is_over).unwrap();
        assert_eq!(of(false), None);
        let held_back = ("ops/b".parse().unwrap(), ("ops/op".to_owned(), 5));
        assert_eq!(of(true), Some(MinimumVersions::from([held_back])));
        let behind = [Staleness::Behind, unwritten];
        assert_eq!(settled(both(), &behind, false).unwrap(), None);
        assert!(settled(both(), &behind, true).is_err());
    }

    #[test]
    fn a_held_back_policy_is_sent_once_it_is_not_older() {
        let pod: PodName = "ops/a".parse().unwrap();
        let held_back = || MinimumVersions::from([(pod.clone(), ("ops/op".to_owned(), 5))]);
        let held = |held_back: &mut MinimumVersions, policy: CompiledPolicy| is_held(held_back, &pod, &policy);
        for policy in [by("ops/op", 5), by("ops/b", 1), CompiledPolicy::nothing()] {
            let mut held_back = held_back();
            assert!(held(&mut held_back, by("ops/op", 4)));
            assert!(!held(&mut held_back, policy));
            assert!(!held(&mut held_back, by("ops/op", 4)), "for good");
        }
    }

    #[test]
    fn a_policy_that_would_take_something_may_be_stale() {
        let nothing = Some(CompiledPolicy::nothing());
        let of = |pods: &[Arc<EnrolledPod>], known| {
            candidates(pods, &known).pop().map(|candidate| (candidate.operators.join(" "), candidate.newer))
        };
        let knows = || known_by("ops/op", 5);
        let candidate = |operators: &str, newer| Some((operators.to_owned(), newer));
        assert_eq!(of(&[], knows()), candidate("", None), "it is not there");
        assert_eq!(of(&stored("2", by("ops/op", 9)), knows()), candidate("", None), "nor this one");
        assert_eq!(of(&stored("1", nothing.clone()), knows()), candidate("ops/op", None));
        assert_eq!(of(&stored("1", by("ops/b", 9)), knows()), candidate("ops/b ops/op", None));
        assert_eq!(of(&stored("1", by("ops/b", 9)), known_by("", 0)), candidate("ops/b", None));
        assert_eq!(of(&stored("1", by("ops/op", 4)), knows()), candidate("ops/op", Some(5)));
        for holds in [None, Some(by("ops/op", 5)), Some(by("ops/op", 6))] {
            assert_eq!(of(&stored("1", holds), knows()), None);
        }
        assert_eq!(of(&stored("1", nothing), known_by("", 0)), None);
    }
}
