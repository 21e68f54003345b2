//! The docs list every flag and metric of the manager, and the ShardingConfigs in them are valid.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::{fs, io};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_manager::rules::validate;
use regex::Regex;
use serde_json::Value;

const COMMANDS: &str = include_str!("../../docs/reference/commands.md");
const METRICS: &str = include_str!("../../docs/reference/metrics.md");
const SHARDING_CONFIG: &str = include_str!("../../docs/sharding-config.md");

/// A flag, as `--help` tells of it: the commands that need no cluster are the program's, and not its library's.
struct Flag {
    command: String,
    /// With its dashes.
    name: String,
    default: Option<String>,
}

/// What `--help` says of a command.
fn help(command: &[&str]) -> Result<String> {
    let program = env!("CARGO_BIN_EXE_ctrlmesh-manager");
    let output = Command::new(program).args(command).arg("--help").output()?;
    ensure!(output.status.success(), "{command:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Every long flag of every command.
fn flags() -> Result<Vec<Flag>> {
    let name = Regex::new(r"^ +(?:-\w, )?(--[a-z-]+)")?;
    let default = Regex::new(r"\[default: (.*?)\](?: \[|$)")?;
    let overview = help(&[])?;
    let (_, commands) = overview.split_once("Commands:\n").context("no commands")?;
    let commands = commands.lines().take_while(|line| !line.is_empty());
    let commands = commands.filter_map(|line| line.split_whitespace().next());
    let mut flags = Vec::new();
    for command in commands.filter(|command| *command != "help") {
        let text = help(&[command])?;
        let (_, options) = text.split_once("Options:\n").context("no options")?;
        let mut parts: Vec<Vec<&str>> = Vec::new();
        for line in options.lines() {
            match parts.last_mut() {
                Some(part) if !name.is_match(line) => part.push(line.trim()),
                _ => parts.push(vec![line]),
            }
        }
        for part in parts {
            let text = part.join(" ");
            let flag = name.captures(&text).context("no flag")?[1].to_owned();
            let default = default.captures(text.trim()).map(|found| found[1].to_owned());
            flags.push(Flag { command: command.to_owned(), name: flag, default });
        }
    }
    flags.retain(|flag| !["--help", "--version"].contains(&&*flag.name));
    Ok(flags)
}

/// A section, by what its heading begins with.
fn section(heading: &str) -> &'static str {
    COMMANDS.split("\n## ").find(|part| part.starts_with(heading)).unwrap_or_default()
}

/// Words, without what stands around them.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|letter: char| letter.is_whitespace() || "`|[]".contains(letter));
    words.map(|word| word.trim_matches(['(', ')', ',', ';', '.']))
}

/// What stands in backquotes; examples are fenced, and do not count.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2))
}

#[test]
fn the_docs_have_every_flag_and_its_default() -> Result<()> {
    let (run, check) = (section("ctrlmesh-manager run"), section("Commands without a cluster"));
    let in_run: BTreeSet<&str> = quoted(run).flat_map(words).collect();
    let in_check: BTreeSet<&str> = quoted(check).flat_map(words).collect();
    let flags = flags()?;
    ensure!(flags.len() > 25, "{}", flags.len());
    for Flag { command, name, default } in &flags {
        // The others have some of its flags.
        let told = in_run.contains(&**name) || command != "run" && in_check.contains(&**name);
        ensure!(told, "{command} {name} is not in commands.md");
        let Some(default) = default else { continue };
        // As the docs write what depends on the version, and on whether the machine has IPv6.
        let default = default.replace(env!("CARGO_PKG_VERSION"), "VERSION");
        let default = format!("`{}`", default.replace("0.0.0.0:", "[::]:"));
        let row = run.lines().find(|row| {
            let first = row.strip_prefix("| ").and_then(|row| row.split(" | ").next());
            first.is_some_and(|first| quoted(first).flat_map(words).any(|word| word == name))
        });
        let row = row.with_context(|| format!("no row of {name}"))?;
        let bare = format!(" {} ", default.trim_matches('`'));
        ensure!(row.contains(&default) || row.contains(&bare), "no {default} of {name} in {row}");
    }
    Ok(())
}

/// Names that are registered in a folder's sources: which module does it, the registry does not tell.
fn metrics(folder: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    let registered = Regex::new(r#"(?:register|counter|gauge)\(\s*(?:\w+,\s*)?"([a-z_]+)","#)?;
    for entry in fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()? {
        let path = entry.path();
        if path.is_dir() {
            metrics(&path, found)?;
        } else {
            let source = fs::read_to_string(&path)?;
            found.extend(registered.captures_iter(&source).map(|one| one[1].to_owned()));
        }
    }
    Ok(())
}

#[test]
fn the_docs_list_every_metric() -> Result<()> {
    let mut names = BTreeSet::new();
    metrics(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut names)?;
    ensure!(names.len() > 12 && names.contains("leader"), "{names:?}");
    let listed: BTreeSet<&str> = quoted(METRICS)
        .filter_map(|name| name.split('{').next())
        .map(|name| name.trim_start_matches("ctrlmesh_manager_").trim_end_matches("_total"))
        .collect();
    for name in names {
        ensure!(listed.contains(&*name), "{name} is not in metrics.md");
    }
    Ok(())
}

#[test]
fn the_shards_in_the_docs_are_valid() -> Result<()> {
    let blocks =
        SHARDING_CONFIG.split("\n```yaml\n").skip(1).filter_map(|rest| rest.split("\n```").next());
    let shown: Vec<&str> = blocks.filter(|block| block.contains("kind: ShardingConfig")).collect();
    ensure!(shown.len() > 1, "{shown:?}");
    // Beside each other, as a reader may apply them.
    let files = shown.iter().map(|block| {
        let documents: Vec<Value> = serde_saphyr::from_multiple(block)?;
        Ok(("sharding-config.md".to_owned(), documents))
    });
    let verdicts = validate::manifests(&files.collect::<Result<Vec<_>>>()?);
    ensure!(verdicts.len() > 2, "{verdicts:?}");
    for verdict in verdicts {
        let report = verdict.report.with_context(|| format!("{} passed over", verdict.name))?;
        ensure!(report.errors.is_empty(), "{}: {:?}", verdict.name, report.errors);
        ensure!(report.warnings.is_empty(), "{}: {:?}", verdict.name, report.warnings);
    }
    Ok(())
}
