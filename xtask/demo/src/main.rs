//! The program behind `cargo xtask demo`: prepares a cluster, takes the steps, and prints what it saw.
#![forbid(unsafe_code)]

use std::io::{Write as _, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{env, thread};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use ctrlmesh_demo::environment::Environment;
use ctrlmesh_demo::install;
use ctrlmesh_demo::paint;
use ctrlmesh_demo::steps::{self, DEMO, Step};
use ctrlmesh_demo::supervisor::{self, End};
use ctrlmesh_demo::work::Work;
use ctrlmesh_testbed::{Cluster, Node, Options};
use jiff::Timestamp;
use xtask::{images, tools, user_cluster};

/// An ordinary operator, sharded before your eyes.
#[derive(Parser)]
struct Arguments {
    /// End after the last step, and succeed only if every step held
    #[arg(long)]
    once: bool,
    /// Use this cluster instead of a node of our own; the images must be there
    #[arg(long, value_name = "FILE", requires = "audit_log")]
    kubeconfig: Option<PathBuf>,
    /// The audit log that the API server of that cluster writes, at level Metadata at least
    #[arg(long, value_name = "FILE", requires = "kubeconfig")]
    audit_log: Option<PathBuf>,
    /// When the command was given that ends in this, in milliseconds since 1970
    #[arg(long, hide = true, value_name = "TIME")]
    begun: Option<i64>,
    /// Images for the node, as archives
    #[arg(value_name = "ARCHIVE")]
    images: Vec<PathBuf>,
}

/// In how many namespaces there is work at first.
const NAMESPACES: usize = 60;

/// What came of a step.
struct Outcome {
    step: Step,
    seen: Result<Vec<String>>,
    took: Duration,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    if supervisor::is_guarded() {
        supervisor::follow();
        return show(&arguments);
    }
    if let (Some(kubeconfig), Some(log)) = (&arguments.kubeconfig, &arguments.audit_log) {
        // Before anything is made there: what is there already is not ours to take away at the end.
        existing(kubeconfig, log)?;
        user_cluster::ensure_unused(kubeconfig, &steps::namespaces(NAMESPACES))?;
    }
    // Also where something of it does not end, the cluster is not left as it is.
    let end = supervisor::watch(env::args_os().skip(1));
    // Images that were being built for the node when it was killed.
    images::sweep();
    if let Some(kubeconfig) = &arguments.kubeconfig {
        say("taking out of the cluster what the demo put there (a minute or two)");
        user_cluster::remove(kubeconfig)?;
    }
    match end? {
        End::Itself(code) => Ok(code),
        End::Signal(number) => {
            say("ended; nothing is left");
            Ok(ExitCode::from(128 + number))
        }
    }
}

fn show(arguments: &Arguments) -> Result<ExitCode> {
    let start = Instant::now();
    let (cluster, log) = prepare(arguments)?;
    let environment = Environment::of(cluster, log, Work::Websites, NAMESPACES)?;
    environment.observer.settle()?;
    say(&format!("\n{}", paint::table(&environment.observer.table())));
    say(&format!("the first table, {} s after the start", since(arguments.begun, start)));
    let mut outcomes: Vec<Outcome> = Vec::new();
    for (number, step) in (1..).zip(DEMO) {
        say(&format!("\n[{number}/{}] {}\n      to hold: {}", DEMO.len(), step.title, step.promise));
        let clock = Instant::now();
        let seen = (step.run)(&environment);
        let outcome = Outcome { step, seen, took: clock.elapsed() };
        say(&report(&outcome));
        say(&paint::table(&environment.observer.table()));
        let held = outcome.seen.is_ok();
        outcomes.push(outcome);
        if !held {
            break;
        }
    }
    let (held, all) = verdict(&outcomes);
    if !all {
        let folder = install::checkout("target/reports/demo");
        environment.cluster.report(&folder)?;
        say(&format!("what the cluster said is in {}", folder.display()));
    }
    say(&format!("{held} of {} steps held, in {} s", DEMO.len(), start.elapsed().as_secs()));
    if !arguments.once {
        stay(&environment);
    }
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// How many steps held, and whether those were all that there are.
fn verdict(outcomes: &[Outcome]) -> (usize, bool) {
    let held = outcomes.iter().filter(|outcome| outcome.seen.is_ok()).count();
    (held, held == DEMO.len())
}

/// The cluster, with ctrlmesh and the operator in it, and where its audit log is.
fn prepare(arguments: &Arguments) -> Result<(Cluster, PathBuf)> {
    let (cluster, log) = match (&arguments.kubeconfig, &arguments.audit_log) {
        (Some(kubeconfig), Some(log)) => existing(kubeconfig, log)?,
        _ => node(&arguments.images)?,
    };
    phase("install ctrlmesh: kubectl apply -k deploy/", 30, || install::ctrlmesh(&cluster))?;
    phase("install an ordinary operator", 15, || {
        let api = ctrlmesh_demo::api::Api::of(&cluster)?;
        install::label_kinds(&api, Work::Websites)?;
        install::operator(&cluster, Work::Websites)
    })?;
    Ok((cluster, log))
}

/// How many seconds ago the command was given; where nobody says when that was, how long this runs.
fn since(begun: Option<i64>, start: Instant) -> u64 {
    let given = begun.and_then(|begun| Timestamp::from_millisecond(begun).ok());
    let passed = given.and_then(|given| Timestamp::now().duration_since(given).try_into().ok());
    passed.unwrap_or_else(|| start.elapsed()).as_secs()
}

fn existing(kubeconfig: &Path, log: &Path) -> Result<(Cluster, PathBuf)> {
    let file = kubeconfig.display();
    ensure!(
        kubeconfig.is_file(),
        "there is no kubeconfig {file}; name that of a cluster that you have, or leave --kubeconfig and --audit-log out to \
         get a node of the demo's own"
    );
    let cluster = Cluster::existing(kubeconfig.to_owned());
    let said = cluster.ask(&["version", "--output=json"], "").with_context(|| {
        format!("the cluster of {file} does not answer; does `kubectl --kubeconfig {file} version` reach it?")
    })?;
    install::new_enough(&said)?;
    ensure!(
        log.is_file(),
        "there is no audit log {}; name the file that the API server was told by --audit-log-path",
        log.display()
    );
    Ok((cluster, log.to_owned()))
}

fn node(images: &[PathBuf]) -> Result<(Cluster, PathBuf)> {
    let options = Options { audit: true, ..Options::default() };
    let node = phase("start a Kubernetes node", 20, || Node::start(&options))?;
    phase("load images", 15, || images.iter().try_for_each(|archive| node.load(archive)))?;
    let log = node.control_plane().audit_log();
    Ok((Cluster::of(node), log))
}

/// Does what takes about so many seconds; prints that before, and after it how long it took.
fn phase<T>(what: &str, about: u64, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    say(&format!("==> {what} (about {about} s)"));
    let result = work();
    let end = if result.is_ok() { "" } else { "failed after " };
    say(&format!("    {what}: {end}{:.1} s", start.elapsed().as_secs_f64()));
    result
}

/// Prints lines on standard output. Where nobody can read them, the work goes on.
fn say(text: &str) {
    drop(writeln!(stdout(), "{text}"));
}

fn report(outcome: &Outcome) -> String {
    let lines = match &outcome.seen {
        Ok(seen) => {
            let held = format!("held, {:.1} s", outcome.took.as_secs_f64());
            seen.iter().cloned().chain([held]).collect()
        }
        Err(error) => vec![format!("{}: DID NOT HOLD: {error:#}", outcome.step.title)],
    };
    lines.iter().map(|line| format!("      {line}")).collect::<Vec<_>>().join("\n")
}

/// Stays until somebody ends it, and prints the table every 10 s.
fn stay(environment: &Environment) -> ! {
    let kubeconfig = environment.cluster.kubeconfig().display();
    // It is built with the node, where it is not installed.
    let built = tools::control_plane("kubectl");
    let folder = built.parent().filter(|_| !tools::on_path("kubectl") && built.is_file());
    let path = folder.map(|folder| format!("export PATH=$PATH:{}\n  ", folder.display()));
    say(&format!(
        "\nIt stays up until Ctrl-C. Try, in another terminal:\n  \
         export KUBECONFIG={kubeconfig}\n  {}\
         kubectl --namespace example-operator get shardingconfigs,leases,pods --show-labels\n  \
         kubectl --namespace example-operator patch shardingconfig example-operator --type=merge --patch \
         '{{\"spec\":{{\"root\":{{\"canary\":{{\"inShardHash\":[\"0\",\"1\"]}}}}}}}}'\n  \
         kubectl patch website site-0 --namespace shop-00 --type=merge --patch '{{\"spec\":{{\"pages\":9}}}}'\n",
        path.unwrap_or_default()
    ));
    let _load = environment.load(Duration::from_millis(250));
    loop {
        thread::sleep(Duration::from_secs(10));
        say(&paint::table(&environment.observer.table()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_steps_have_to_hold() {
        let of = |seen: &[bool]| {
            let outcomes = seen.iter().zip(DEMO).map(|(held, step)| {
                let seen = if *held { Ok(Vec::new()) } else { Err(anyhow::anyhow!("why")) };
                Outcome { step, seen, took: Duration::ZERO }
            });
            verdict(&outcomes.collect::<Vec<_>>())
        };
        let all = [true; DEMO.len()];
        assert_eq!(of(&all), (DEMO.len(), true));
        assert_eq!(of(&all[1..]), (DEMO.len() - 1, false), "it ended before the last");
        for at in 0..DEMO.len() {
            let mut one = all;
            one[at] = false;
            assert_eq!(of(&one), (DEMO.len() - 1, false));
        }
        assert_eq!(of(&[]), (0, false));
    }
}
