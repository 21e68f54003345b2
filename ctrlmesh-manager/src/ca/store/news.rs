//! What are people told of the authorities?

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ctrlmesh_common::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder};
use tokio::time::{self, Instant};
use tracing::warn;

use crate::ca::rotation::{Kind, Line};

/// As whom events are told.
const REPORTER: &str = "ctrlmesh-manager";

/// After which time it is told again that another authority will sign.
const AGAIN: Duration = Duration::from_mins(30);

/// How long after an authority was made what pods read of it names it: volumes follow their ConfigMap in two minutes.
const FOLLOWED: Duration = Duration::from_mins(2);

/// How long an event may take to be written.
const EVENT: Duration = Duration::from_secs(10);

/// Tells people, by events of the Secret.
pub(super) struct Reporter {
    recorder: Recorder,
    namespace: String,
}

/// What they are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// There are names for which those who know only the authorities before do not believe anybody.
    NamesAdded {
        /// Whom they are of.
        kind: Kind,
        /// Printed.
        names: String,
    },
    /// There is an authority that will sign, which operators that run since before it do not believe.
    Follows {
        /// When it was made.
        made: SystemTime,
        /// From when on it signs.
        signs: SystemTime,
    },
    /// The leader cannot write the Secret.
    NotWritten {
        /// Why.
        why: String,
    },
}

/// When was it told last that another authority will sign? An event is kept for an hour.
#[derive(Debug, Default)]
pub(super) struct Reminder {
    told: Option<(News, Instant)>,
}

// === impl Reporter ===

impl Reporter {
    pub(super) fn new(client: Client, namespace: &str) -> Self {
        Self { recorder: Recorder::new(client, REPORTER.into()), namespace: namespace.to_owned() }
    }

    /// Tells those who look at the Secret, also where there is none; gives whether the event was written.
    pub(super) async fn tell(&self, news: &News) -> bool {
        let (reason, action, note) = news.said();
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

// === impl Reminder ===

impl Reminder {
    /// What is to be told of the successor, where it is time to.
    pub(super) fn due(&self, line: &Line, now: Instant) -> Option<News> {
        let news = line.follows().map(|(made, signs)| News::Follows { made, signs })?;
        let is_told = |(told, at): &(News, Instant)| *told == news && now < *at + AGAIN;
        (!self.told.as_ref().is_some_and(is_told)).then_some(news)
    }

    /// That was told.
    pub(super) fn told(&mut self, news: News, now: Instant) {
        self.told = Some((news, now));
    }
}

// === impl News ===

impl News {
    /// Reason, action and note. Events that differ in their note only are taken for one.
    fn said(&self) -> (&'static str, &'static str, String) {
        match self {
            Self::NamesAdded { kind, names } => {
                let (who, action) = match kind {
                    Kind::Mesh => ("the API server is reached by", "MakeMeshAuthority"),
                    Kind::Manager => ("the manager is to be reached by", "MakeManagerAuthority"),
                };
                let note = format!(
                    "{who} {names}, which the {} so far may not speak for: another one does from now on, and programs that were started before have to be restarted if they dial these; for all other names nothing changes until that one signs for all, which is told in time",
                    kind.called()
                );
                ("NamesAdded", action, note)
            }
            Self::Follows { made, signs } => {
                let (made, signs) = (printed(*made + FOLLOWED), printed(*signs));
                let note = format!(
                    "the {} has a successor, which signs from {signs} on: enrolled operators that were started before {made}, or before ConfigMap {} of their namespace had it, and read what they believe only then, have to be restarted until that time",
                    Kind::Mesh.called(),
                    names::root_ca::MESH
                );
                ("AuthorityFollows", "MakeMeshAuthority", note)
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
    use crate::ca::authority::Names;
    use crate::ca::rotation::Due;

    #[test]
    fn when_the_successor_signs_is_said() {
        let signs = UNIX_EPOCH + Duration::from_hours(500_000);
        let made = signs - Duration::from_hours(24);
        let (reason, _, note) = News::Follows { made, signs }.said();
        assert_eq!(reason, "AuthorityFollows");
        assert!(note.contains("signs from 2027-01-15T08:00:00Z on"), "{note}");
        assert!(note.contains("started before 2027-01-14T08:02:00Z,"), "{note}");
    }

    #[test]
    fn the_successor_is_told_of_again_while_it_does_not_sign() {
        let (start, now) = (SystemTime::now(), Instant::now());
        let names = Names::of(["api.example.com"]);
        let validity = Duration::from_hours(800);
        let begin = Line::begin(Kind::Mesh, &names, validity, start, Vec::new()).unwrap();
        let mut reminder = Reminder::default();
        assert_eq!(reminder.due(&begin, now), None, "there is none");
        let step = |line: Line, due| line.step(due, Kind::Mesh, &names, validity, start).unwrap();
        let line = step(begin, Due::Prepare);
        let news = reminder.due(&line, now).unwrap();
        assert!(reminder.due(&line, now).is_some(), "it was not written");
        reminder.told(news, now);
        assert_eq!(reminder.due(&line, now + AGAIN / 2), None);
        assert!(reminder.due(&line, now + AGAIN).is_some());
        assert!(Reminder::default().due(&line, now).is_some(), "another leader");
        let line = step(line, Due::Promote);
        assert_eq!(reminder.due(&line, now + 2 * AGAIN), None, "it signs");
    }
}
