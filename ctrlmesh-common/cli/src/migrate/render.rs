//! Prints a plan for people.
//!
//! Pure.

use super::PlannedStep;
use super::leftovers::Leftover;
use crate::text;

/// Objects that are named for one leftover.
const NAMED: usize = 3;

pub(super) fn plan(steps: &[PlannedStep], leftovers: &[Leftover]) -> String {
    let mut screen = String::new();
    for step in steps {
        screen.push_str(&self::step(step));
    }
    if !leftovers.is_empty() {
        screen.push_str("\nWhat becomes of the rest:\n");
        let header = ["WHAT", "OF", "NOW"].map(str::to_owned).to_vec();
        let rows = leftovers.iter().map(|one| vec![one.what.clone(), some(&one.of), one.instead.to_owned()]);
        screen.push_str(&text::table(&[header].into_iter().chain(rows).collect::<Vec<_>>(), "  "));
    }
    screen
}

fn step(step: &PlannedStep) -> String {
    let PlannedStep { step, done, planned } = step;
    let outcome = match (done, planned.problems.len(), planned.changes.len()) {
        (true, _, _) => "done".to_owned(),
        (false, 0, 0) => "nothing to change".to_owned(),
        (false, 0, changes) => text::counted(changes, "change"),
        (false, problems, _) => text::counted(problems, "problem"),
    };
    let mut lines = vec![format!("{}: {outcome}", step.name())];
    if !done {
        lines.extend(planned.problems.iter().map(|problem| format!("  problem: {problem}")));
        lines.extend(planned.notes.iter().map(|note| format!("  note: {note}")));
        lines.extend(planned.changes.iter().map(|one| {
            let is_resumed = planned.resumed.iter().any(|later| later.object == one.change.object);
            let back = match &one.inverse {
                Some(_) => "",
                None if is_resumed => " (step managers makes it again)",
                None => " (cannot be undone)",
            };
            format!("  {}{back}", text::cut(&one.change.to_string(), 200))
        }));
    }
    lines.join("\n") + "\n"
}

fn some(names: &[String]) -> String {
    let first = names.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    let more = names.len().saturating_sub(NAMED);
    if more == 0 { first } else { format!("{first} and {more} more") }
}
