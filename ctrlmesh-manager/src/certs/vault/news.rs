//! What are people told of the authorities?

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ctrlmesh_common::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder};
use tokio::time;
use tracing::warn;

use crate::certs::line::Kind;

/// As whom events are told.
const REPORTER: &str = "ctrlmesh-manager";

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
    /// There is an authority that will sign, which operators that run do not believe.
    Follows {
        /// From when on, unless names that are new come between.
        signs: SystemTime,
    },
    /// The leader cannot write the Secret.
    NotWritten {
        /// Why.
        why: String,
    },
}

// === impl Reporter ===

impl Reporter {
    pub(super) fn new(client: Client, namespace: &str) -> Self {
        Self { recorder: Recorder::new(client, REPORTER.into()), namespace: namespace.to_owned() }
    }

    /// Tells those who look at the Secret, also where there is none.
    pub(super) async fn tell(&self, news: &News) {
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
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "event not written"),
            Err(_elapsed) => warn!("event not written in time"),
        }
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
                    "{who} {names}, which the {} so far may not speak for: another one does from now on, and programs that were started before have to be restarted if they dial these; for all other names nothing changes",
                    kind.called()
                );
                ("NamesAdded", action, note)
            }
            Self::Follows { signs } => {
                let seconds = signs.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                let signs = i64::try_from(seconds).ok().map(Timestamp::from_second);
                let signs = signs.and_then(Result::ok).unwrap_or_default();
                let note = format!(
                    "the {} has a successor, which signs from {signs} on: enrolled operators that were started before now, and read what they believe only then, have to be restarted until that time",
                    Kind::Mesh.called()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_the_successor_signs_is_said() {
        let signs = UNIX_EPOCH + Duration::from_hours(500_000);
        let (reason, _, note) = News::Follows { signs }.said();
        assert_eq!(reason, "AuthorityFollows");
        assert!(note.contains("signs from 2027-01-15T08:00:00Z on"), "{note}");
    }
}
