//! Prints traffic for people.
//!
//! Pure.

use super::args::By;
use super::{Row, Top};
use crate::text::{dash, table};

/// The table of an interval.
pub(super) fn screen(top: &Top, by: By) -> String {
    let mut text = match top.rows.as_slice() {
        [] => "no proxy serves a pod here that has asked for anything\n".to_owned(),
        rows => table(&[head(by)].into_iter().chain(rows.iter().map(|row| cells(row, by))).collect::<Vec<_>>(), ""),
    };
    if !top.not_read.is_empty() {
        text += "\nNot read:\n";
        text.extend(top.not_read.iter().map(|why| format!("  {why}\n")));
    }
    text
}

fn head(by: By) -> Vec<String> {
    let names: &[&str] = match by {
        By::Shard => &["NAMESPACE", "SHARD"],
        By::Pod => &["NAMESPACE", "POD", "SHARD"],
        By::Namespace => return ["OBJECTS IN", "REQUESTS/S"].map(str::to_owned).to_vec(),
    };
    let rates = ["REQUESTS/S", "WRITES/S", "EVENTS/S", "BYTES/S", "REFUSED/S", "FAILED/S", "MEAN", "P99"];
    names.iter().chain(&rates).map(|name| (*name).to_owned()).collect()
}

fn cells(row: &Row, by: By) -> Vec<String> {
    let rates = &row.rates;
    let name = |name: &Option<String>| name.clone().filter(|name| !name.is_empty()).unwrap_or_else(dash);
    let mut cells = match by {
        By::Namespace => return vec![name(&row.object_namespace), number(rates.requests)],
        By::Shard => vec![name(&row.namespace), name(&row.shard)],
        By::Pod => vec![name(&row.namespace), name(&row.pod), name(&row.shard)],
    };
    let numbers = [rates.requests, rates.writes, rates.events].map(number);
    cells.extend(numbers);
    cells.push(bytes(rates.bytes));
    cells.extend([rates.refused, rates.failed].map(number));
    cells.extend([rates.mean_seconds, rates.p99_seconds].map(|time| time.map_or_else(dash, seconds)));
    cells
}

/// With one digit after the point, as long as it says something.
fn number(number: f64) -> String {
    if number < 99.95 { format!("{number:.1}") } else { format!("{number:.0}") }
}

/// As `12Ki`.
fn bytes(bytes: f64) -> String {
    let (mut value, mut unit) = (bytes, "");
    for larger in ["Ki", "Mi", "Gi"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    format!("{}{unit}", number(value))
}

fn seconds(seconds: f64) -> String {
    match seconds {
        long if long.is_infinite() => "long".to_owned(),
        short if short < 0.001 => format!("{:.0}us", short * 1e6),
        short if short < 1.0 => format!("{:.1}ms", short * 1e3),
        long => format!("{long:.1}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::traffic::Rates;
    use super::*;

    fn row(name: &str, rates: Rates) -> Row {
        Row { namespace: Some("ops".to_owned()), shard: Some(name.to_owned()), rates, ..Row::default() }
    }

    #[test]
    fn a_shard_has_a_row_with_its_rates() {
        let busy = Rates {
            requests: 120.4,
            writes: 3.25,
            bytes: 20_000.0,
            mean_seconds: Some(0.0123),
            p99_seconds: Some(f64::INFINITY),
            ..Rates::default()
        };
        let top = Top {
            seconds: 5.0,
            rows: vec![row("web-1-normal", busy), row("", Rates::default())],
            not_read: Vec::new(),
        };
        let expected = "\
NAMESPACE   SHARD          REQUESTS/S   WRITES/S   EVENTS/S   BYTES/S   REFUSED/S   FAILED/S   MEAN     P99
ops         web-1-normal   120          3.2        0.0        19.5Ki    0.0         0.0        12.3ms   long
ops         -              0.0          0.0        0.0        0.0       0.0         0.0        -        -
";
        assert_eq!(screen(&top, By::Shard), expected);
    }

    #[test]
    fn a_proxy_that_was_not_read_is_named() {
        let top =
            Top { seconds: 5.0, rows: Vec::new(), not_read: vec!["ops/a: you may not get pods/proxy".to_owned()] };
        let text = screen(&top, By::Pod);
        assert!(text.ends_with("Not read:\n  ops/a: you may not get pods/proxy\n"), "{text}");
    }
}
