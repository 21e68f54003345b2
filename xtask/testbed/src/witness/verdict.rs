//! What a witness finds: writes that the ownership table forbids, and slots that were nobody's for long.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use anyhow::{Result, ensure};
use ctrlmesh_common::handover::EVERY_OWNER;
use jiff::Timestamp;

use super::OperatorUnderTest;
use super::event::{Author, Object, Write};
use super::tables::{Owner, Table, Tables};

/// How many of a kind of faults are shown.
const SHOWN: usize = 5;

/// What came out.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// How many writes of the operator's pods were checked.
    pub writes: usize,
    /// How many of the operator's pods made them.
    pub authors: usize,
    /// How many epochs the table had.
    pub epochs: usize,
    /// Objects that two owners wrote in one epoch.
    pub shared: Vec<Fault>,
    /// Writes of a former owner after the object was granted to another.
    pub late: Vec<Fault>,
    /// Writes of a pod to what was never its own, or of a pod that may write for nobody.
    pub foreign: Vec<Fault>,
    /// For how long each slot was nobody's at most, where it ever was after it had an owner.
    pub unowned: BTreeMap<String, Duration>,
    /// How often the author of each object changed, where it did.
    pub turns: BTreeMap<Object, usize>,
    /// Writes of which the log does not tell who of two made them, the owner or another; they count as the owner's.
    pub ambiguous: usize,
}

/// One write that should not have been.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Of which object.
    pub object: Object,
    /// Which version it made, where that is known.
    pub version: Option<u64>,
    /// The epoch in which it came about.
    pub epoch: u64,
    /// When it was answered.
    pub at: Timestamp,
    /// Who wrote, and for which owner; for two where two did.
    pub by: String,
    /// Whose the object was.
    pub owner: String,
}

/// What a table says of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finding {
    Allowed,
    Late,
    Foreign,
}

impl Verdict {
    /// That there is no fault, that something was written at all, and that no slot was nobody's for longer than
    /// `bound`.
    ///
    /// # Errors
    /// Where it is not so; the error says what was found.
    pub fn ensure_clean(&self, bound: Duration) -> Result<()> {
        ensure!(self.writes > 0, "no write was checked, so nobody can tell: {self}");
        let faults = self.shared.len() + self.late.len() + self.foreign.len();
        ensure!(faults == 0, "{self}");
        ensure!(self.longest_unowned() <= bound, "a slot was unowned for longer than {bound:?}: {self}");
        Ok(())
    }

    /// For how long a slot was nobody's at most.
    pub fn longest_unowned(&self) -> Duration {
        self.unowned.values().max().copied().unwrap_or_default()
    }

    /// How often the author of an object changed at most.
    pub fn most_turns(&self) -> usize {
        self.turns.values().max().copied().unwrap_or_default()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{} writes of {} pods in {} epochs: {} objects with writes of two owners in one epoch, {} writes of a former \
             owner after a grant, {} writes of strangers; {} slots moved, unowned for {:?} at most; the author of {} \
             objects changed, {} times at most",
            self.writes,
            self.authors,
            self.epochs,
            self.shared.len(),
            self.late.len(),
            self.foreign.len(),
            self.unowned.len(),
            self.longest_unowned(),
            self.turns.len(),
            self.most_turns()
        )?;
        if self.ambiguous > 0 {
            write!(out, "; {} ambiguous writes", self.ambiguous)?;
        }
        for (what, faults) in [("two owners", &self.shared), ("late", &self.late), ("foreign", &self.foreign)] {
            faults.iter().take(SHOWN).try_for_each(|fault| write!(out, "\n  {what}: {fault}"))?;
        }
        Ok(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { object, version, epoch, at, by, owner } = self;
        let version = version.map_or_else(|| "unknown".to_owned(), |version| version.to_string());
        write!(out, "{object}, version {version}, epoch {epoch}, at {at}: by {by}; it was of {owner}")
    }
}

/// Checks all writes; `latest` is when the logs end.
pub(super) fn check(operator: &OperatorUnderTest, writes: &[&Write], tables: &Tables, latest: Timestamp) -> Verdict {
    let user = format!("system:serviceaccount:{}:{}", operator.namespace, operator.account);
    let mut by_object: BTreeMap<&Object, Vec<&Write>> = BTreeMap::new();
    for &write in writes {
        by_object.entry(&write.object).or_default().push(write);
    }
    let mut verdict = Verdict { epochs: tables.iter().count(), unowned: unowned(tables, latest), ..Verdict::default() };
    let mut authors = BTreeSet::new();
    for (object, writes) in by_object {
        let mine = |write: &&Write| write.user == user && write.author.is_some();
        let own: Vec<&Write> = made(writes, tables, &mut verdict.ambiguous).into_iter().filter(mine).collect();
        authors.extend(own.iter().filter_map(|write| write.author.as_ref()));
        verdict.writes += own.len();
        let turns = own.windows(2).filter(|pair| pair[0].author != pair[1].author).count();
        if turns > 0 {
            verdict.turns.insert(object.clone(), turns);
        }
        for write in &own {
            match finding(write, tables) {
                Finding::Allowed => {}
                Finding::Late => verdict.late.push(fault(write, tables)),
                Finding::Foreign => verdict.foreign.push(fault(write, tables)),
            }
        }
        verdict.shared.extend(shared(&own, tables));
    }
    verdict.authors = authors.len();
    verdict
}

/// The writes of one object that made a version, each once, in the order of the versions. The answer to a write that
/// changes nothing has the version that was there: of those with the same version, the one that was answered first made
/// it. Where that would have been forbidden, and another's not, the log cannot tell: then it was the other.
fn made<'a>(mut writes: Vec<&'a Write>, tables: &Tables, ambiguous: &mut usize) -> Vec<&'a Write> {
    writes.sort_by_key(|write| write.answered);
    let mut by_version: BTreeMap<u64, Vec<&Write>> = BTreeMap::new();
    let mut unversioned = Vec::new();
    let mut last = 0;
    for write in writes {
        match write.version {
            Some(version) => {
                last = last.max(version);
                by_version.entry(version).or_default().push(write);
            }
            // In its place as well as its time tells.
            None => unversioned.push((last, write)),
        }
    }
    let one = |(version, writes): (u64, Vec<&'a Write>)| {
        let allowed = |write: &&&Write| finding(write, tables) == Finding::Allowed;
        let first = writes[0];
        let other = writes.iter().find(|write| allowed(write) && write.author.is_some()).copied();
        let other = other.filter(|_| !allowed(&&first));
        *ambiguous += usize::from(other.is_some());
        (version, other.unwrap_or(first))
    };
    let mut all: Vec<(u64, &Write)> = by_version.into_iter().map(one).chain(unversioned).collect();
    all.sort_by_key(|(version, write)| (*version, write.version.is_none()));
    all.into_iter().map(|(_, write)| write).collect()
}

/// What the table in force says; where the version is unknown, the mildest of those that may have been.
fn finding(write: &Write, tables: &Tables) -> Finding {
    let Some(author) = &write.author else { return Finding::Allowed };
    let of = |table: &Table| by_table(write, author, table, tables);
    if let Some(version) = write.version {
        return tables.at(version).map_or(Finding::Allowed, of);
    }
    let mut findings = tables.during(write.received, write.answered).map(of).peekable();
    let Some(first) = findings.peek().copied() else { return Finding::Allowed };
    if findings.any(|one| one == Finding::Allowed) { Finding::Allowed } else { first }
}

fn by_table(write: &Write, author: &Author, table: &Table, tables: &Tables) -> Finding {
    // Without a root nothing is fenced.
    let Some(says) = &table.says else { return Finding::Allowed };
    let Some(by) = table.writes_for(author) else { return Finding::Foreign };
    let is_of = |says| tables.owner(says, &write.object, write.slot);
    match is_of(says) {
        Owner::One(owner) | Owner::Nobody(Some(owner)) if owner == by => Finding::Allowed,
        // Any owner may have begun something.
        Owner::Nobody(Some(EVERY_OWNER)) => Finding::Allowed,
        _ => {
            let mut earlier = tables.before(table).filter_map(|table| table.says.as_ref());
            if earlier.any(|says| is_of(says) == Owner::One(by)) { Finding::Late } else { Finding::Foreign }
        }
    }
}

/// Each epoch in which two owners wrote the object of these writes.
fn shared(writes: &[&Write], tables: &Tables) -> Vec<Fault> {
    let mut epochs: BTreeMap<(&str, u64), Vec<(&str, &Write)>> = BTreeMap::new();
    for write in writes {
        let table = write.version.and_then(|version| tables.at(version));
        let (Some(table), Some(author)) = (table, &write.author) else { continue };
        if table.says.is_none() {
            continue;
        }
        let owner = table.writes_for(author).unwrap_or(author.pod.as_str());
        let owners = epochs.entry(table.epoch_of_root()).or_default();
        if owners.iter().all(|(known, _)| *known != owner) {
            owners.push((owner, write));
        }
    }
    let several = epochs.into_values().filter(|owners| owners.len() > 1);
    several
        .map(|owners| {
            let by: Vec<&str> = owners.iter().map(|(owner, _)| *owner).collect();
            Fault { by: by.join(" and "), ..fault(owners[1].1, tables) }
        })
        .collect()
}

fn fault(write: &Write, tables: &Tables) -> Fault {
    let known = write.version.and_then(|version| tables.at(version));
    let table = known.or_else(|| tables.during(write.received, write.answered).last());
    let says = table.and_then(|table| table.says.as_ref());
    let owner = says.map(|says| match tables.owner(says, &write.object, write.slot) {
        Owner::One(owner) => owner.to_owned(),
        Owner::Nobody(None) => "nobody".to_owned(),
        Owner::Nobody(Some(former)) => format!("nobody, taken from {former}"),
    });
    let by = write.author.as_ref().map(|author| {
        let owner = table.and_then(|table| table.writes_for(author)).unwrap_or("nobody");
        format!("{} ({}) of {owner}", author.pod, author.uid)
    });
    Fault {
        object: write.object.clone(),
        version: write.version,
        epoch: table.map_or(0, Table::epoch),
        at: write.answered,
        by: by.unwrap_or_default(),
        owner: owner.unwrap_or_else(|| "nobody".to_owned()),
    }
}

/// For how long each slot was nobody's at most, after it had an owner.
fn unowned(tables: &Tables, latest: Timestamp) -> BTreeMap<String, Duration> {
    let mut since: BTreeMap<String, Option<Timestamp>> = BTreeMap::new();
    let mut most: BTreeMap<String, Duration> = BTreeMap::new();
    let mut end = |slot: &str, from: Timestamp, until: Timestamp| {
        let took = until.duration_since(from).unsigned_abs();
        let longest = most.entry(slot.to_owned()).or_default();
        *longest = took.max(*longest);
    };
    for table in tables.iter() {
        let Some(says) = &table.says else {
            since.clear();
            continue;
        };
        let owned: BTreeSet<String> = says.slots.keys().map(ToString::to_string).collect();
        for (slot, from) in &mut since {
            match (owned.contains(slot), *from) {
                (true, Some(begin)) => {
                    end(slot, begin, table.answered);
                    *from = None;
                }
                (false, None) => *from = Some(table.answered),
                _ => {}
            }
        }
        for slot in owned {
            since.entry(slot).or_default();
        }
    }
    for (slot, from) in since {
        if let Some(begin) = from {
            end(&slot, begin, latest);
        }
    }
    most
}
