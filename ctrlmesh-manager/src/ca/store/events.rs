//! Publishes Kubernetes events about the certificate authorities.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ctrlmesh_common::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder};
use tokio::time::{self, Instant};
use tracing::warn;

use crate::ca::authority::Names;
use crate::ca::rotation::{AuthorityKind, Rotation};

const REPORTER: &str = "ctrlmesh-manager";

/// How often a pending rotation is announced again. Kubernetes keeps an event for an hour.
const AGAIN: Duration = Duration::from_mins(30);

/// How long a kubelet may take to update a volume after its ConfigMap changed.
const FOLLOWED: Duration = Duration::from_mins(2);

const EVENT: Duration = Duration::from_secs(10);

/// Publishes events on the Secret.
pub(super) struct Reporter {
    recorder: Recorder,
    namespace: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CaEvent {
    /// Only the new authority may sign for these names; programs that started before do not trust it.
    NamesAdded {
        kind: AuthorityKind,
        names: String,
    },
    /// An authority will sign that operators which started before it do not trust.
    Follows {
        made: SystemTime,
        signs: SystemTime,
    },
    /// The next authority for new names is made only then.
    NamesWait {
        kind: AuthorityKind,
        until: SystemTime,
    },
    /// Authorities that were trusted only are no longer, for the bundle must stay small.
    Dropped {
        kind: AuthorityKind,
        count: usize,
    },
    NotWritten {
        why: String,
    },
}

/// Decides when a state that lasts is announced again.
#[derive(Debug, Default)]
pub(super) struct Reminder {
    announced: Vec<(CaEvent, Instant)>,
}

impl Reporter {
    pub(super) fn new(client: Client, namespace: &str) -> Self {
        Self { recorder: Recorder::new(client, REPORTER.into()), namespace: namespace.to_owned() }
    }

    /// Publishes an event on the Secret, even where there is none. Returns whether the event was written.
    pub(super) async fn publish(&self, event: &CaEvent) -> bool {
        let (reason, action, note) = event.text();
        warn!(reason, note, "certificate authorities");
        let secret = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Secret".to_owned()),
            name: Some(names::CA_SECRET.to_owned()),
            namespace: Some(self.namespace.clone()),
            ..ObjectReference::default()
        };
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        match time::timeout(EVENT, self.recorder.publish(&event, &secret)).await {
            Ok(Ok(())) => return true,
            Ok(Err(error)) => warn!(%error, "event not written"),
            Err(_elapsed) => warn!("event not written in time"),
        }
        false
    }
}

impl Reminder {
    pub(super) fn is_due(&self, event: &CaEvent, now: Instant) -> bool {
        !self.announced.iter().any(|(last, at)| last == event && now < *at + AGAIN)
    }

    pub(super) fn announced(&mut self, event: CaEvent, now: Instant) {
        self.announced.retain(|(last, at)| *last != event && now < *at + AGAIN);
        self.announced.push((event, now));
    }
}

impl CaEvent {
    /// That a successor is to sign.
    pub(super) fn follows(rotation: &Rotation) -> Option<Self> {
        rotation.successor().map(|(made, signs)| Self::Follows { made, signs })
    }

    /// That `names` have to wait for an authority that covers them.
    pub(super) fn wait(kind: AuthorityKind, rotation: &Rotation, names: &Names, now: SystemTime) -> Option<Self> {
        let until = rotation.new_names_time(now).filter(|until| *until > now)?;
        (!rotation.covers(names)).then_some(Self::NamesWait { kind, until })
    }

    /// Reason, action and note. Kubernetes merges events that differ in their note only.
    fn text(&self) -> (&'static str, &'static str, String) {
        match self {
            Self::NamesAdded { kind, names } => {
                let (who, action) = match kind {
                    AuthorityKind::Mesh => ("the API server is reached by", "MakeMeshAuthority"),
                    AuthorityKind::Manager => ("the manager is to be reached by", "MakeManagerAuthority"),
                };
                let note = format!(
                    "{who} {names}, which the {} so far may not speak for: another one does from now on, and programs that were started before have to be restarted if they dial these; for all other names nothing changes until that one signs for all, which is told in time",
                    kind.common_name()
                );
                ("NamesAdded", action, note)
            }
            Self::Follows { made, signs } => {
                let (made, signs) = (printed(*made + FOLLOWED), printed(*signs));
                let note = format!(
                    "the {} has a successor, which signs from {signs} on: enrolled operators that were started before {made}, or before ConfigMap {} of their namespace had it, and read what they believe only then, have to be restarted until that time",
                    AuthorityKind::Mesh.common_name(),
                    names::root_ca::MESH
                );
                ("AuthorityFollows", "MakeMeshAuthority", note)
            }
            Self::NamesWait { kind, until } => {
                let note = format!(
                    "names and addresses that the {} may not speak for came too often: the next authority for such names is made at {}; until then, programs that dial these fail",
                    kind.common_name(),
                    printed(*until)
                );
                ("NamesWait", "WaitForAuthority", note)
            }
            Self::Dropped { kind, count } => {
                let note = format!(
                    "{count} of the oldest predecessors of the {} are trusted no longer, because there are too many; none of them has signed anything that is still valid",
                    kind.common_name()
                );
                ("AuthorityDropped", "DropAuthorities", note)
            }
            Self::NotWritten { why } => {
                let note = format!(
                    "the replica that led cannot write this Secret, and has given its Lease up, so that another one may try: {why}"
                );
                ("NotWritten", "WriteAuthorities", note)
            }
        }
    }
}

fn printed(at: SystemTime) -> Timestamp {
    let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    i64::try_from(seconds).ok().and_then(|at| Timestamp::from_second(at).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::rotation::Step;

    #[test]
    fn an_event_says_when_the_successor_signs() {
        let signs = UNIX_EPOCH + Duration::from_hours(500_000);
        let made = signs - Duration::from_hours(24);
        let (reason, _, note) = CaEvent::Follows { made, signs }.text();
        assert_eq!(reason, "AuthorityFollows");
        assert!(note.contains("signs from 2027-01-15T08:00:00Z on"), "{note}");
        assert!(note.contains("started before 2027-01-14T08:02:00Z,"), "{note}");
    }

    #[test]
    fn a_pending_rotation_is_announced_again() {
        let (start, now) = (SystemTime::now(), Instant::now());
        let names = Names::of(["api.example.com"]);
        let validity = Duration::from_hours(800);
        let begin = Rotation::begin(AuthorityKind::Mesh, &names, validity, start, Vec::new()).unwrap();
        let mut reminder = Reminder::default();
        assert_eq!(CaEvent::follows(&begin), None, "there is none");
        let step =
            |rotation: Rotation, step| rotation.apply(step, AuthorityKind::Mesh, &names, validity, start).unwrap();
        let rotation = step(begin, Step::Prepare);
        let event = CaEvent::follows(&rotation).unwrap();
        assert!(reminder.is_due(&event, now), "it was not written");
        reminder.announced(event.clone(), now);
        reminder.announced(CaEvent::Dropped { kind: AuthorityKind::Mesh, count: 1 }, now);
        assert!(!reminder.is_due(&event, now + AGAIN / 2));
        assert!(reminder.is_due(&event, now + AGAIN));
        assert!(Reminder::default().is_due(&event, now), "another leader");
        let rotation = step(rotation, Step::Promote);
        assert_eq!(CaEvent::follows(&rotation), None, "it signs");
    }

    #[test]
    fn names_that_come_too_often_are_said_to_wait() {
        let (now, validity) = (SystemTime::now(), Duration::from_hours(800));
        let kind = AuthorityKind::Mesh;
        let names = |name: &str| Names::of(["kubernetes", name]);
        let rotation = Rotation::begin(kind, &names("a"), validity, now, Vec::new()).unwrap();
        assert_eq!(CaEvent::wait(kind, &rotation, &names("b"), now), None, "the first one is made at once");
        let rotation = rotation.apply(Step::Prepare, kind, &names("b"), validity, now).unwrap();
        assert_eq!(CaEvent::wait(kind, &rotation, &names("b"), now), None, "it is covered");
        let Some(event @ CaEvent::NamesWait { until, .. }) = CaEvent::wait(kind, &rotation, &names("c"), now) else {
            panic!("nothing said");
        };
        assert!(event.text().2.contains(&printed(until).to_string()));
        assert_eq!(rotation.due_step(&names("c"), now), None);
        assert_eq!(rotation.due_step(&names("c"), until), Some(Step::Prepare));
        assert_eq!(CaEvent::wait(kind, &rotation, &names("c"), until), None);
    }
}
