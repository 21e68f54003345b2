//! What benchmarks with a bed of their own share: figures for a table, and commands that have to work.

use std::process::Command;

/// The median of what was measured, and its spread, with so many decimals.
pub(crate) fn spread(values: impl Iterator<Item = f64>, decimals: usize) -> String {
    let values: Vec<f64> = values.collect();
    let least = values.iter().copied().fold(f64::MAX, f64::min);
    let most = values.iter().copied().fold(f64::MIN, f64::max);
    format!("{:.decimals$} ({least:.decimals$} to {most:.decimals$})", middle(values))
}

/// The median.
pub(crate) fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len().is_multiple_of(2) { f64::midpoint(values[half - 1], values[half]) } else { values[half] }
}

/// Runs a command to its end, which has to be a good one.
pub(crate) fn must(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
