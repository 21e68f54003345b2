//! Is what a replica would tell a proxy that comes back no older than what that was told?
//!
//! Mostly it is at once, or a moment later, when the watches have brought it. Otherwise the API server is asked, for it alone
//! knows whether a pod is gone, or a ShardingConfig, or is only not seen here yet. A proxy that knows more is sent away, and
//! comes back, here or to another replica.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::wire::Known;
use tokio::time::{self, Instant};
use tonic::Status;
use tracing::{info, warn};

use super::Push;
use super::told::is_of;
use crate::push::policy_store::{Posted, Reader, Said};
use crate::push::staleness::{Compared, Doubt};
use crate::rules::pod::PodName;
use crate::telemetry;

/// How long the watches are waited for before the API server is asked.
const MOMENT: Duration = Duration::from_millis(500);

/// How long a replica that knows less waits to learn more, in all.
const CATCH_UP: Duration = Duration::from_secs(3);

/// How long an answer is waited for: what the watches bring meanwhile may be newer, and never be the same.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// By pod, the ShardingConfig and its version before which there is nothing to tell its proxy.
pub(super) type Held = HashMap<PodName, (String, u64)>;

/// Waits where the proxy may have been told what is not known here yet: to be told what was before would give it what is
/// another's by now, and have it let go of pods that are there. Gives what must not be told yet all the same.
pub(super) async fn catch_up(
    push: &Push,
    reader: &mut Reader,
    known: &HashMap<PodName, Known>,
) -> Result<Held, Status> {
    let now = Instant::now();
    while !doubts(&reader.read(), known).is_empty() {
        if time::timeout_at(now + MOMENT, reader.changed()).await.is_err() {
            return settle(push, reader, known, now + CATCH_UP).await;
        }
    }
    Ok(Held::new())
}

/// Waits until what is posted is as new as what the API server says.
async fn settle(
    push: &Push,
    reader: &mut Reader,
    known: &HashMap<PodName, Known>,
    end: Instant,
) -> Result<Held, Status> {
    let subject = reader.subject().clone();
    let mut posted = push.doubts.posted();
    loop {
        let asked = doubts(&reader.read(), known);
        let answer = push.doubts.ask(&subject, &asked).await.map_err(|error| {
            warn!(error = telemetry::chain(&error), "a proxy is sent away, it may know more");
            Status::unavailable("what the proxy knows cannot be compared with the cluster now")
        })?;
        let again = end.min(Instant::now() + ASK_AGAIN);
        loop {
            // This first: what is read from the board then follows from it, or from what is newer.
            let plan = posted.borrow_and_update().clone();
            let left = doubts(&reader.read(), known);
            let compared = plan.map_or_else(
                || vec![Compared::Behind; left.len()],
                |plan| answer.compare(&left, &subject, &plan.snapshot),
            );
            let is_over = Instant::now() >= end;
            if let Some(held) = settled(left, &compared, is_over)? {
                return Ok(held);
            }
            if !matches!(time::timeout_at(again, posted.changed()).await, Ok(Ok(()))) {
                break;
            }
        }
    }
}

/// What of `left` is to be held, where nothing is to be waited for, or the time for that `is_over`.
fn settled(left: Vec<Doubt>, compared: &[Compared], is_over: bool) -> Result<Option<Held>, Status> {
    let mut held = Held::new();
    for (Doubt { pod, operators, newer }, compared) in left.into_iter().zip(compared) {
        match (compared, newer) {
            (Compared::Settled, None) => {}
            (Compared::Settled, Some(_)) => {
                warn!(%pod, "the pod's proxy was told what is newer than anything that is written down; it is told that");
            }
            (_, _) if !is_over => return Ok(None),
            (Compared::Unwritten, Some(newer)) => {
                info!(%pod, "the pod's proxy was told what is not written down here; it keeps that until it is");
                held.extend(operators.into_iter().map(|operator| (pod.clone(), (operator, newer))));
            }
            _ => {
                info!(%pod, "a proxy knows more of the pod than this replica, and is sent away");
                let status = "this replica knows less than the proxy; try another";
                return Err(Status::unavailable(status));
            }
        }
    }
    Ok(Some(held))
}

/// Whether a pod's proxy has something newer than what is `said` of it. What is not older any more holds for good.
pub(super) fn is_held(held: &mut Held, pod: &PodName, said: &Said) -> bool {
    let Some((operator, version)) = held.get(pod) else { return false };
    let is_older = said.operator.as_ref() == Some(operator) && said.version < *version;
    if !is_older {
        held.remove(pod);
    }
    is_older
}

/// Of which pods the proxy may have been told what is newer than what is posted: of those that are not posted, or as of
/// another ShardingConfig, or of none, or of an older version of it. Where nothing is said of one, it keeps what it has.
fn doubts(posted: &[Arc<Posted>], known: &HashMap<PodName, Known>) -> Vec<Doubt> {
    let posted: HashMap<&PodName, &Posted> = posted.iter().map(|one| (&one.pod, &**one)).collect();
    let doubt = |(pod, known): (&PodName, &Known)| {
        let doubt = |operators: &[&str], newer| {
            let operators = operators.iter().filter(|one| !one.is_empty());
            let operators = operators.map(|one| (*one).to_owned()).collect();
            Some(Doubt { pod: pod.clone(), operators, newer })
        };
        let Some(posted) = posted.get(pod).filter(|posted| is_of(known, posted)) else {
            return doubt(&[], None);
        };
        let said = posted.said.as_ref()?;
        let operator = said.operator.as_deref().unwrap_or_default();
        if operator != known.operator {
            return doubt(&[operator, &known.operator], None);
        }
        let newer = known.version > said.version;
        newer.then(|| doubt(&[operator], Some(known.version))).flatten()
    };
    known.iter().filter_map(doubt).collect()
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::Policy;

    use super::super::told::{id, known};
    use super::*;
    use crate::push::policy_store::{Board, Said, Subject};
    use crate::rules::compile;

    /// What a proxy of `ops/a` knows, by ShardingConfig and version.
    fn known_by(operator: &str, version: u64) -> HashMap<PodName, Known> {
        let pod = Some(id(&"ops/a".parse().unwrap(), "1"));
        let operator = operator.to_owned();
        known(vec![Known { pod, operator, version, ..Known::default() }])
    }

    /// That pod as it is posted, in this incarnation.
    fn posted(uid: &str, told: impl Into<Option<compile::Told>>) -> Vec<Arc<Posted>> {
        let (board, pod) = (Arc::<Board>::default(), "ops/a".parse::<PodName>().unwrap());
        let said = told.into().as_ref().map(Said::from);
        board.publish([Posted { pod: pod.clone(), uid: uid.to_owned(), node: None, said }]);
        board.follow(Subject::Pod(pod, uid.to_owned())).read()
    }

    fn by(operator: &str, version: u64) -> compile::Told {
        let operator = Some(operator.to_owned());
        compile::Told::new(None, operator, version, Policy::default())
    }

    #[test]
    fn what_is_not_written_down_is_waited_for_and_then_held_and_nothing_else_is() {
        let doubt = |pod: &str, newer| Doubt {
            pod: pod.parse().unwrap(),
            operators: vec!["ops/op".to_owned()],
            newer,
        };
        let both = || vec![doubt("ops/a", None), doubt("ops/b", Some(5))];
        let (settled_, unwritten) = (Compared::Settled, Compared::Unwritten);
        let all = settled(both(), &[settled_, settled_], false).unwrap();
        assert_eq!(all, Some(Held::new()));
        let of = |is_over| settled(both(), &[settled_, unwritten], is_over).unwrap();
        assert_eq!(of(false), None);
        let held = ("ops/b".parse().unwrap(), ("ops/op".to_owned(), 5));
        assert_eq!(of(true), Some(Held::from([held])));
        let behind = [Compared::Behind, unwritten];
        assert_eq!(settled(both(), &behind, false).unwrap(), None);
        assert!(settled(both(), &behind, true).is_err());
    }

    #[test]
    fn what_is_held_is_told_once_it_is_no_older_or_of_another_sharding_config() {
        let pod: PodName = "ops/a".parse().unwrap();
        let held = || Held::from([(pod.clone(), ("ops/op".to_owned(), 5))]);
        let says = |held: &mut Held, told| {
            is_held(held, &pod, posted("1", told)[0].said.as_ref().unwrap())
        };
        for told in [by("ops/op", 5), by("ops/b", 1), compile::Told::nothing()] {
            let mut held = held();
            assert!(says(&mut held, by("ops/op", 4)));
            assert!(!says(&mut held, told));
            assert!(!says(&mut held, by("ops/op", 4)), "for good");
        }
    }

    #[test]
    fn what_is_posted_is_in_doubt_where_it_would_take_something_from_the_proxy() {
        let nothing = Some(compile::Told::nothing());
        let of = |posted: &[Arc<Posted>], known| {
            doubts(posted, &known).pop().map(|doubt| (doubt.operators.join(" "), doubt.newer))
        };
        let knows = || known_by("ops/op", 5);
        let doubt = |operators: &str, newer| Some((operators.to_owned(), newer));
        assert_eq!(of(&[], knows()), doubt("", None), "it is not there");
        assert_eq!(of(&posted("2", by("ops/op", 9)), knows()), doubt("", None), "nor this one");
        assert_eq!(of(&posted("1", nothing.clone()), knows()), doubt("ops/op", None));
        assert_eq!(of(&posted("1", by("ops/b", 9)), knows()), doubt("ops/b ops/op", None));
        assert_eq!(of(&posted("1", by("ops/b", 9)), known_by("", 0)), doubt("ops/b", None));
        assert_eq!(of(&posted("1", by("ops/op", 4)), knows()), doubt("ops/op", Some(5)));
        for holds in [None, Some(by("ops/op", 5)), Some(by("ops/op", 6))] {
            assert_eq!(of(&posted("1", holds), knows()), None);
        }
        assert_eq!(of(&posted("1", nothing), known_by("", 0)), None);
    }
}
