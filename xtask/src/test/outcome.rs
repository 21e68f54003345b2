//! The results of the tiers, and the table of them.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::Tier;

/// How many of the slowest tests are printed.
const SLOWEST: usize = 10;

/// How many lines are printed of what a test said that failed.
const SAID: usize = 15;

/// The result of a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) passed: usize,
    pub(super) failed: usize,
    /// How many tests the filter left out.
    pub(super) filtered: usize,
    /// The tests that were not run, or said that they cannot be here, each with its reason.
    pub(super) ignored: Vec<String>,
    /// Whether everything was built and run.
    pub(super) complete: bool,
    /// Why it was not run.
    pub(super) skipped: Option<String>,
    /// How long it took, what had to be built with it.
    pub(super) taken: Duration,
    /// How long each test took, as libtest measures it; with its target before its name.
    pub(super) times: Vec<(Duration, String)>,
    /// What each test said last that failed, after its name.
    pub(super) said: Vec<String>,
}

impl Outcome {
    /// Adds what a run of cargo printed for `target`, and whether it succeeded.
    pub(super) fn add(&mut self, target: &str, (lines, complete): (Vec<String>, bool)) {
        let times = lines.iter().filter_map(|line| time(line));
        self.times.extend(times.map(|(taken, name)| (taken, format!("{target} {name}"))));
        self.said.extend(said(&lines));
        self.complete &= complete;
        for [passed, failed, filtered] in lines.iter().filter_map(|line| counts(line)) {
            self.passed += passed;
            self.failed += failed;
            self.filtered += filtered;
        }
        self.ignored.extend(lines.iter().filter_map(|line| ignored(line)));
        let skipped: Vec<String> = lines.iter().filter_map(|line| skipped(line)).collect();
        self.passed = self.passed.saturating_sub(skipped.len());
        self.ignored.extend(skipped);
    }

    /// Adds what came of another part of the same tier; the times are added too, though the parts ran at once.
    pub(super) fn merge(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.filtered += other.filtered;
        self.ignored.extend(other.ignored);
        self.complete &= other.complete;
        self.taken += other.taken;
        self.times.extend(other.times);
        self.said.extend(other.said);
    }

    /// Why something of it was not run, or not well.
    fn why(&self) -> String {
        match &self.skipped {
            Some(reason) => reason.clone(),
            None if !self.complete && self.failed == 0 => "did not build, or a test binary ended early".to_owned(),
            None => self.ignored.join(", "),
        }
    }

    pub(super) fn is_good(&self, strict: bool) -> bool {
        match &self.skipped {
            Some(_) => !strict,
            None => self.complete && self.failed == 0,
        }
    }
}

/// What libtest says of a test that is marked with `#[ignore]`: its name and why.
fn ignored(line: &str) -> Option<String> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    let reason = rest.strip_prefix(", ").unwrap_or("no reason is given");
    Some(format!("{name} ({reason})"))
}

/// What a test says of itself where it cannot run here: libtest knows only tests that pass and tests that fail.
fn skipped(line: &str) -> Option<String> {
    let (before, rest) = line.split_once("skipped: ")?;
    if !before.is_empty() && !before.ends_with(" ... ") {
        return None;
    }
    let (name, reason) = rest.split_once(": ")?;
    Some(format!("{name} ({reason})"))
}

/// How long a test took, and its name, where libtest says so: `test a::b ... ok <0.012s>`.
fn time(line: &str) -> Option<(Duration, &str)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = rest.rsplit_once('<')?.1.strip_suffix("s>")?.parse().ok()?;
    Some((Duration::try_from_secs_f64(seconds).ok()?, name))
}

/// The last lines of what libtest shows of each test that failed, after its name and without its stack.
fn said(lines: &[String]) -> Vec<String> {
    let begins = |line: &String| line.starts_with("---- ") && line.ends_with(" stdout ----");
    let starts = (0..lines.len()).filter(|at| begins(&lines[*at]));
    let section = |start: usize| {
        let rest = &lines[start + 1..];
        let ends = |line: &String| begins(line) || line == "failures:" || line == "Stack backtrace:";
        let end = rest.iter().position(ends).unwrap_or(rest.len());
        let told: Vec<&str> = rest[..end].iter().map(String::as_str).filter(|line| !line.trim().is_empty()).collect();
        let first = told.len().saturating_sub(SAID);
        format!("{}\n{}", lines[start], told[first..].join("\n"))
    };
    starts.map(section).collect()
}

/// The counts in a closing line of libtest: passed, failed, and left out by the filter.
fn counts(line: &str) -> Option<[usize; 3]> {
    let rest = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let count = |unit: &str| rest.split("; ").find_map(|part| part.strip_suffix(unit)?.trim().parse().ok());
    Some([count("passed")?, count("failed")?, count("filtered out")?])
}

/// Prints the table, and the line with which libtest ends; gives whether everything is good.
pub(super) fn print(
    out: &mut impl Write,
    outcomes: &BTreeMap<Tier, Outcome>,
    strict: bool,
    taken: Duration,
) -> Result<bool> {
    writeln!(
        out,
        "\n{:<14} {:>6} {:>7} {:>7} {:>8} {:>7}  why",
        "tier", "tests", "passed", "failed", "skipped", "seconds"
    )?;
    let mut all = Outcome::default();
    for (tier, outcome) in outcomes {
        let Outcome { passed: good, failed: bad, ignored: left, .. } = outcome;
        let (left, why) = (left.len(), outcome.why());
        let skipped = if outcome.skipped.is_some() { "all".to_owned() } else { left.to_string() };
        writeln!(
            out,
            "{:<14} {:>6} {good:>7} {bad:>7} {skipped:>8} {:>7}  {why}",
            tier.name(),
            good + bad + left,
            outcome.taken.as_secs()
        )?;
        all.merge(outcome.clone());
        all.failed += usize::from(!outcome.is_good(strict) && *bad == 0);
    }
    all.taken = taken;
    all.times.sort_unstable_by(|one, other| other.cmp(one));
    if !all.times.is_empty() {
        writeln!(out, "\nslowest tests, in seconds")?;
    }
    for (time, name) in all.times.iter().take(SLOWEST) {
        writeln!(out, "{:>7.1}  {name}", time.as_secs_f64())?;
    }
    // Once more at the end: the logs of a long run are cut.
    for said in &all.said {
        writeln!(out, "\n{said}")?;
    }
    let line = closing_line(&all);
    writeln!(out, "\n{line}").context("print the result")?;
    Ok(all.failed == 0)
}

fn closing_line(all: &Outcome) -> String {
    let Outcome { passed, failed, filtered, ignored, taken, .. } = all;
    let verdict = if *failed == 0 { "ok" } else { "FAILED" };
    let (ignored, seconds) = (ignored.len(), taken.as_secs_f64());
    format!(
        "test result: {verdict}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; \
         {filtered} filtered out; finished in {seconds:.2}s"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closing_line_of_a_test_binary_is_counted() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.10s";
        assert_eq!(counts(line), Some([12, 3, 4]));
        assert_eq!(counts("test parses ... ok"), None);
    }

    #[test]
    fn the_closing_line_is_one_that_a_reader_of_libtest_knows() {
        let line = closing_line(&Outcome {
            passed: 12,
            filtered: 2,
            ignored: vec!["a".to_owned()],
            taken: Duration::from_millis(61_500),
            ..Outcome::default()
        });
        assert_eq!(
            line,
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 61.50s"
        );
        assert_eq!(counts(&line), Some([12, 0, 2]));
    }

    #[test]
    fn ignored_tests_are_named_with_their_reason() {
        let lines = [
            "test a::b ... ok",
            "test a::c ... ignored, needs a kernel of next year",
            "test a::d ... ignored",
            "test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ];
        let mut outcome = Outcome { complete: true, ..Outcome::default() };
        outcome.add("target", (lines.map(str::to_owned).to_vec(), true));
        assert_eq!((outcome.passed, outcome.failed, outcome.ignored.len()), (1, 0, 2));
        assert_eq!(outcome.why(), "a::c (needs a kernel of next year), a::d (no reason is given)");
    }

    #[test]
    fn a_test_that_cannot_run_here_did_not_pass() {
        let lines = [
            "test a::b ... ok",
            "test a::c ... skipped: a::c: the cluster is the user's",
            "ok",
            "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ];
        let mut outcome = Outcome { complete: true, ..Outcome::default() };
        outcome.add("target", (lines.map(str::to_owned).to_vec(), true));
        assert_eq!((outcome.passed, outcome.failed), (1, 0));
        assert_eq!(outcome.why(), "a::c (the cluster is the user's)");
    }

    #[test]
    fn what_the_table_says_and_whether_it_is_good_are_one() {
        let one = Outcome { passed: 3, complete: true, ..Outcome::default() };
        let none = Outcome { skipped: Some("needs root".to_owned()), ..Outcome::default() };
        let early = Outcome { passed: 3, ..Outcome::default() };
        let printed = |other: &Outcome, strict| {
            let outcomes = BTreeMap::from([(Tier::Unit, one.clone()), (Tier::Node, other.clone())]);
            let mut out = Vec::new();
            let good = print(&mut out, &outcomes, strict, Duration::from_mins(1)).unwrap();
            let text = String::from_utf8(out).unwrap();
            let row = text.lines().find(|line| line.starts_with("node")).unwrap();
            let row = row.split_whitespace().collect::<Vec<_>>().join(" ");
            let last = text.lines().last().unwrap().to_owned();
            assert_eq!(last.starts_with("test result: ok. "), good, "{last}");
            (good, row, counts(&last).unwrap())
        };
        let skipped = "node 0 0 0 all 0 needs root".to_owned();
        assert_eq!(printed(&none, false), (true, skipped.clone(), [3, 0, 0]));
        assert_eq!(printed(&none, true), (false, skipped, [3, 1, 0]));
        let early_row = "node 3 3 0 0 0 did not build, or a test binary ended early".to_owned();
        assert_eq!(printed(&early, false), (false, early_row, [6, 1, 0]));
        assert_eq!(printed(&one, true), (true, "node 3 3 0 0 0".to_owned(), [6, 0, 0]));
    }

    #[test]
    fn the_slowest_tests_are_printed_with_their_targets() {
        let lines = ["test a::quick ... ok <0.012s>", "test a::slow ... FAILED <61.500s>", "test b ... ok"];
        let mut outcome = Outcome { complete: true, ..Outcome::default() };
        outcome.add("kernel", (lines.map(str::to_owned).to_vec(), true));
        let mut out = Vec::new();
        print(&mut out, &BTreeMap::from([(Tier::Kernel, outcome)]), true, Duration::ZERO).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("   61.5  kernel a::slow\n    0.0  kernel a::quick\n\n"), "{text}");
    }

    #[test]
    fn what_a_test_said_that_failed_is_printed_again_at_the_end() {
        let lines = "\nfailures:\n\n---- a::b stdout ----\nit waits\n\nError: in vain\n\nStack backtrace:\n   0: main\n\n---- c stdout ----\nno\n\n\nfailures:\n    a::b\n    c\n";
        let mut outcome = Outcome { complete: true, ..Outcome::default() };
        outcome.add("kernel", (lines.lines().map(str::to_owned).collect(), false));
        assert_eq!(outcome.said, ["---- a::b stdout ----\nit waits\nError: in vain", "---- c stdout ----\nno"]);
        let many: Vec<String> =
            ["---- a stdout ----"].into_iter().map(str::to_owned).chain((0..99).map(|at| at.to_string())).collect();
        assert_eq!(said(&many)[0].lines().collect::<Vec<_>>()[..2], ["---- a stdout ----", "84"]);
    }

    #[test]
    fn a_skipped_tier_fails_only_where_nothing_may_be_skipped() {
        let skipped = Outcome { skipped: Some("needs root".to_owned()), ..Outcome::default() };
        assert!(skipped.is_good(false) && !skipped.is_good(true));
        let broken = Outcome { passed: 3, ..Outcome::default() };
        assert!(!broken.is_good(false), "a binary that ended early is not good");
    }
}
