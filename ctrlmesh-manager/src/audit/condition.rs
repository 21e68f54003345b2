//! Says in one condition whether every object of an operator has exactly one owner that watches it.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use super::comparison::{Audit, EXAMPLES, Gap, GapKey, GapObjects, KindAudit, KindKey, KindState};

/// Type of the condition.
pub const OWNED: &str = "Owned";

/// How long a gap has to last until the condition tells of it: pods that start have not begun to watch, and what moves
/// has no owner for a moment.
const GRACE: Duration = Duration::from_secs(30);

/// How often the condition says something else of the same reason: each time is a write.
const REPEAT: Duration = Duration::from_mins(1);

/// What the condition of a ShardingConfig says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedFinding {
    pub holds: bool,
    /// One word.
    pub reason: &'static str,
    pub message: String,
}

/// By `NAMESPACE/NAME` of the root or of the ShardingConfig by hand. One that is missing has no condition. Where it has
/// no finding, or nothing is said at all, the condition stays as it was.
pub type Ownerships = Option<BTreeMap<String, Option<OwnedFinding>>>;

/// What may last: of an operator and kind.
type Lasting = (String, KindKey, Trouble);

/// What may be wrong with a kind. For how long objects have no owner does not depend on why.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Trouble {
    Unknown,
    /// Whose the objects should be.
    Unowned(Option<String>),
    Doubled,
}

/// Since when there has been trouble.
#[derive(Debug, Default)]
pub(super) struct TroubleTimes(HashMap<Lasting, Instant>);

/// What the conditions said last, and since when.
#[derive(Debug, Default)]
pub(super) struct ConditionLog(BTreeMap<String, (OwnedFinding, Instant)>);

impl TroubleTimes {
    pub(super) fn see(&mut self, audit: &Audit, now: Instant) {
        let kinds = audit.iter().flat_map(|(name, kinds)| kinds.iter().map(move |(kind, state)| (name, kind, state)));
        let mut seen = HashMap::new();
        for (name, kind, state) in kinds {
            let troubles: Vec<Trouble> = match state {
                KindState::Audited(audit) => audit.gaps.keys().map(trouble).collect(),
                KindState::InProgress => Vec::new(),
                KindState::Unknown => vec![Trouble::Unknown],
            };
            for trouble in troubles {
                let key = (name.clone(), kind.clone(), trouble);
                let since = self.0.get(&key).copied().unwrap_or(now);
                seen.insert(key, since);
            }
        }
        self.0 = seen;
    }

    /// How long the oldest of the kind's objects without an owner has not been watched. `unix` is now in milliseconds
    /// since 1970.
    pub(super) fn unwatched(&self, name: &str, kind: &KindKey, audit: &KindAudit, now: Instant, unix: u64) -> Duration {
        let age = |(key, objects): (&GapKey, &GapObjects)| {
            let known = self.age(name, kind, trouble(key), now);
            let watched = objects.last_watched;
            // The proxy's clock may be ahead.
            let said = if watched == 0 { 0 } else { unix.saturating_sub(watched) };
            known.max(Duration::from_millis(said))
        };
        let unowned = audit.gaps.iter().filter(|((gap, _), _)| *gap != Gap::Doubled);
        unowned.map(age).max().unwrap_or_default()
    }

    fn age(&self, name: &str, kind: &KindKey, trouble: Trouble, now: Instant) -> Duration {
        let since = self.0.get(&(name.to_owned(), kind.clone(), trouble));
        since.map_or(Duration::ZERO, |since| now.saturating_duration_since(*since))
    }
}

impl ConditionLog {
    /// The findings of all operators; each counts for its ShardingConfigs.
    pub(super) fn findings(
        &mut self,
        audit: &Audit,
        told: &BTreeMap<String, Vec<String>>,
        times: &TroubleTimes,
        now: Instant,
    ) -> BTreeMap<String, Option<OwnedFinding>> {
        self.0.retain(|name, _| audit.contains_key(name));
        let mut findings = BTreeMap::new();
        // Of an operator without a kind there is nothing to say.
        for (name, kinds) in audit.iter().filter(|(_, kinds)| !kinds.is_empty()) {
            let finding = self.tell(name, finding(name, kinds, times, now), now);
            let all = told.get(name).into_iter().flatten();
            findings.extend(all.map(|config| (config.clone(), finding.clone())));
        }
        findings
    }

    fn tell(&mut self, name: &str, new: Option<OwnedFinding>, now: Instant) -> Option<OwnedFinding> {
        let told = self.0.get(name);
        let repeats = |(told, since): &&(OwnedFinding, Instant)| {
            new.as_ref().is_none_or(|new| {
                told.reason == new.reason && (told.message == new.message || now.duration_since(*since) < REPEAT)
            })
        };
        if let Some((told, _)) = told.filter(repeats) {
            return Some(told.clone());
        }
        let new = new?;
        self.0.insert(name.to_owned(), (new.clone(), now));
        Some(new)
    }
}

/// `None`: nothing is certain yet, and what was said before stays.
fn finding(
    name: &str,
    kinds: &BTreeMap<KindKey, KindState>,
    times: &TroubleTimes,
    now: Instant,
) -> Option<OwnedFinding> {
    let lasts = |kind: &KindKey, trouble| times.age(name, kind, trouble, now) >= GRACE;
    let (mut gaps, mut unknown, mut is_pending) = (Vec::new(), Vec::new(), false);
    for (kind, state) in kinds {
        match state {
            KindState::InProgress => is_pending = true,
            KindState::Unknown => {
                is_pending |= !lasts(kind, Trouble::Unknown);
                unknown.push(resource(kind));
            }
            KindState::Audited(audit) => {
                let (lasting, new): (Vec<_>, Vec<_>) =
                    audit.gaps.iter().partition(|(key, _)| lasts(kind, trouble(key)));
                gaps.extend(lasting.into_iter().map(|(key, objects)| (key, kind, objects)));
                is_pending |= !new.is_empty();
            }
        }
    }
    let said = |holds, reason, message| Some(OwnedFinding { holds, reason, message });
    let is_doubled = gaps.iter().any(|((gap, _), ..)| *gap == Gap::Doubled);
    if !gaps.is_empty() {
        let reason = if is_doubled { "OwnedTwice" } else { "Unowned" };
        return said(false, reason, message(&gaps));
    }
    if is_pending {
        return None;
    }
    if unknown.is_empty() {
        return said(true, "EveryObject", "every object that is divided has one owner, which watches it".to_owned());
    }
    let unknown = unknown.join(", ");
    said(false, "NotCounted", format!("the manager does not list or label {unknown}: nobody knows who owns them"))
}

fn trouble((gap, owner): &GapKey) -> Trouble {
    if *gap == Gap::Doubled { Trouble::Doubled } else { Trouble::Unowned(owner.clone()) }
}

type LastingGap<'a> = (&'a GapKey, &'a KindKey, &'a GapObjects);

/// What is worst comes first.
fn message(gaps: &[LastingGap<'_>]) -> String {
    let mut gaps: Vec<&LastingGap<'_>> = gaps.iter().collect();
    gaps.sort_by_key(|((gap, owner), kind, _)| (*gap != Gap::Doubled, *kind, *gap, owner));
    let mut room = EXAMPLES;
    let texts = gaps.into_iter().map(|((gap, owner), kind, objects)| {
        let shown = &objects.examples[..objects.examples.len().min(room)];
        room -= shown.len();
        let examples = if shown.is_empty() { String::new() } else { format!(" ({})", shown.join(", ")) };
        let owner = owner.as_deref().unwrap_or("the operator");
        format!("{} of {}{examples}: {}", objects.count, resource(kind), why(*gap, owner))
    });
    texts.collect::<Vec<_>>().join("; ")
}

fn why(gap: Gap, owner: &str) -> String {
    match gap {
        Gap::Unlabelled => "they lack the labels by which shards see them".to_owned(),
        Gap::Moving => "they are on their way to another shard".to_owned(),
        Gap::NoShard => "they are of no shard".to_owned(),
        Gap::NoPod => format!("{owner} has no pod"),
        Gap::NoPolicy => format!("no proxy of {owner} has a policy in force by which it sees them"),
        Gap::Unwatched => format!("no pod of {owner} watches them any more"),
        Gap::NeverWatched => format!("no pod of {owner} has ever watched them"),
        Gap::ProxyAway => format!("no word from the proxies of {owner}: nobody knows whether it watches them"),
        Gap::Doubled => format!("{owner} see them"),
    }
}

/// As `RESOURCE.GROUP`.
fn resource((group, plural): &KindKey) -> String {
    if group.is_empty() { plural.clone() } else { format!("{plural}.{group}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "ops/op";

    fn audit(gap: Option<(Gap, u64)>) -> Audit {
        let gaps = gap.map(|(gap, last_watched)| {
            let objects =
                GapObjects { count: 2, examples: vec!["shop/a".to_owned(), "shop/b".to_owned()], last_watched };
            ((gap, Some("r-1-normal".to_owned())), objects)
        });
        let kind = KindAudit { owned: 3, gaps: gaps.into_iter().collect(), ..KindAudit::default() };
        let key = ("web.example.com".to_owned(), "sites".to_owned());
        [(ROOT.to_owned(), [(key, KindState::Audited(kind))].into())].into()
    }

    /// What the condition says after each time with an audit.
    fn said(steps: &[(u64, Audit)]) -> Vec<Option<(&'static str, String)>> {
        let (mut times, mut told, start) = (TroubleTimes::default(), ConditionLog::default(), Instant::now());
        let configs = [(ROOT.to_owned(), vec![ROOT.to_owned()])].into();
        let say = |(at, audit): &(u64, Audit)| {
            let now = start + Duration::from_secs(*at);
            times.see(audit, now);
            let mut findings = told.findings(audit, &configs, &times, now);
            findings.remove(ROOT).flatten().map(|finding| (finding.reason, finding.message))
        };
        steps.iter().map(say).collect()
    }

    #[test]
    fn a_gap_is_told_of_once_it_lasts_and_no_longer_than_it_does() {
        let gap = || audit(Some((Gap::Unwatched, 0)));
        let all = said(&[(0, gap()), (29, gap()), (30, gap()), (31, audit(None)), (32, gap())]);
        let told = "2 of sites.web.example.com (shop/a, shop/b): no pod of r-1-normal watches them any more";
        let well = "every object that is divided has one owner, which watches it";
        let (told, well) = (Some(("Unowned", told.to_owned())), Some(("EveryObject", well.to_owned())));
        assert_eq!(all, [None, None, told, well.clone(), well]);
    }

    #[test]
    fn what_has_two_owners_is_said_first() {
        let all = said(&[(0, audit(Some((Gap::Doubled, 0)))), (40, audit(Some((Gap::Doubled, 0))))]);
        assert_eq!(all[1].as_ref().map(|(reason, _)| *reason), Some("OwnedTwice"));
    }

    #[test]
    fn a_gap_lasts_whatever_its_reason() {
        let reasons = [Gap::NoPod, Gap::NoPolicy, Gap::NeverWatched, Gap::NoPod];
        let steps: Vec<_> = reasons.iter().zip(0..).map(|(gap, at)| (at * 10, audit(Some((*gap, 0))))).collect();
        let all = said(&steps);
        assert_eq!(all[..3], [None, None, None]);
        assert_eq!(all[3].as_ref().map(|(reason, _)| *reason), Some("Unowned"));
    }

    #[test]
    fn nothing_is_said_while_a_kind_is_listed_or_there_is_none() {
        let mut listing = audit(None);
        listing.get_mut(ROOT).unwrap().insert((String::new(), "pods".to_owned()), KindState::InProgress);
        let empty: Audit = [(ROOT.to_owned(), BTreeMap::new())].into();
        assert_eq!(said(&[(0, listing.clone()), (90, listing), (91, empty)]), [None, None, None]);
    }

    #[test]
    fn a_kind_that_cannot_be_listed_is_not_well() {
        let mut audit = audit(None);
        audit.get_mut(ROOT).unwrap().insert((String::new(), "pods".to_owned()), KindState::Unknown);
        let all = said(&[(0, audit.clone()), (31, audit)]);
        assert_eq!((&all[0], all[1].as_ref().map(|(reason, _)| *reason)), (&None, Some("NotCounted")));
    }

    #[test]
    fn the_same_reason_is_told_anew_once_a_minute() {
        let mut other = audit(Some((Gap::NoPod, 0)));
        for kind in other.get_mut(ROOT).unwrap().values_mut() {
            let KindState::Audited(audit) = kind else { continue };
            audit.gaps.values_mut().for_each(|objects| objects.count = 7);
        }
        let first = || audit(Some((Gap::NoPod, 0)));
        let all = said(&[(0, first()), (30, first()), (60, other.clone()), (91, other)]);
        let counts: Vec<Option<char>> =
            all.iter().map(|said| said.as_ref().and_then(|(_, text)| text.chars().next())).collect();
        assert_eq!(counts, [None, Some('2'), Some('2'), Some('7')]);
    }

    #[test]
    fn what_the_proxy_says_counts_where_it_is_longer() {
        let (mut times, start) = (TroubleTimes::default(), Instant::now());
        let key = ("web.example.com".to_owned(), "sites".to_owned());
        let mut unwatched = |last_watched, after| {
            let audit = audit(Some((Gap::Unwatched, last_watched)));
            let now = start + Duration::from_secs(after);
            times.see(&audit, now);
            let KindState::Audited(of_kind) = &audit[ROOT][&key] else { panic!("{audit:?}") };
            times.unwatched(ROOT, &key, of_kind, now, 100_000).as_secs()
        };
        assert_eq!((unwatched(0, 0), unwatched(0, 5), unwatched(40_000, 5), unwatched(200_000, 6)), (0, 5, 60, 6));
    }
}
