//! Walks the list of attacks that were tried: each has tests, and each of these is there.
//!
//! They are run where they stand. So an attack cannot lose its test without a word, by a new name or with a file.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

const LIST: &str = include_str!("../../docs/design/attacks.md");

/// The links of a text: what they say, without backquotes, and where they lead.
fn links(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("[`").skip(1).filter_map(|rest| rest.split_once("`](")).filter_map(|(name, rest)| {
        let (target, _) = rest.split_once(')')?;
        Some((name, target))
    })
}

/// Whether a source has this test, and does not ignore it.
fn has_test(source: &str, name: &str) -> bool {
    let begin = format!("fn {name}(");
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let at = lines.iter().position(|line| line.strip_prefix("async ").unwrap_or(line).starts_with(&begin));
    at.is_some_and(|at| {
        let all: Vec<_> = lines[..at].iter().rev().take_while(|line| line.starts_with("#[")).collect();
        let is_test = all.iter().any(|one| one.starts_with("#[test]") || one.starts_with("#[tokio::test"));
        is_test && !all.iter().any(|one| one.starts_with("#[ignore"))
    })
}

#[test]
fn each_attack_has_tests_that_run() -> Result<()> {
    let design = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/design");
    let rows: Vec<&str> = LIST.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    ensure!(rows.len() > 10, "{rows:?}");
    for row in rows {
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().context("a cell")?;
        ensure!(links(cell).next().is_some(), "no test: {row}");
        for (name, target) in links(cell) {
            let source = fs::read_to_string(design.join(target)).with_context(|| format!("read {target}"))?;
            ensure!(has_test(&source, name), "{target} has no test {name}");
        }
    }
    Ok(())
}

#[test]
fn what_is_no_test_or_does_not_run_does_not_count() {
    let source = "#[test]\nfn one() {}\n\n#[tokio::test(start_paused = true)]\nasync fn two() {}\n\n\
        #[test]\n#[ignore]\nfn three() {}\n\nfn four() {}\n";
    assert!(has_test(source, "one") && has_test(source, "two"));
    assert!(["three", "four", "five", "on"].iter().all(|name| !has_test(source, name)));
}
