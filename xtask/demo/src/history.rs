//! Records from the audit log which pod requested what, and which pod changed which object when.
//!
//! Pure: is fed the lines of the audit log in their order, of one operator's service account, and answers questions
//! about spans of time. Nothing of it is our own word: it is what the API server saw.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ctrlmesh_common::selector::{Labels, Selector};
use jiff::{SignedDuration, Timestamp};

use crate::audit::{Event, Object, Request, Resource};

/// How long who watched a kind still does after the watch has ended: a client that is cut off asks again after 0.8 to
/// 1.6 s (client-go `tools/cache/reflector.go`, `NewReflectorWithOptions`: a backoff of 800 ms at first, with as much
/// again of jitter). Whoever takes longer than that is cut off.
const ASKS_AGAIN_WITHIN: SignedDuration = SignedDuration::from_secs(2);

/// A span of time.
pub type Span = Range<Timestamp>;

/// What one operator's pods did.
#[derive(Clone, Debug, Default)]
pub struct AuditHistory {
    user: String,
    pods: BTreeMap<String, Activity>,
    writes: Vec<Write>,
    requests: Vec<RequestRecord>,
    /// The latest moment that the log speaks of, whoever did something then: now, by the API server's own clock.
    latest: Timestamp,
}

/// A request, of whatever kind and with whatever outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRecord {
    /// When.
    pub at: Timestamp,
    /// Whose.
    pub pod: String,
    /// The address that it came from.
    pub source: String,
}

/// What one pod did.
#[derive(Clone, Debug, Default)]
pub struct Activity {
    /// Requests that were answered with success.
    pub answered: u64,
    /// Requests that were refused as not allowed (403).
    pub refused: u64,
    /// The programs that made them, up to the first slash.
    pub agents: BTreeSet<String>,
    /// What it watches now, by request.
    watches: BTreeMap<String, ListOrWatch>,
    /// The watch of each kind that ended last, with when it did: a watch that is cut goes on in another one soon.
    ended: BTreeMap<Resource, ListOrWatch>,
    /// All that it has ever listed or watched.
    asked: Vec<ListOrWatch>,
}

/// A list or a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListOrWatch {
    /// When.
    pub at: Timestamp,
    /// The kind.
    pub resource: Resource,
    /// The namespace; empty: all.
    pub namespace: String,
    /// Which objects; nothing where the selector cannot be read.
    pub selector: Option<Selector>,
}

/// An object was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// When.
    pub at: Timestamp,
    /// By whom.
    pub pod: String,
    /// Which.
    pub object: Object,
    /// Whether it is gone by that, or will be.
    pub is_delete: bool,
}

/// An object that two pods took turns in changing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// Which.
    pub object: Object,
    /// Who, in turn, and from when on.
    pub turns: Vec<(Timestamp, String)>,
}

impl AuditHistory {
    /// An empty history of the pods whose tokens are those of the service account `name` in `namespace`.
    pub fn of(namespace: &str, name: &str) -> Self {
        let user = format!("system:serviceaccount:{namespace}:{name}");
        Self { user, ..Self::default() }
    }

    /// Takes a line of the log; what others did is passed over.
    pub fn add(&mut self, event: Event) {
        self.latest = self.latest.max(event.at);
        if event.user != self.user {
            return;
        }
        let Some(pod) = event.pod else { return };
        let activity = self.pods.entry(pod.clone()).or_default();
        self.requests.push(RequestRecord { at: event.at, pod: pod.clone(), source: event.source });
        activity.agents.insert(event.agent.split('/').next().unwrap_or_default().to_owned());
        let good = (200..300).contains(&event.code);
        if event.ended {
            activity.answered += u64::from(good);
            activity.refused += u64::from(event.code == 403);
        }
        match event.request {
            Request::Read { resource, namespace, selector, watch } if good => {
                let asked = ListOrWatch { at: event.at, resource, namespace, selector };
                if watch && event.ended {
                    activity.watches.remove(&event.id);
                    activity.ended.insert(asked.resource.clone(), asked);
                } else {
                    activity.asked.push(asked.clone());
                    if watch {
                        activity.watches.insert(event.id, asked);
                    }
                }
            }
            Request::Write(object) if good && event.ended => {
                self.writes.push(Write { at: event.at, pod, object, is_delete: event.verb == "delete" });
            }
            _ => {}
        }
    }

    /// The pods that made requests.
    pub fn pods(&self) -> &BTreeMap<String, Activity> {
        &self.pods
    }

    /// What a pod watches now of `resource`; between two watches, what it watched last.
    pub fn watching(&self, pod: &str, resource: &Resource) -> impl Iterator<Item = &ListOrWatch> {
        let since = self.latest.checked_sub(ASKS_AGAIN_WITHIN).unwrap_or(Timestamp::MIN);
        self.pods.get(pod).into_iter().flat_map(move |one| one.watching(resource, since))
    }

    /// Whether what a pod watches now has, of `resource`, the object with these labels in `namespace`.
    pub fn sees(&self, pod: &str, resource: &Resource, namespace: &str, labels: &Labels) -> bool {
        self.watching(pod, resource).any(|asked| asked.covers(namespace, labels))
    }

    /// All requests in a span; a watch counts when it begins and when it ends.
    pub fn requests(&self, span: &Span) -> impl Iterator<Item = &RequestRecord> {
        self.requests.iter().filter(move |one| span.contains(&one.at))
    }

    /// The changes in a span, in the order of the log.
    pub fn writes(&self, span: &Span) -> impl Iterator<Item = &Write> {
        self.writes.iter().filter(move |write| span.contains(&write.at))
    }

    /// The objects that more than one pod changed in a span in which nothing moves: there must be none.
    pub fn shared(&self, span: &Span) -> Vec<Conflict> {
        let several = |turns: &[(Timestamp, String)]| turns.len() > 1;
        self.conflicts(span, several)
    }

    /// The objects that a pod changed again after another one had: it did not know, or did not mind, that they were no
    /// longer its own. In a span in which each object moves at most once there must be none.
    pub fn returned(&self, span: &Span) -> Vec<Conflict> {
        let again = |turns: &[(Timestamp, String)]| returned(turns).next().is_some();
        self.conflicts(span, again)
    }

    fn conflicts(&self, span: &Span, is_one: impl Fn(&[(Timestamp, String)]) -> bool) -> Vec<Conflict> {
        let mut turns: BTreeMap<&Object, Vec<(Timestamp, String)>> = BTreeMap::new();
        for write in self.writes(span) {
            let turns = turns.entry(&write.object).or_default();
            if turns.last().is_none_or(|(_, last)| *last != write.pod) {
                turns.push((write.at, write.pod.clone()));
            }
        }
        let conflicts = turns.into_iter().filter(|(_, turns)| is_one(turns));
        conflicts.map(|(object, turns)| Conflict { object: object.clone(), turns }).collect()
    }
}

impl Activity {
    /// What it watches of `resource`; between two watches the last one, where that ended later than `since`.
    fn watching(&self, resource: &Resource, since: Timestamp) -> impl Iterator<Item = &ListOrWatch> {
        let open = || self.watches.values().filter(|asked| asked.resource == *resource);
        let ended = self.ended.get(resource).filter(|asked| asked.at > since);
        open().chain(ended.filter(|_| open().next().is_none()))
    }

    /// What it has ever listed or watched, in the order of the log.
    pub fn asked(&self) -> &[ListOrWatch] {
        &self.asked
    }
}

impl Conflict {
    /// Who changed it again after another one had.
    pub fn returned(&self) -> impl Iterator<Item = &str> {
        returned(&self.turns)
    }
}

fn returned(turns: &[(Timestamp, String)]) -> impl Iterator<Item = &str> {
    let pods = turns.iter().enumerate().map(|(at, (_, pod))| (&turns[..at], pod.as_str()));
    pods.filter(|(before, pod)| before.iter().any(|(_, one)| one == pod)).map(|(_, pod)| pod)
}

impl ListOrWatch {
    /// Whether the object with these labels in `namespace` is among what was asked for. A selector that cannot be
    /// read counts as everything.
    pub fn covers(&self, namespace: &str, labels: &Labels) -> bool {
        let near = self.namespace.is_empty() || self.namespace == namespace;
        near && self.selector.as_ref().is_none_or(|selector| selector.matches(labels))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn websites() -> Resource {
        Resource::new("web.example.com", "websites")
    }

    fn event(second: i64, pod: &str, request: Request) -> Event {
        Event {
            id: format!("{pod}{second}"),
            ended: true,
            at: at(second),
            user: "system:serviceaccount:ops:op".to_owned(),
            pod: Some(pod.to_owned()),
            agent: "op/v1 (linux)".to_owned(),
            source: "10.0.0.1".to_owned(),
            request,
            verb: "update".to_owned(),
            code: 200,
        }
    }

    fn write(second: i64, pod: &str, name: &str) -> Event {
        write_in("a", second, pod, name)
    }

    pub(crate) fn write_in(namespace: &str, second: i64, pod: &str, name: &str) -> Event {
        let (resource, namespace) = (websites(), namespace.to_owned());
        write_of(Object { resource, namespace, name: name.to_owned() }, second, pod)
    }

    pub(crate) fn write_of(object: Object, second: i64, pod: &str) -> Event {
        event(second, pod, Request::Write(object))
    }

    pub(crate) fn history(events: impl IntoIterator<Item = Event>) -> AuditHistory {
        let mut history = AuditHistory::of("ops", "op");
        events.into_iter().for_each(|event| history.add(event));
        history
    }

    #[test]
    fn an_object_that_moves_once_is_shared_and_never_returned() {
        let history = history([write(1, "x", "one"), write(2, "x", "one"), write(3, "y", "one"), write(4, "y", "two")]);
        assert!(history.shared(&(at(0)..at(3))).is_empty() && history.shared(&(at(3)..at(9))).is_empty());
        let shared = history.shared(&(at(0)..at(9)));
        assert_eq!(shared.len(), 1);
        assert_eq!(shared[0].turns, [(at(1), "x".to_owned()), (at(3), "y".to_owned())]);
        assert!(history.returned(&(at(0)..at(9))).is_empty());
    }

    #[test]
    fn who_writes_after_the_next_owner_did_has_returned() {
        let history = history([write(1, "x", "one"), write(2, "y", "one"), write(3, "x", "one")]);
        assert_eq!(history.returned(&(at(0)..at(9))).len(), 1);
        assert!(history.returned(&(at(2)..at(9))).is_empty(), "there it moved back once");
    }

    #[test]
    fn refused_writes_others_and_those_who_are_no_pods_do_not_count() {
        let refused = Event { code: 403, ..write(1, "x", "one") };
        let other = Event { user: "admin".to_owned(), ..write(1, "x", "one") };
        let nobody = Event { pod: None, ..write(1, "x", "one") };
        let history = history([refused, other, nobody]);
        assert_eq!(history.writes(&(at(0)..at(9))).count(), 0);
        assert_eq!((history.pods().len(), history.pods()["x"].refused), (1, 1));
    }

    #[test]
    fn a_pod_sees_what_it_watches_until_it_watches_something_else() {
        let read = |selector: &str| {
            let selector = Selector::parse(selector).ok();
            Request::Read { resource: websites(), namespace: String::new(), selector, watch: true }
        };
        let begin =
            |id: &str, selector: &str| Event { ended: false, id: id.to_owned(), ..event(1, "x", read(selector)) };
        let end = Event { id: "w".to_owned(), ..event(5, "x", read("slot in (1,2)")) };
        let labels = |slot: &str| Labels::from([("slot".to_owned(), slot.to_owned())]);
        let mut history = history([begin("w", "slot in (1,2)")]);
        let sees = |history: &AuditHistory, slot| history.sees("x", &websites(), "a", &labels(slot));
        assert!(sees(&history, "1") && !sees(&history, "3"));
        assert!(!history.sees("x", &Resource::new("", "pods"), "a", &labels("1")));
        assert!(!history.sees("y", &websites(), "a", &labels("1")));
        history.add(end);
        assert!(sees(&history, "1"), "the next one has not begun");
        history.add(begin("v", "slot in (2,3)"));
        assert!(!sees(&history, "1") && sees(&history, "3"));
        assert_eq!(history.pods()["x"].asked().len(), 2);
    }

    #[test]
    fn a_pod_that_was_cut_off_and_does_not_come_back_sees_nothing() {
        let read = Request::Read {
            resource: websites(),
            namespace: String::new(),
            selector: Selector::parse("").ok(),
            watch: true,
        };
        let end = event(5, "x", read);
        let mut history = history([Event { ended: false, ..end.clone() }, end]);
        let sees = |history: &AuditHistory| history.sees("x", &websites(), "a", &Labels::new());
        // Somebody else's requests say what time it is.
        let somebody = |second| Event { user: "admin".to_owned(), ..write(second, "x", "one") };
        history.add(somebody(6));
        assert!(sees(&history));
        history.add(somebody(7));
        assert!(!sees(&history));
    }
}
