//! Prints events for people, as `kubectl events` does.
//!
//! Pure.

use jiff::Timestamp;

use super::entry::Entry;
use crate::text::{dash, line, since, table};

/// What is printed where there are none.
const NOTHING: &str = "there are no events of ctrlmesh here: API servers keep them for an hour, unless set otherwise\n";

/// A line for each event. What is printed later has no head.
pub(super) fn list(entries: &[Entry], has_namespaces: bool, is_first: bool, now: Timestamp) -> String {
    if entries.is_empty() {
        return NOTHING.to_owned();
    }
    let namespace: &[&str] = if has_namespaces { &["NAMESPACE"] } else { &[] };
    let head = [namespace, &["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]].concat();
    let mut rows: Vec<Vec<String>> = vec![head.into_iter().map(str::to_owned).collect()];
    rows.extend(entries.iter().map(|entry| {
        let namespace = has_namespaces.then(|| entry.namespace.clone());
        let object = format!("{}/{}", entry.regarding.kind, entry.regarding.name);
        let cells = [seen(entry, now), entry.type_.clone(), entry.reason.clone(), object, line(&entry.message)];
        namespace.into_iter().chain(cells).collect()
    }));
    let printed = table(&rows, "");
    if is_first { printed } else { printed.split_once('\n').map_or_else(String::new, |(_, rest)| rest.to_owned()) }
}

/// How long ago it came last, and how often since when.
fn seen(entry: &Entry, now: Timestamp) -> String {
    let last = entry.last.map_or_else(dash, |last| since(last, now));
    match entry.first.filter(|_| entry.count > 1) {
        Some(first) => format!("{last} (x{} over {})", entry.count, since(first, now)),
        None => last,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::entry::Regarding;

    fn entry(count: i32, message: &str) -> Entry {
        let (kind, name) = ("ShardingConfig".to_owned(), "web".to_owned());
        Entry {
            namespace: "ops".to_owned(),
            name: "web.1".to_owned(),
            first: Some("2026-01-01T00:00:00Z".parse().unwrap()),
            last: Some("2026-01-01T00:01:00Z".parse().unwrap()),
            count,
            type_: "Normal".to_owned(),
            reason: "Granted".to_owned(),
            regarding: Regarding { kind, namespace: Some("ops".to_owned()), name },
            message: message.to_owned(),
            reported_by: "ctrlmesh-manager".to_owned(),
        }
    }

    #[test]
    fn events_are_listed_as_kubectl_lists_them() {
        let now = "2026-01-01T00:02:00Z".parse().unwrap();
        let entries = [entry(1, "epoch 1:\n given"), entry(3, "again")];
        let expected = "\
NAMESPACE   LAST SEEN         TYPE     REASON    OBJECT               MESSAGE
ops         1m                Normal   Granted   ShardingConfig/web   epoch 1: given
ops         1m (x3 over 2m)   Normal   Granted   ShardingConfig/web   again
";
        assert_eq!(list(&entries, true, true, now), expected);
        let later = list(&entries[..1], false, false, now);
        assert_eq!(later, "1m          Normal   Granted   ShardingConfig/web   epoch 1: given\n");
        assert!(list(&[], false, true, now).starts_with("there are no events of ctrlmesh here"));
    }
}
