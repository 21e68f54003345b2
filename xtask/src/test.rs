//! Runs every tier of tests, and prints a table of what was run and what was not.
//!
//! The name of a test target decides its tier: `kernel*`, `control_plane*`, `node*` and `operator*` are those tiers.
//! Every other file in a `tests/` folder is of the socket tier, and tests in the sources are the unit tier.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;
use std::{env, fs, io, thread};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};

use crate::progress::say;
use crate::run::{cargo, crates, has_cgroup2, is_root, root};
use crate::setup::{Plan, Purpose, Readiness, kubectl};
use crate::supervisor::OnExit;
use crate::{build_ebpf, disk_space, setup, supervisor, tools, user_cluster};

mod outcome;
mod parallel;

use outcome::{Outcome, print};

/// Variable with which tests take their full counts.
const FULL: &str = "CTRLMESH_TEST_FULL";

/// Variable that names the cluster of the node tier, as `ctrlmesh-testbed` has it.
const KUBECONFIG: &str = "CTRLMESH_TEST_KUBECONFIG";

/// Programs that the tests with an API server start.
const CONTROL_PLANE_PROGRAMS: [&str; 4] = ["etcd", "kube-apiserver", "kube-controller-manager", "kubectl"];

/// Programs without which there is no node.
const NODE_PROGRAMS: [&str; 7] =
    ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"];
const NODE_PACKAGES: [&str; 7] = ["containerd", "runc", "conntrack", "nft", "socat", "ip", "nsenter"];

/// What to run.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Run this tier only; may be given several times. For `unit` alone nothing is set up
    #[arg(long, value_name = "NAME")]
    tier: Vec<Tier>,
    /// Run only the tests whose names contain this
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
    /// Run the node tier against this cluster instead of a node of our own; the images must be there. What the tests
    /// put there is taken away at the end, so one that has ctrlmesh already is refused
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Run this many test binaries at once [default: as many as there are processors, two at least]
    #[arg(long, value_name = "NUMBER")]
    at_once: Option<usize>,
    /// Take the full counts (1,000 restarts instead of 100)
    #[arg(long)]
    full: bool,
}

impl Options {
    /// How many test binaries run at once. Of more, each would wait for processors: these are busy with two already,
    /// and an operator that gets none for 10 s loses its lock. On a user's cluster they would get in each other's way.
    fn lanes(&self) -> usize {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        if self.kubeconfig.is_some() { 1 } else { self.at_once.unwrap_or(processors.max(2)).max(1) }
    }

    fn runs(&self, tier: Tier) -> bool {
        self.tier.is_empty() || self.tier.contains(&tier)
    }

    /// What is written to disk, with space for one node at least where a tier may start any.
    fn disk_uses(&self) -> Vec<disk_space::DiskUse> {
        if self.tier == [Tier::Unit] {
            return vec![disk_space::target(disk_space::UNIT_TARGET_MB)];
        }
        let mut disk_uses = vec![disk_space::target(disk_space::TESTS_TARGET_MB), disk_space::node()];
        disk_uses.extend(disk_space::tools());
        disk_uses
    }
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
    /// A real kubelet, containerd and runc: pods
    Node,
    /// Real operators on such a node, unsharded and sharded
    Operator,
}

impl Tier {
    /// Whether its tests load the kernel programs.
    fn is_of_kernel(self) -> bool {
        matches!(self, Self::Kernel | Self::Node | Self::Operator)
    }

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The tier of a test target.
    fn of(target: &str) -> Self {
        if target.starts_with("kernel") {
            Self::Kernel
        } else if target.starts_with("control_plane") {
            Self::ControlPlane
        } else if target.starts_with("node") {
            Self::Node
        } else if target.starts_with("operator") {
            Self::Operator
        } else {
            Self::Socket
        }
    }

    /// What to run of it: its test targets, or the parts of the unit tier.
    fn jobs(self, targets: &BTreeMap<Self, Vec<String>>) -> impl Iterator<Item = (Self, &str)> {
        let units = parallel::UNITS.iter().copied().filter(move |_| self == Self::Unit);
        let names = targets.get(&self).into_iter().flatten().map(String::as_str);
        names.chain(units).map(move |job| (self, job))
    }

    /// Its outcome where nothing of it can run; `programs` as in [`Self::obstacle`].
    fn beforehand(self, jobs: &[(Self, &str)], programs: bool) -> Option<Outcome> {
        if self.is_of_kernel() && !programs && build_ebpf::has_toolchain() {
            return Some(Outcome::default());
        }
        if let Some(reason) = self.obstacle(programs) {
            return Some(Outcome { skipped: Some(reason), ..Outcome::default() });
        }
        let none = jobs.iter().all(|(tier, _)| *tier != self);
        none.then(|| Outcome { complete: true, ..Outcome::default() })
    }

    /// Why it cannot run on this machine, if so; `programs` says whether the kernel programs were built just now. Those
    /// of an earlier build are not what is to be tested.
    fn obstacle(self, programs: bool) -> Option<String> {
        match self {
            Self::Unit | Self::Socket => None,
            _ if !setup::has_go() => Some("needs Go".to_owned()),
            Self::Kernel | Self::Node | Self::Operator if !is_root() => Some("needs root".to_owned()),
            Self::ControlPlane if !tools::h2spec().is_file() => Some("needs h2spec".to_owned()),
            Self::ControlPlane if !tools::prometheus().is_file() || !tools::promtool().is_file() => {
                Some("needs Prometheus".to_owned())
            }
            Self::ControlPlane | Self::Node if setup::helm::lacking().next().is_some() => Some("needs helm".to_owned()),
            Self::ControlPlane if !tools::crane().is_file() => Some("needs crane".to_owned()),
            Self::ControlPlane if !tools::otel_collector().is_file() => {
                Some("needs the OpenTelemetry collector".to_owned())
            }
            Self::ControlPlane => {
                setup::assets_problem().or_else(|| missing(&CONTROL_PLANE_PROGRAMS, &["curl", "chromium"]))
            }
            _ if !has_cgroup2() => Some("needs a cgroup2 mount".to_owned()),
            _ if !programs => Some("needs a toolchain for the kernel programs".to_owned()),
            Self::Kernel => None,
            Self::Operator if !tools::prometheus_operator().is_file() => Some("needs prometheus-operator".to_owned()),
            Self::Operator if !tools::prometheus_operator_next().is_file() => {
                Some("needs a newer prometheus-operator".to_owned())
            }
            Self::Operator if !tools::elastic_operator().is_file() => Some("needs eck".to_owned()),
            Self::Node | Self::Operator => setup::assets_problem().or_else(|| missing(&NODE_PROGRAMS, &NODE_PACKAGES)),
        }
    }
}

/// Sets up, runs the tiers, and prints the table.
///
/// # Errors
/// Where something cannot be set up or started. Failed tests are not errors but an exit code.
pub fn run_tiers(options: &Options) -> Result<ExitCode> {
    if !supervisor::follow() {
        disk_space::check(options.disk_uses())?;
        let cluster = options.kubeconfig.as_deref().map(ensure_unused).transpose()?;
        return Err(supervisor::enter(OnExit::Clearing(cluster.as_deref()))).context("start the tests");
    }
    let start = Instant::now();
    let strict = env::var("CI").is_ok_and(|value| value == "true");
    let targets = targets()?;
    let tiers = Tier::value_variants().iter().copied().filter(|tier| options.runs(*tier));
    let jobs: Vec<(Tier, &str)> = tiers.clone().flat_map(|tier| tier.jobs(&targets)).collect();
    let programs = options.tier != [Tier::Unit] && prepare(&jobs, options);
    let (mut outcomes, mut due) = (BTreeMap::new(), Vec::new());
    for tier in tiers {
        let outcome = tier.beforehand(&jobs, programs).unwrap_or_else(|| {
            due.extend(jobs.iter().filter(|(of, _)| *of == tier).copied());
            Outcome { complete: true, ..Outcome::default() }
        });
        outcomes.insert(tier, outcome);
    }
    for (tier, outcome) in parallel::run(due, options, options.lanes())? {
        outcomes.entry(tier).or_default().merge(outcome);
    }
    let good = print(&mut io::stdout().lock(), &outcomes, strict, start.elapsed())?;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Refuses a cluster that has what the tests make there, and take away at the end; gives its kubeconfig, made absolute.
fn ensure_unused(kubeconfig: &Path) -> Result<PathBuf> {
    let file = kubeconfig.display();
    ensure!(kubeconfig.is_file(), "there is no kubeconfig {file}; name that of a cluster that you have");
    ensure!(kubectl::prepare()? == Readiness::Ready, "without kubectl nobody can ask the cluster of {file}");
    user_cluster::ensure_unused(kubeconfig, &[])?;
    Ok(std::path::absolute(kubeconfig)?)
}

/// Sets up, and builds the kernel programs and the tests; returns whether the kernel programs are built. Go builds its
/// programs meanwhile: each of the two leaves a processor idle at times.
fn prepare(jobs: &[(Tier, &str)], options: &Options) -> bool {
    const GOING_ON: &str = "going on with the tiers that can run without";
    let plan = Plan::of(Purpose::Tests);
    let plan = plan.filter(|plan| plan.install().inspect_err(|error| say(&format!("{error:#}"))).is_ok());
    if plan.is_none() {
        say(GOING_ON);
    }
    let needs_programs = jobs.iter().any(|(tier, _)| *tier >= Tier::ControlPlane);
    thread::scope(|scope| {
        let go = plan.as_ref().filter(|_| needs_programs);
        let go = go.map(|plan| scope.spawn(|| plan.build_programs()));
        let built = build_ebpf::build()
            .inspect_err(|error| say(&format!("the kernel programs are not built: {error:#}")))
            .is_ok();
        if plan.is_some() {
            parallel::build(jobs, options);
        }
        match go.map(thread::ScopedJoinHandle::join) {
            Some(Ok(Err(error))) => say(&format!("{error:#}\n{GOING_ON}")),
            Some(Ok(Ok(Readiness::NotReady)) | Err(_)) => say(GOING_ON),
            Some(Ok(Ok(Readiness::Ready))) | None => {}
        }
        built
    })
}

/// Which of the programs is not there: of those that we build, and of those of the system.
fn missing(built: &[&str], installed: &[&str]) -> Option<String> {
    let mut built = built.iter().filter(|program| !tools::control_plane(program).is_file());
    let mut installed = installed.iter().filter(|program| !tools::on_path(program));
    built.next().or_else(|| installed.next()).map(|program| format!("needs {program}"))
}

/// The test targets of all crates, by tier.
fn targets() -> Result<BTreeMap<Tier, Vec<String>>> {
    let mut targets: BTreeMap<Tier, Vec<String>> = BTreeMap::new();
    for folder in crates()? {
        let Ok(entries) = fs::read_dir(root().join(folder).join("tests")) else { continue };
        for entry in entries {
            let path = entry?.path();
            let target = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
            let is_target =
                path.extension().is_some_and(|extension| extension == "rs") || path.join("main.rs").is_file();
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

fn test(what: &[&str], options: &Options) -> Command {
    let mut command = cargo(&["test", "--workspace", "--locked", "--no-fail-fast"]);
    command.args(what).args(&options.filter);
    if options.full {
        command.env(FULL, "1");
    }
    if let Some(kubeconfig) = &options.kubeconfig {
        // Where it cannot be made absolute, the tests say that it is not there.
        command.env(KUBECONFIG, std::path::absolute(kubeconfig).unwrap_or(kubeconfig.clone()));
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_programs_of_an_earlier_build_are_not_tested() {
        for tier in [Tier::Kernel, Tier::Node, Tier::Operator] {
            assert!(tier.obstacle(false).is_some());
        }
        assert_eq!(Tier::Unit.obstacle(false), None);
    }

    #[test]
    fn several_binaries_run_at_once_but_not_on_a_users_cluster() {
        let options = Options { tier: Vec::new(), filter: None, kubeconfig: None, at_once: None, full: false };
        assert!(options.lanes() > 1);
        let three = Options { at_once: Some(3), ..options };
        assert_eq!(three.lanes(), 3);
        let foreign = Options { kubeconfig: Some(PathBuf::from("k")), ..three };
        assert_eq!(foreign.lanes(), 1);
    }

    #[test]
    fn the_name_of_a_target_decides_its_tier() {
        assert_eq!(Tier::of("kernel"), Tier::Kernel);
        assert_eq!(Tier::of("control_plane"), Tier::ControlPlane);
        assert_eq!(Tier::of("node_bed"), Tier::Node);
        assert_eq!(Tier::of("operator_example"), Tier::Operator);
        assert_eq!(Tier::of("forwarding"), Tier::Socket);
    }
}
