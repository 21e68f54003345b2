//! Formats the table as text.

use crate::view::Table;

/// The table, a line a replica, and a line of totals.
pub fn table(table: &Table) -> String {
    let width = table.replicas.keys().map(String::len).chain([7]).max().unwrap_or_default();
    let mut text = format!(
        "{:<width$}  {:<14} {:<5} {:<4} {:>10} {:>7} {:>12} {:>8} {:>8} {:>5}\n",
        "replica", "shard", "ready", "lock", "namespaces", "objects", "reconciles/s", "writes/s", "restarts", "epoch",
    );
    for (name, replica) in &table.replicas {
        let reconciles = replica.reconciles.map_or("-".to_owned(), |rate| format!("{rate:.1}"));
        let epoch = replica.epoch.map_or("-".to_owned(), |epoch| epoch.to_string());
        let line = format!(
            "{name:<width$}  {:<14} {:<5} {:<4} {:>10} {:>7} {reconciles:>12} {:>8.1} {:>8} {epoch:>5}\n",
            replica.shard.as_deref().unwrap_or("-"),
            yes(replica.ready),
            lock(replica.works, table.locked),
            replica.namespaces,
            replica.objects,
            replica.writes,
            replica.restarts,
        );
        text.push_str(&line);
    }
    let Table { namespaces, objects, pending, unowned, twice, .. } = table;
    let epoch = table.epoch.map_or("-".to_owned(), |epoch| epoch.to_string());
    let totals = format!(
        "{objects} objects in {namespaces} namespaces: {unowned} unowned, {twice} owned twice, {pending} to do; epoch {epoch}\n"
    );
    text + &totals
}

fn lock(works: bool, locked: bool) -> &'static str {
    match (works, locked) {
        (true, true) => "held",
        // It works without one.
        (true, false) => "none",
        (false, _) => "-",
    }
}

fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::Replica;

    #[test]
    fn the_table_has_a_line_for_each_replica_and_one_of_totals() {
        let replica = Replica {
            shard: Some("web-1-normal".to_owned()),
            ready: true,
            works: true,
            namespaces: 20,
            objects: 40,
            writes: 1.26,
            epoch: Some(4),
            ..Replica::default()
        };
        let replicas = [("op-a".to_owned(), replica), ("op-b".to_owned(), Replica::default())];
        let text =
            table(&Table { replicas: replicas.into(), locked: true, objects: 40, unowned: 2, ..Table::default() });
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["op-a", "web-1-normal", "yes", "held", "20", "40", "-", "1.3", "0", "4"]);
        assert_eq!(lines[2], ["op-b", "-", "no", "-", "0", "0", "-", "0.0", "0", "-"]);
        assert_eq!(text.lines().last(), Some("40 objects in 0 namespaces: 2 unowned, 0 owned twice, 0 to do; epoch -"));
    }
}
