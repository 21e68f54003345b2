//! Tables of targets: which index stands for which address?
//!
//! An index that was given keeps its meaning while the table lives, for connections made earlier: what is no longer a
//! target is retired, and its index is given again only when no fresh one is left.

use std::collections::BTreeSet;

use ctrlmesh_common::kernel::{
    self, Destination, MAX_TABLES, MAX_TARGETS, TABLE_ENTRIES, Table, TargetMatch,
};

use aya::maps::lpm_trie::Key;

use super::Error;
use super::map::{self, Maps};
use super::target::{Target, Targets};

/// What has to change in a table.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// To be written, with their index.
    set: Vec<(u8, Target)>,
    /// To be retired.
    retire: Vec<(u8, Target)>,
}

/// The owner's table of this name, made to hold exactly these targets.
pub(super) fn ensure(maps: &mut Maps, owner: &str, targets: &Targets) -> Result<u16, Error> {
    let name = fingerprint(&format!("{owner}\0{}", targets.name));
    let table = place(maps, name)?;
    let plan = plan(&entries(maps, table)?, &targets.list)?;
    maps.tables.set(u32::from(table), Table { name }, 0).map_err(Error::map("TABLES"))?;
    let again = |index: u8| plan.set.iter().any(|(set, _)| *set == index);
    // An index that is given again must stop meaning the old target before it means the new one.
    for (_, target) in plan.retire.iter().filter(|(index, _)| again(*index)) {
        unmatch(maps, table, *target)?;
    }
    // New ones before old ones go: if they do not fit, the old ones are still there.
    for (index, target) in &plan.set {
        set(maps, table, *index, *target)?;
    }
    for (index, target) in plan.retire.iter().filter(|(index, _)| !again(*index)) {
        retire(maps, table, *index, *target)?;
    }
    Ok(table)
}

/// The targets that a table holds now.
pub(super) fn targets(maps: &Maps, table: u16) -> Result<Vec<Target>, Error> {
    let live =
        entries(maps, table)?.into_iter().filter(|entry| entry.port != 0 && entry.retired == 0);
    Ok(live.map(|entry| Target::of(&entry)).collect())
}

/// Empties the tables that no pod uses.
pub(super) fn collect(maps: &mut Maps, used: &BTreeSet<u16>) -> Result<(), Error> {
    for table in (0..tables()).filter(|table| !used.contains(table)) {
        if head(maps, table)?.name == 0 {
            continue;
        }
        for (index, entry) in
            (0..=u8::MAX).zip(entries(maps, table)?).filter(|(_, entry)| entry.port != 0)
        {
            if entry.retired == 0 {
                unmatch(maps, table, Target::of(&entry))?;
            }
            write(maps, table, index, Destination::default())?;
        }
        maps.tables.set(u32::from(table), Table::default(), 0).map_err(Error::map("TABLES"))?;
    }
    Ok(())
}

fn tables() -> u16 {
    u16::try_from(MAX_TABLES).unwrap_or(u16::MAX)
}

fn head(maps: &Maps, table: u16) -> Result<Table, Error> {
    maps.tables.get(&u32::from(table), 0).map_err(Error::map("TABLES"))
}

/// The table that has this name, or a free one.
fn place(maps: &Maps, name: u64) -> Result<u16, Error> {
    let mut free = None;
    for table in 0..tables() {
        match head(maps, table)?.name {
            found if found == name => return Ok(table),
            0 => free = free.or(Some(table)),
            _ => {}
        }
    }
    free.ok_or(Error::Full { table: "TABLES", entries: MAX_TABLES })
}

fn entries(maps: &Maps, table: u16) -> Result<Vec<Destination>, Error> {
    let all = (0..=u8::MAX).map(|index| maps.destinations.get(&kernel::entry(table, index), 0));
    all.collect::<Result<_, _>>().map_err(Error::map("DESTINATIONS"))
}

fn plan(entries: &[Destination], wanted: &[Target]) -> Result<Plan, Error> {
    let wanted: BTreeSet<_> = wanted.iter().copied().collect();
    let mut plan = Plan::default();
    let mut known = BTreeSet::new();
    let (mut fresh, mut old, mut last) = (Vec::new(), Vec::new(), Vec::new());
    for (index, entry) in (0..=u8::MAX).zip(entries).skip(1) {
        let target = Target::of(entry);
        let keep = entry.port != 0 && wanted.contains(&target);
        match (entry.port, entry.retired, keep) {
            (0, _, _) => fresh.push(index),
            (_, 0, true) => drop(known.insert(target)),
            (_, _, true) => {
                known.insert(target);
                plan.set.push((index, target));
            }
            (_, 0, false) => {
                plan.retire.push((index, target));
                last.push(index);
            }
            (_, _, false) => old.push(index),
        }
    }
    let mut free = fresh.into_iter().chain(old).chain(last);
    for target in wanted.difference(&known) {
        let index =
            free.next().ok_or(Error::Full { table: "DESTINATIONS", entries: TABLE_ENTRIES - 1 })?;
        plan.set.push((index, *target));
    }
    Ok(plan)
}

/// Explained first, matched after: an index that the kernel writes always has a meaning.
fn set(maps: &mut Maps, table: u16, index: u8, target: Target) -> Result<(), Error> {
    write(maps, table, index, target.destination())?;
    let (bits, key) = target.key(table);
    let value = TargetMatch { index, host_bits: target.host_bits(), reserved: 0 };
    let inserted = maps.targets.insert(&Key::new(bits, key), value, 0);
    let Err(error) = inserted else { return Ok(()) };
    write(maps, table, index, Destination { retired: 1, ..target.destination() })?;
    if map::full(&error) {
        Err(Error::Full { table: "TARGETS", entries: MAX_TARGETS })
    } else {
        Err(Error::map("TARGETS")(error))
    }
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

/// FNV-1a, 64 bits; never 0, which marks a free table.
fn fingerprint(name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    hash.max(1)
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
        let live =
            entries.iter().enumerate().filter(|(_, entry)| entry.port != 0 && entry.retired == 0);
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
    fn what_is_retired_can_still_be_explained_and_comes_back_to_its_index() {
        let before = applied(empty(), &["10.0.0.1:1"]);
        let without = applied(before, &["10.0.0.2:1"]);
        assert_eq!(Target::of(&without[1]).to_string(), "10.0.0.1:1");
        assert_eq!(live(&applied(without, &["10.0.0.1:1"])), [(1, "10.0.0.1:1".to_owned())]);
    }

    #[test]
    fn a_retired_index_is_given_again_only_when_no_fresh_one_is_left() {
        let mut entries = empty();
        for round in 0..254 {
            entries = applied(entries, &[&format!("10.0.{round}.1:1")]);
            assert_eq!(live(&entries)[0].0, round + 1);
        }
        entries = applied(entries, &["10.1.0.1:1", "10.1.0.2:1"]);
        assert_eq!(live(&entries).iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1, 255]);
    }

    #[test]
    fn a_table_holds_255_targets_and_no_more() {
        let many: Vec<_> = (0..=255).map(|n| target(&format!("10.0.0.{n}:1"))).collect();
        assert!(plan(&empty(), &many[..255]).is_ok());
        assert!(matches!(plan(&empty(), &many), Err(Error::Full { entries: 255, .. })));
    }

    #[test]
    fn a_target_named_twice_takes_one_index() {
        assert_eq!(live(&applied(empty(), &["10.0.0.1:1", "10.0.0.1/32:1"])).len(), 1);
    }
}
