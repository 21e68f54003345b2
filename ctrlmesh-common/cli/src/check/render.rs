//! Prints the results of checks for people.
//!
//! Pure.

use super::Report;
use super::finding::{Finding, State};
use crate::text::counted;

/// What stands before the advice of a result.
const TO_DO: &str = "to do: ";

/// A paragraph a group, a line a result, and what to do below it.
pub(super) fn screen(report: &Report) -> String {
    let width = |cell: fn(&Finding) -> usize| report.checks.iter().map(cell).max().unwrap_or_default();
    let widths = (width(|one| one.state.word().len()), width(|one| one.check.len()));
    let mut lines = Vec::new();
    for (at, finding) in report.checks.iter().enumerate() {
        if at == 0 || report.checks[at - 1].group != finding.group {
            let between = if at == 0 { "" } else { "\n" };
            lines.push(format!("{between}{}:\n", finding.group.title()));
        }
        lines.push(result(finding, widths));
    }
    format!("{}\n{}", lines.concat(), summary(report))
}

fn result(finding: &Finding, (state, check): (usize, usize)) -> String {
    let line = format!("  {:<state$}   {:<check$}   {}\n", finding.state.word(), finding.check, finding.message);
    let indent = " ".repeat(2 + state + 3 + check + 3);
    let advice = finding.advice.as_ref();
    line + &advice.map_or_else(String::new, |advice| format!("{indent}{TO_DO}{advice}\n"))
}

fn summary(report: &Report) -> String {
    let number = |state| report.checks.iter().filter(|one| one.state == state).count();
    let counts = [State::Ok, State::Warning, State::Failed, State::Skipped]
        .map(|state| format!("{} {}", number(state), state.word()));
    format!("{}: {}\n", counted(report.checks.len(), "result"), counts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Group;
    use super::*;

    #[test]
    fn results_stand_below_their_group_with_what_to_do() {
        let checks = vec![
            Group::Nodes.ok("kernel", "Linux 6.12.1"),
            Group::Nodes.failed("node proxy", "node-2: pod x is not ready", "look at its log"),
            Group::Clocks.ok("nodes", "fine"),
        ];
        let expected = "\
Nodes:
  ok       kernel       Linux 6.12.1
  failed   node proxy   node-2: pod x is not ready
                        to do: look at its log

Clocks:
  ok       nodes        fine

3 results: 2 ok, 0 warning, 1 failed, 0 skipped
";
        assert_eq!(screen(&Report { pre: false, checks }), expected);
    }
}
