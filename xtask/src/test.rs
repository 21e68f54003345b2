//! Runs every tier of tests, and says in a table what was run and what was not.
//!
//! A tier is found by the name of the test target: `kernel*` and `control_plane*` are those tiers, every other file in
//! a `tests/` folder is of the socket tier, and what stands in the sources is the unit tier.

use std::collections::BTreeMap;
use std::io::{Write as _, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::{env, fs};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};

use crate::run::{CRATES, cargo, is_root, root, run, say, watch};
use crate::setup::Readiness;
use crate::{build_ebpf, setup, tools};

/// Variable with which tests take their full counts.
const FULL: &str = "CTRLMESH_TEST_FULL";

/// Benchmarks, and the target that each is in.
const BENCHES: [(&str, &str); 7] = [
    ("connect", "connect"),
    ("request", "proxy"),
    ("list", "proxy"),
    ("watch", "proxy"),
    ("rule", "proxy"),
    ("idle", "proxy"),
    ("profile", "proxy"),
];

/// What to run.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Run this tier only; may be given several times
    #[arg(long, value_name = "NAME")]
    tier: Vec<Tier>,
    /// Run only the tests whose names contain this
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
    /// Take the full counts (1,000 restarts instead of 100)
    #[arg(long)]
    full: bool,
}

/// What to measure.
#[derive(Args, Clone, Debug)]
pub struct Bench {
    /// Which benchmark (connect, request, list, watch, rule, idle or profile); without it, all of them
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Take a few samples only: minutes become seconds
    #[arg(long)]
    quick: bool,
}

/// A tier of tests, the least powerful first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Tier {
    /// The pure core, without I/O
    Unit,
    /// Against scripted peers on loopback
    Socket,
    /// Real programs in the kernel, own cgroups and network namespaces
    Kernel,
    /// A real kube-apiserver and etcd
    ControlPlane,
}

/// What came of a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Outcome {
    passed: usize,
    failed: usize,
    ignored: usize,
    /// Whether everything was built and run.
    complete: bool,
    /// Why it was not run.
    skipped: Option<String>,
}

// === impl Tier ===

impl Tier {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The tier of a test target.
    fn of(target: &str) -> Self {
        if target.starts_with("kernel") {
            Self::Kernel
        } else if target.starts_with("control_plane") {
            Self::ControlPlane
        } else {
            Self::Socket
        }
    }

    /// Why it cannot run on this machine, if so.
    fn obstacle(self) -> Option<String> {
        match self {
            Self::Unit | Self::Socket => None,
            Self::Kernel if !is_root() => Some("needs root".to_owned()),
            Self::Kernel if !has_cgroup2() => Some("needs a cgroup2 mount".to_owned()),
            Self::Kernel => (!root().join("target/bpf/ctrlmesh.o").is_file())
                .then(|| "needs the kernel programs".to_owned()),
            Self::ControlPlane => {
                let missing = ["etcd", "kube-apiserver"]
                    .into_iter()
                    .find(|program| !tools::control_plane(program).is_file());
                missing.map(|program| format!("needs {program}"))
            }
        }
    }
}

// === impl Outcome ===

impl Outcome {
    fn is_good(&self, strict: bool) -> bool {
        match &self.skipped {
            Some(_) => !strict,
            None => self.complete && self.failed == 0,
        }
    }
}

/// Sets up, runs the tiers, and prints the table.
///
/// # Errors
/// Where something cannot be set up or started. Failed tests are not errors but an exit code.
pub fn run_tiers(options: &Options) -> Result<ExitCode> {
    match setup::run_setup() {
        Ok(Readiness::Ready) => {}
        Ok(Readiness::NotReady) => say("going on with the tiers that can run without"),
        Err(error) => say(&format!("{error:#}\ngoing on with the tiers that can run without")),
    }
    let strict = env::var("CI").is_ok_and(|value| value == "true");
    let programs = build_ebpf::build();
    if let Err(error) = &programs {
        say(&format!("the kernel programs are not built: {error:#}"));
    }
    let targets = targets()?;
    let mut outcomes = Vec::new();
    for tier in Tier::value_variants() {
        if options.tier.is_empty() || options.tier.contains(tier) {
            let names = targets.get(tier).map_or(&[][..], Vec::as_slice);
            outcomes.push((*tier, run_tier(*tier, names, options, programs.is_ok())?));
        }
    }
    print(&outcomes, strict)?;
    let good = outcomes.iter().all(|(_, outcome)| outcome.is_good(strict));
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs benchmarks.
///
/// # Errors
/// Where one does not exist, cannot be built, or fails.
pub fn bench(bench: &Bench) -> Result<()> {
    let chosen: Vec<_> = BENCHES
        .iter()
        .filter(|(name, _)| bench.name.as_deref().is_none_or(|wanted| wanted == *name))
        .collect();
    let names = BENCHES.map(|(name, _)| name).join(", ");
    ensure!(!chosen.is_empty(), "there is no such benchmark; there are {names}");
    build_ebpf::build()?;
    for (name, target) in chosen {
        let mut command = cargo(&["bench", "--package", "ctrlmesh-proxy", "--locked"]);
        command.args(["--bench", target, "--"]);
        if name != target {
            command.arg(name);
        }
        if bench.quick {
            command.arg("--quick");
        }
        run(&mut command)?;
    }
    Ok(())
}

/// The test targets of all crates, by tier.
fn targets() -> Result<BTreeMap<Tier, Vec<String>>> {
    let mut targets: BTreeMap<Tier, Vec<String>> = BTreeMap::new();
    for name in CRATES {
        let Ok(entries) = fs::read_dir(root().join(name).join("tests")) else { continue };
        for entry in entries {
            let path = entry?.path();
            let target =
                path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
            let is_target = path.extension().is_some_and(|extension| extension == "rs")
                || path.join("main.rs").is_file();
            let names = targets.entry(Tier::of(&target)).or_default();
            if is_target && !names.contains(&target) {
                names.push(target);
            }
        }
    }
    for names in targets.values_mut() {
        names.sort();
    }
    Ok(targets)
}

fn run_tier(tier: Tier, targets: &[String], options: &Options, programs: bool) -> Result<Outcome> {
    // Programs of an earlier build are not what is to be tested.
    if tier == Tier::Kernel && !programs && build_ebpf::has_toolchain() {
        return Ok(Outcome::default());
    }
    if let Some(reason) = tier.obstacle() {
        return Ok(Outcome { skipped: Some(reason), ..Outcome::default() });
    }
    let mut command = cargo(&["test", "--workspace", "--locked", "--no-fail-fast"]);
    if tier == Tier::Unit {
        command.args(["--lib", "--bins"]);
    } else if targets.is_empty() {
        return Ok(Outcome { complete: true, ..Outcome::default() });
    }
    for target in targets {
        command.args(["--test", target]);
    }
    command.args(&options.filter);
    if options.full {
        command.env(FULL, "1");
    }
    say(&format!("\n==> tier {}", tier.name()));
    let (lines, complete) = watch(&mut command)?;
    let mut outcome = Outcome { complete, ..Outcome::default() };
    lines.iter().filter_map(|line| counts(line)).for_each(|(passed, failed, ignored)| {
        outcome.passed += passed;
        outcome.failed += failed;
        outcome.ignored += ignored;
    });
    Ok(outcome)
}

/// The counts in a closing line of libtest.
fn counts(line: &str) -> Option<(usize, usize, usize)> {
    let rest = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let count =
        |unit: &str| rest.split("; ").find_map(|part| part.strip_suffix(unit)?.trim().parse().ok());
    Some((count("passed")?, count("failed")?, count("ignored")?))
}

fn print(outcomes: &[(Tier, Outcome)], strict: bool) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(
        out,
        "\n{:<14} {:>6} {:>7} {:>7} {:>8}  why",
        "tier", "tests", "passed", "failed", "skipped"
    )?;
    let (mut passed, mut failed, mut ignored) = (0, 0, 0);
    for (tier, outcome) in outcomes {
        let Outcome { passed: good, failed: bad, ignored: left, .. } = outcome;
        let why = match &outcome.skipped {
            Some(reason) => reason.as_str(),
            None if !outcome.complete && *bad == 0 => "did not build, or a test binary ended early",
            None => "",
        };
        let skipped = if outcome.skipped.is_some() { "all".to_owned() } else { left.to_string() };
        writeln!(
            out,
            "{:<14} {:>6} {good:>7} {bad:>7} {skipped:>8}  {why}",
            tier.name(),
            good + bad + left
        )?;
        (passed, failed, ignored) = (passed + good, failed + bad, ignored + left);
        failed += usize::from(!outcome.is_good(strict) && *bad == 0);
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    let line = format!(
        "{verdict}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; 0 filtered out"
    );
    writeln!(out, "\ntest result: {line}").context("print the result")
}

fn has_cgroup2() -> bool {
    let mounts = fs::read_to_string(Path::new("/proc/self/mounts")).unwrap_or_default();
    mounts.lines().any(|mount| mount.split(' ').nth(2) == Some("cgroup2"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closing_line_of_a_test_binary_is_counted() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.10s";
        assert_eq!(counts(line), Some((12, 3, 1)));
        assert_eq!(counts("test parses ... ok"), None);
    }

    #[test]
    fn a_skipped_tier_fails_only_where_nothing_may_be_skipped() {
        let skipped = Outcome { skipped: Some("needs root".to_owned()), ..Outcome::default() };
        assert!(skipped.is_good(false) && !skipped.is_good(true));
        let broken = Outcome { passed: 3, ..Outcome::default() };
        assert!(!broken.is_good(false), "a binary that ended early is not good");
    }

    #[test]
    fn the_name_of_a_target_decides_its_tier() {
        assert_eq!(Tier::of("kernel"), Tier::Kernel);
        assert_eq!(Tier::of("control_plane"), Tier::ControlPlane);
        assert_eq!(Tier::of("forwarding"), Tier::Socket);
    }
}
