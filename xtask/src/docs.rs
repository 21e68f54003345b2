//! Checks docs and comments: links, width, and generated reference pages.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::run::{cargo, root, run};

/// Columns that prose and comments may take. Code blocks and tables are exempt: they cannot be wrapped.
const MAX_COLUMNS: usize = 120;

/// Folders without sources of ours.
const PASSED_OVER: [&str; 5] = [".git", "target", "bin", "corpus", "artifacts"];

/// Writes `docs/reference/commands.md` from clap, and `docs/reference/crds.md` from the CRDs.
///
/// # Errors
/// Where the generator does not build, or a page cannot be written.
pub fn write_reference() -> Result<()> {
    run(&mut cargo(&["run", "--quiet", "--locked", "--package", "ctrlmesh-reference"]))
}

/// Checks all pages and comments of the checkout, then whether the generated pages are current.
///
/// # Errors
/// All findings of the first check that fails, one a line.
pub(crate) fn check() -> Result<()> {
    let (mut pages, mut sources) = (Vec::new(), Vec::new());
    collect(&root(), &mut pages, &mut sources)?;
    let mut findings = Vec::new();
    for page in &pages {
        let text = read(page)?;
        findings.extend(wide_prose(&text).map(|line| at(page, line, "wider than 120 columns")));
        for (line, link) in links(&text) {
            findings.extend(broken(page, link)?.map(|reason| at(page, line, &reason)));
        }
    }
    for source in &sources {
        let text = read(source)?;
        findings.extend(wide_comments(&text).map(|line| at(source, line, "wider than 120 columns")));
    }
    ensure!(findings.is_empty(), "{}", findings.join("\n"));
    run(&mut cargo(&["run", "--quiet", "--locked", "--package", "ctrlmesh-reference", "--", "--check"]))
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("read {}", file.display()))
}

fn at(file: &Path, line: usize, finding: &str) -> String {
    let file = file.strip_prefix(root()).unwrap_or(file);
    format!("{}:{line}: {finding}", file.display())
}

/// Adds the Markdown pages and Rust sources below `folder`.
fn collect(folder: &Path, pages: &mut Vec<PathBuf>, sources: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            if !PASSED_OVER.contains(&name) {
                collect(&path, pages, sources)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(path);
        }
    }
    Ok(())
}

/// The lines of a page outside fenced code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

fn wide_prose(text: &str) -> impl Iterator<Item = usize> {
    let wide = |(number, line): (usize, &str)| {
        let exempt = line.starts_with('|') || !line.trim().contains(' ');
        (!exempt && line.chars().count() > MAX_COLUMNS).then_some(number)
    };
    prose(text).filter_map(wide)
}

fn wide_comments(text: &str) -> impl Iterator<Item = usize> {
    let wide = |(number, line): (usize, &str)| {
        (line.trim_start().starts_with("//") && line.chars().count() > MAX_COLUMNS).then_some(number)
    };
    (1..).zip(text.lines()).filter_map(wide)
}

/// The targets of a page's links, with the numbers of their lines. Code in backquotes has none.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut links = Vec::new();
    for (number, line) in prose(text) {
        for plain in line.split('`').step_by(2) {
            let targets = plain.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            links.extend(targets.map(|(target, _)| (number, target)));
        }
    }
    links
}

/// Why a link of `page` leads nowhere, if so. Links to other sites are not followed.
fn broken(page: &Path, link: &str) -> Result<Option<String>> {
    if link.contains("://") || link.starts_with("mailto:") {
        return Ok(None);
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match path {
        "" => page.to_owned(),
        path => page.parent().unwrap_or(page).join(path),
    };
    if !target.exists() {
        return Ok(Some(format!("{link} does not exist")));
    }
    let is_known = anchor.is_empty() || anchors(&read(&target)?).contains(anchor);
    Ok((!is_known).then(|| format!("{link} names no heading of its page")))
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
    let mut anchors = BTreeSet::new();
    for (_, heading) in headings {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = |letter: &char| letter.is_alphanumeric() || "-_ ".contains(*letter);
        let anchor: String = heading.chars().filter(kept).collect::<String>().replace(' ', "-");
        let taken = (1..).map(|number| format!("{anchor}-{number}"));
        let free = std::iter::once(anchor.clone()).chain(taken).find(|name| !anchors.contains(name));
        anchors.extend(free);
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_measured_and_code_and_tables_are_not() {
        let wide = "word ".repeat(30);
        let text = format!("{wide}\n```\n{wide}\n```\n| {wide} |\nshort\n{wide}\n");
        assert_eq!(wide_prose(&text).collect::<Vec<_>>(), [1, 7]);
        let source = format!("// {wide}\nlet x = 1;\n    /// short\n");
        assert_eq!(wide_comments(&source).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn links_are_found_outside_code() {
        let text = "[a](b.md#c) and `[no](link)`\n```\n[no](code)\n```\n![picture](d.png)\n";
        assert_eq!(links(text), [(1, "b.md#c"), (5, "d.png")]);
    }

    #[test]
    fn a_link_leads_to_a_file_and_to_a_heading_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("page.md");
        fs::write(&page, "# A page\n\n## Ports, and `more`\n## Twice\n## Twice\n").unwrap();
        for good in ["page.md", "#a-page", "page.md#ports-and-more", "#twice-1", "https://a.b/c"] {
            assert_eq!(broken(&page, good).unwrap(), None, "{good}");
        }
        for bad in ["other.md", "#nowhere", "page.md#twice-2"] {
            assert!(broken(&page, bad).unwrap().is_some(), "{bad}");
        }
    }
}
