//! Runs several test binaries at once, the longest first.
//!
//! Each of them waits at times: for a kubelet, for a watch, for a deadline. How long each takes is in
//! `target/test-seconds`, which the last run on this machine has written.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use std::{cmp, env, fs};

use anyhow::{Result, bail};

use super::{Options, Outcome, Tier, test};
use crate::progress::say;
use crate::run::{BOOTSTRAP, Print, root, run as run_command, watch};
use crate::{images, user_cluster};

/// Seconds that each binary took, by its name.
type Seconds = BTreeMap<String, u64>;

/// The tests that stand in the sources, as a job: those of all crates.
const SOURCES: &str = "sources";

/// The examples in documentation, which are built one by one.
const DOCUMENTATION: &str = "documentation";

/// The jobs of the unit tier, which are no test binaries of their own.
pub(super) const UNITS: [&str; 2] = [SOURCES, DOCUMENTATION];

/// How many of its tests a binary runs at once, as libtest reads it.
const THREADS: &str = "RUST_TEST_THREADS";

/// How many at least, where they wait more than they work.
const WAITING: usize = 4;

/// Runs these jobs in so many `lanes`; gives what came of each.
///
/// # Errors
/// Where a lane breaks.
pub(super) fn run(mut jobs: Vec<(Tier, &str)>, options: &Options, lanes: usize) -> Result<Vec<(Tier, Outcome)>> {
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let last = last_run();
    // One after the other, the least powerful tier goes first: what it finds is found soonest.
    jobs.sort_by_key(|(tier, job)| ((lanes == 1).then_some(*tier), cmp::Reverse(expected(*tier, job, &last))));
    say(&format!("\n==> {} runs of tests, {lanes} at once", jobs.len()));
    let has_images = jobs.iter().any(|(tier, _)| matches!(tier, Tier::Node | Tier::Operator));
    // Where they do not build, each of the tests builds them, and says so.
    let unbuilt = |error: &anyhow::Error| say(&format!("the programs of the images: {error:#}"));
    let programs = has_images.then(|| images::build_programs().inspect_err(unbuilt).ok()).flatten();
    build(&jobs, options);
    let output = if lanes == 1 { Print::Lines } else { Print::Binaries };
    let (jobs, outcomes) = (Mutex::new(jobs.into_iter()), Mutex::new(Vec::new()));
    // A function of its own, so that the lock is held only while it takes one.
    let next = || lock(&jobs).next();
    let work = || {
        while let Some((tier, target)) = next() {
            let mut command = test(&which(target), options);
            if target != DOCUMENTATION {
                report_times(&mut command);
            }
            command.envs(programs.iter().map(|programs| (images::PROGRAMS, programs)));
            command.envs(threads(tier, lanes).map(|threads| (THREADS, threads)));
            let mut outcome = run_one(command, target, output);
            outcome.complete &= cleared(tier, target, options);
            lock(&outcomes).push((tier, target, outcome));
        }
    };
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(work)).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().or_else(|_| bail!("a thread that runs tests panicked")))
    })?;
    if let Some(programs) = programs {
        // Where it cannot be removed, the next build sweeps it.
        drop(fs::remove_dir_all(programs));
    }
    let outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    // Of some of its tests, or of a user's cluster, one learns nothing of how long a whole run takes here.
    if options.filter.is_none() && options.kubeconfig.is_none() && !options.full {
        write_down(last, &outcomes);
    }
    Ok(outcomes.into_iter().map(|(tier, _, outcome)| (tier, outcome)).collect())
}

/// Builds all of them. An error of one does not stop the others: it is built again before it runs, and fails then.
pub(super) fn build(jobs: &[(Tier, &str)], options: &Options) {
    let built = jobs.iter().filter(|(_, job)| *job != DOCUMENTATION);
    let built: Vec<&str> = built.flat_map(|(_, job)| which(job)).collect();
    if !built.is_empty() {
        drop(run_command(test(&built, options).arg("--no-run")));
    }
}

/// Whether the next job finds a user's cluster as this one did.
fn cleared(tier: Tier, target: &str, options: &Options) -> bool {
    let Some(cluster) = options.kubeconfig.as_ref().filter(|_| tier == Tier::Node) else {
        return true;
    };
    let said = |error: &anyhow::Error| say(&format!("{target}: {error:#}"));
    user_cluster::remove(cluster).inspect_err(said).is_ok()
}

/// What cargo is to be told to run of all tests.
fn which(job: &str) -> Vec<&str> {
    match job {
        SOURCES => vec!["--lib", "--bins"],
        DOCUMENTATION => vec!["--doc"],
        target => vec!["--test", target],
    }
}

/// How many tests of a binary of this tier run at once, where it is not as many as there are processors and the user
/// says nothing: those of the control-plane tier wait for deadlines and for an API server more than they work. Not
/// more: some start a control plane of their own.
fn threads(tier: Tier, lanes: usize) -> Option<String> {
    let waits = tier == Tier::ControlPlane && lanes > 1 && env::var_os(THREADS).is_none();
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    waits.then(|| processors.max(WAITING).to_string())
}

/// Has libtest print how long each test took. That is unstable: it asks for a variable, which only the test binaries
/// get.
fn report_times(command: &mut Command) {
    command.arg("--config");
    command.arg(format!("target.'cfg(all())'.runner=['env', '{BOOTSTRAP}=1']"));
    command.args(["--", "-Z", "unstable-options", "--report-time"]);
}

fn run_one(mut command: Command, target: &str, output: Print) -> Outcome {
    let start = Instant::now();
    let mut outcome = Outcome { complete: true, ..Outcome::default() };
    outcome.add(
        target,
        watch(&mut command, output).unwrap_or_else(|error| {
            say(&format!("{target}: {error:#}"));
            (Vec::new(), false)
        }),
    );
    outcome.taken = start.elapsed();
    outcome
}

/// How long a job takes: as the last time, or as others of its tier.
fn expected(tier: Tier, target: &str, last: &Seconds) -> Duration {
    let usual = match tier {
        Tier::Unit => 40,
        Tier::Socket => 5,
        Tier::Kernel => 100,
        Tier::ControlPlane => 60,
        Tier::Node => 200,
        Tier::Operator => 150,
    };
    Duration::from_secs(last.get(target).copied().unwrap_or(usual))
}

fn file() -> PathBuf {
    root().join("target/test-seconds")
}

/// What the last run has written down, where there was one.
fn last_run() -> Seconds {
    let text = fs::read_to_string(file()).unwrap_or_default();
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.filter_map(|(target, taken)| Some((target.to_owned(), taken.parse().ok()?))).collect()
}

/// Where it cannot be written, the next run goes by the tiers.
fn write_down(mut seconds: Seconds, outcomes: &[(Tier, &str, Outcome)]) {
    let ran = outcomes.iter().filter(|(.., outcome)| outcome.complete);
    seconds.extend(ran.map(|(_, job, outcome)| ((*job).to_owned(), outcome.taken.as_secs())));
    let lines: Vec<String> = seconds.iter().map(|(target, taken)| format!("{target} {taken}\n")).collect();
    drop(fs::write(file(), lines.concat()));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_is_expected_by_the_last_run_and_else_by_its_tier() {
        let last = Seconds::from([("control_plane".to_owned(), 400)]);
        let of = |tier, target| expected(tier, target, &last);
        let known = of(Tier::ControlPlane, "control_plane");
        assert!(known > of(Tier::Node, "node_mesh"));
        assert!(of(Tier::Node, "node_mesh") > of(Tier::ControlPlane, "control_plane_run"));
        assert!(of(Tier::ControlPlane, "control_plane_run") > of(Tier::Socket, "limits"));
    }
}
