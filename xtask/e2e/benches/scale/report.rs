//! The table of the benchmark.

use std::time::Duration;

use crate::cluster::REPLICAS;
use crate::deaths::Deaths;
use crate::restart::Restart;

/// What was measured with one number of pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct Row {
    pub(crate) pods: usize,
    pub(crate) nodes: usize,
    pub(crate) connected: Duration,
    pub(crate) settled: Duration,
    /// Of one core.
    pub(crate) idle_share: f64,
    pub(crate) idle_kilobytes: u64,
    pub(crate) deaths: Deaths,
    pub(crate) restart: Restart,
    /// Policies that were put in force, and violations.
    pub(crate) checked: (usize, usize),
}

impl Row {
    /// All of it, on one line.
    pub(crate) fn line(&self) -> String {
        let cells = self.cells().into_iter().map(|(name, value)| format!("{name}: {value}"));
        cells.collect::<Vec<_>>().join("; ")
    }

    /// What is shown, and by which name.
    fn cells(&self) -> Vec<(&'static str, String)> {
        let Restart { took, manager, kilobytes, spent } = &self.restart;
        vec![
            ("pods", self.pods.to_string()),
            ("roots of 5 pods; proxies, one a node", format!("{}; {}", self.pods / REPLICAS, self.nodes)),
            (
                "all connected; all slots owned evenly, from nothing",
                format!("{:.1?}; {:.1?}", self.connected, self.settled),
            ),
            ("idle: CPU of the manager, of one core", format!("{:.1} %", self.idle_share * 100.0)),
            ("idle: resident memory of the manager", format!("{} MiB", self.idle_kilobytes >> 10)),
            (
                "from the report of a death until the first other proxy has the table that takes its slots away: \
                 p50 / p99 / longest, ms",
                times(&self.deaths.decided),
            ),
            ("until all other proxies have its slots: p50 / p99 / longest, ms", times(&self.deaths.moved)),
            ("rolling restart of all, until new pods own all slots evenly", format!("{took:.1?}")),
            ("CPU of the manager meanwhile", format!("{manager:.1?}")),
            ("most resident memory meanwhile", format!("{} MiB", kilobytes >> 10)),
            ("CPU of all programs meanwhile", spent.to_string()),
            (
                "policies put in force in all; slots that two pods held",
                format!("{}; {}", self.checked.0, self.checked.1),
            ),
        ]
    }
}

/// Prints one column for each number of pods.
pub(crate) fn print(rows: &[Row], deaths: usize) {
    println!("{deaths} deaths each\n");
    let columns: Vec<_> = rows.iter().map(Row::cells).collect();
    let Some(first) = columns.first() else { return };
    for (line, (name, _)) in first.iter().enumerate() {
        let cells: Vec<&str> = columns.iter().map(|column| column[line].1.as_str()).collect();
        println!("| {name} | {} |", cells.join(" | "));
        if line == 0 {
            println!("|{}", " --- |".repeat(columns.len() + 1));
        }
    }
}

fn times(times: &[Duration]) -> String {
    let at = |hundredths: usize| times.get(times.len().saturating_sub(1) * hundredths / 100).copied();
    let at = |hundredths| at(hundredths).unwrap_or_default().as_millis();
    format!("{} / {} / {}", at(50), at(99), at(100))
}
