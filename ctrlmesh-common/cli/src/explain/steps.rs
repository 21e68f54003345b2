//! Prints steps, one below the other, with a number.
//!
//! Pure.

use serde::Serialize;

/// One step of an explanation.
#[derive(Debug, Serialize)]
pub(crate) struct Step {
    pub(super) title: String,
    /// Sentences, and tables of several lines.
    pub(super) lines: Vec<String>,
}

impl Step {
    pub(super) fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), lines: Vec::new() }
    }

    pub(super) fn say(&mut self, line: impl Into<String>) {
        self.lines.push(line.into());
    }
}

pub(super) fn print(steps: &[Step]) -> String {
    let step = |(at, step): (usize, &Step)| {
        let lines = step.lines.iter().flat_map(|line| line.lines()).map(|line| format!("   {line}\n"));
        format!("\n{}. {}\n{}", at + 1, step.title, lines.collect::<String>())
    };
    steps.iter().enumerate().map(step).collect()
}
