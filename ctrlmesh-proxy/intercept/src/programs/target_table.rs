//! Tables of targets, which give each address an index.
//!
//! An index keeps its meaning while the table lives, because earlier connections carry it. An address that is no longer
//! a target is retired, and gets its index back when it becomes one again. When no fresh index is left, a fresh table
//! takes over the name. The old table stays readable as long as a pod remembers it.

use std::collections::BTreeSet;

use ctrlmesh_common::kernel::{self, Destination, MAX_TABLES, TABLE_ENTRIES, Table, TargetMatch};

use aya::maps::lpm_trie::Key;

use crate::Error;
use crate::programs::map::{self, Maps};
use crate::target::{Target, Targets};

/// In the place of a name: a table that was replaced by a fresh one.
const REPLACED: u64 = u64::MAX;

/// What has to change in a table.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// To be written, with their index.
    set: Vec<(u8, Target)>,
    /// To be retired.
    retire: Vec<(u8, Target)>,
}

/// The table that a name stands for now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedTable {
    /// Its number.
    pub(crate) table: u16,
    /// The table that had the name, and has no fresh index left.
    pub(crate) replaced: Option<u16>,
}

/// Whether a table can hold these targets, as far as they alone decide.
pub(crate) fn fits(targets: &Targets) -> bool {
    plan(&[], &targets.list).is_some()
}

/// Why one cannot.
pub(crate) fn full() -> Error {
    Error::Full { table: "DESTINATIONS", entries: TABLE_ENTRIES - 1 }
}

/// The owner's table of this name, made to hold exactly these targets.
pub(crate) fn ensure(maps: &mut Maps, owner: &str, targets: &Targets) -> Result<NamedTable, Error> {
    let name = fingerprint(&format!("{owner}\0{}", targets.name));
    if let Some(table) = find(maps, name)? {
        if let Some(plan) = plan(&entries(maps, table)?, &targets.list) {
            apply(maps, table, &plan)?;
            return Ok(NamedTable { table, replaced: None });
        }
        let fresh = fill(maps, REPLACED, plan(&[], &targets.list).ok_or_else(full)?)?;
        // The old one loses the name first: a name never stands for two.
        set_head(maps, table, REPLACED)?;
        set_head(maps, fresh, name)?;
        return Ok(NamedTable { table: fresh, replaced: Some(table) });
    }
    let table = fill(maps, name, plan(&[], &targets.list).ok_or_else(full)?)?;
    Ok(NamedTable { table, replaced: None })
}

/// Makes a fresh table. If it does not fit, nothing is left of it.
fn fill(maps: &mut Maps, name: u64, plan: Plan) -> Result<u16, Error> {
    let table = find(maps, 0)?.ok_or(Error::Full { table: "TABLES", entries: MAX_TABLES - 1 })?;
    set_head(maps, table, name)?;
    apply(maps, table, &plan).or_else(|error| empty(maps, table).and(Err(error)))?;
    Ok(table)
}

fn apply(maps: &mut Maps, table: u16, plan: &Plan) -> Result<(), Error> {
    // New ones before old ones go: if they do not fit, the old ones are still there.
    for (index, target) in &plan.set {
        set(maps, table, *index, *target)?;
    }
    for (index, target) in &plan.retire {
        retire(maps, table, *index, *target)?;
    }
    Ok(())
}

/// The targets that a table holds now.
pub(crate) fn targets(maps: &Maps, table: u16) -> Result<Vec<Target>, Error> {
    let live = entries(maps, table)?.into_iter().filter(|entry| entry.port != 0 && entry.retired == 0);
    Ok(live.map(|entry| Target::of(&entry)).collect())
}

/// Lets a table that was replaced, and that no pod uses any more, do nothing but explain.
pub(crate) fn close(maps: &mut Maps, table: u16) -> Result<(), Error> {
    for (index, entry) in (0..=u8::MAX).zip(entries(maps, table)?) {
        if entry.port != 0 && entry.retired == 0 {
            retire(maps, table, index, Target::of(&entry))?;
        }
    }
    Ok(())
}

/// Empties the tables that no pod uses or remembers.
pub(crate) fn collect(maps: &mut Maps, used: &BTreeSet<u16>) -> Result<(), Error> {
    for table in tables().filter(|table| !used.contains(table)) {
        if head(maps, table)?.name != 0 {
            empty(maps, table)?;
        }
    }
    Ok(())
}

fn empty(maps: &mut Maps, table: u16) -> Result<(), Error> {
    for (index, entry) in (0..=u8::MAX).zip(entries(maps, table)?).filter(|(_, entry)| entry.port != 0) {
        if entry.retired == 0 {
            unmatch(maps, table, Target::of(&entry))?;
        }
        write(maps, table, index, Destination::default())?;
    }
    set_head(maps, table, 0)
}

/// Numbers of tables. The first is no table.
fn tables() -> impl Iterator<Item = u16> {
    1..u16::try_from(MAX_TABLES).unwrap_or(u16::MAX)
}

fn head(maps: &Maps, table: u16) -> Result<Table, Error> {
    maps.tables.get(&u32::from(table), 0).map_err(Error::map("TABLES"))
}

fn set_head(maps: &mut Maps, table: u16, name: u64) -> Result<(), Error> {
    maps.tables.set(u32::from(table), Table { name }, 0).map_err(Error::map("TABLES"))
}

/// The first table that has this name; with 0, the first that is free.
fn find(maps: &Maps, name: u64) -> Result<Option<u16>, Error> {
    for table in tables() {
        if head(maps, table)?.name == name {
            return Ok(Some(table));
        }
    }
    Ok(None)
}

fn entries(maps: &Maps, table: u16) -> Result<Vec<Destination>, Error> {
    let all = (0..=u8::MAX).map(|index| maps.destinations.get(&kernel::entry(table, index), 0));
    all.collect::<Result<_, _>>().map_err(Error::map("DESTINATIONS"))
}

/// What has to change so that a table with these entries holds what is wanted; `None` if there are not indices enough.
fn plan(entries: &[Destination], wanted: &[Target]) -> Option<Plan> {
    let wanted: BTreeSet<_> = wanted.iter().copied().collect();
    let mut plan = Plan::default();
    let mut known = BTreeSet::new();
    let mut fresh = Vec::new();
    let none = Destination::default();
    let entries = entries.iter().chain(std::iter::repeat(&none));
    for (index, entry) in (0..=u8::MAX).zip(entries).skip(1) {
        let target = Target::of(entry);
        let keep = wanted.contains(&target) && entry.port != 0;
        match (entry.port, entry.retired, keep) {
            (0, _, _) => fresh.push(index),
            (_, 0, true) => drop(known.insert(target)),
            (_, _, true) => {
                known.insert(target);
                plan.set.push((index, target));
            }
            (_, 0, false) => plan.retire.push((index, target)),
            (_, _, false) => {}
        }
    }
    let mut fresh = fresh.into_iter();
    for target in wanted.difference(&known) {
        plan.set.push((fresh.next()?, *target));
    }
    Some(plan)
}

/// Explained first, matched after: an index that the kernel writes always has a meaning.
fn set(maps: &mut Maps, table: u16, index: u8, target: Target) -> Result<(), Error> {
    write(maps, table, index, target.destination())?;
    let (bits, key) = target.key(table);
    let value = TargetMatch { index, host_bits: target.host_bits(), reserved: 0 };
    let inserted = maps.targets.insert(&Key::new(bits, key), value, 0);
    let Err(error) = inserted else { return Ok(()) };
    write(maps, table, index, Destination { retired: 1, ..target.destination() })?;
    Err(maps.refused("TARGETS", error))
}

fn retire(maps: &mut Maps, table: u16, index: u8, target: Target) -> Result<(), Error> {
    unmatch(maps, table, target)?;
    write(maps, table, index, Destination { retired: 1, ..target.destination() })
}

fn unmatch(maps: &mut Maps, table: u16, target: Target) -> Result<(), Error> {
    let (bits, key) = target.key(table);
    match maps.targets.remove(&Key::new(bits, key)) {
        Err(error) if !map::absent(&error) => Err(Error::map("TARGETS")(error)),
        _ => Ok(()),
    }
}

fn write(maps: &mut Maps, table: u16, index: u8, entry: Destination) -> Result<(), Error> {
    maps.destinations.set(kernel::entry(table, index), entry, 0).map_err(Error::map("DESTINATIONS"))
}

/// FNV-1a, 64 bits; never a mark of a table without a name.
fn fingerprint(name: &str) -> u64 {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    hash.clamp(1, REPLACED - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        text.parse().unwrap()
    }

    fn applied(mut entries: Vec<Destination>, wanted: &[&str]) -> Vec<Destination> {
        let wanted: Vec<_> = wanted.iter().map(|text| target(text)).collect();
        let plan = plan(&entries, &wanted).unwrap();
        for (index, target) in plan.retire {
            entries[usize::from(index)] = Destination { retired: 1, ..target.destination() };
        }
        for (index, target) in plan.set {
            entries[usize::from(index)] = target.destination();
        }
        entries
    }

    fn live(entries: &[Destination]) -> Vec<(usize, String)> {
        let live = entries.iter().enumerate().filter(|(_, entry)| entry.port != 0 && entry.retired == 0);
        live.map(|(index, entry)| (index, Target::of(entry).to_string())).collect()
    }

    fn empty() -> Vec<Destination> {
        vec![Destination::default(); 256]
    }

    #[test]
    fn the_first_index_is_one() {
        assert_eq!(live(&applied(empty(), &["10.0.0.1:1"])), [(1, "10.0.0.1:1".to_owned())]);
    }

    #[test]
    fn what_stays_keeps_its_index() {
        let before = applied(empty(), &["10.0.0.1:1", "10.0.0.2:1"]);
        let after = applied(before, &["10.0.0.2:1", "10.0.0.0/16:1"]);
        assert_eq!(live(&after), [(2, "10.0.0.2:1".to_owned()), (3, "10.0.0.0/16:1".to_owned())]);
    }

    #[test]
    fn a_retired_target_is_explained_and_returns_to_its_index() {
        let before = applied(empty(), &["10.0.0.1:1"]);
        let without = applied(before, &["10.0.0.2:1"]);
        assert_eq!(Target::of(&without[1]).to_string(), "10.0.0.1:1");
        assert_eq!(live(&applied(without, &["10.0.0.1:1"])), [(1, "10.0.0.1:1".to_owned())]);
    }

    #[test]
    fn a_retired_index_is_never_given_to_another_target() {
        let mut entries = empty();
        for round in 0..255 {
            entries = applied(entries, &[&format!("10.0.{round}.1:1")]);
            assert_eq!(live(&entries)[0].0, round + 1);
        }
        assert_eq!(plan(&entries, &[target("10.1.0.1:1")]), None);
        assert_eq!(live(&applied(entries, &["10.0.7.1:1"]))[0].0, 8);
    }

    #[test]
    fn a_table_holds_255_targets_and_no_more() {
        let many: Vec<_> = (0..=255).map(|n| target(&format!("10.0.0.{n}:1"))).collect();
        assert!(plan(&empty(), &many[..255]).is_some());
        assert_eq!(plan(&empty(), &many), None);
    }

    #[test]
    fn a_target_named_twice_takes_one_index() {
        assert_eq!(live(&applied(empty(), &["10.0.0.1:1", "10.0.0.1/32:1"])).len(), 1);
    }
}
