//! Installs what tests and demo need on a bare Debian 12 machine, or lists what to install.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context as _, Result, bail};

use crate::progress::{say, step};
use crate::run::{root, run, succeeds, with_own_toolchain};
use crate::{build_ebpf, disk_space, tools};

mod assets;
pub mod helm;
pub mod kubectl;
mod nightly;
mod operators;
mod packages;
mod release;
pub mod versions;

use self::nightly::Nightly;
pub use assets::assets_problem;
pub(crate) use release::for_release;

/// The programs of the test beds: name, Go package, and about how many seconds the first build takes on two cores.
const CONTROL_PLANE: [(&str, &str, u64); 7] = [
    ("etcd", "go.etcd.io/etcd/server/v3", 75),
    ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", 285),
    ("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", 90),
    ("kubelet", "k8s.io/kubernetes/cmd/kubelet", 120),
    ("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler", 30),
    ("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy", 30),
    ("kubectl", "k8s.io/kubernetes/cmd/kubectl", 30),
];

/// The oldest Go that builds them.
const GO: (u32, u32) = (1, 26);

/// How the machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Everything is there.
    Ready,
    /// Something is missing that we may not install here; it has been said.
    NotReady,
}

impl From<Readiness> for ExitCode {
    fn from(readiness: Readiness) -> Self {
        match readiness {
            Readiness::Ready => Self::SUCCESS,
            Readiness::NotReady => Self::from(2),
        }
    }
}

/// What it is to be ready for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A node and what runs on it: the demo.
    Node,
    /// All that tests need, too.
    Tests,
}

/// What there is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Packages,
    Linker,
    ControlPlane,
    H2spec,
    Prometheus,
    Collector,
    PrometheusOperator,
    PrometheusOperatorNext,
    ElasticOperator,
    Helm,
    Crane,
}

/// What a machine lacks for a purpose, and may be installed or built here.
#[derive(Debug)]
pub(crate) struct Plan {
    packages: Vec<packages::Need>,
    tasks: Vec<Task>,
    /// Whether the machine is ready after that.
    is_enough: bool,
}

/// Installs what is missing.
///
/// # Errors
/// Something cannot be installed or built.
pub fn run_setup(purpose: Purpose) -> Result<Readiness> {
    let Some(plan) = Plan::of(purpose) else { return Ok(Readiness::NotReady) };
    plan.install()?;
    plan.build_programs()
}

impl Plan {
    /// Looks for what is missing. None, and a list on standard error, where the user has to install it.
    pub(crate) fn of(purpose: Purpose) -> Option<Self> {
        tools::sweep();
        let assets = assets_problem();
        if let Some(problem) = &assets {
            say(problem);
            // Tests that need none of it run all the same.
            if purpose == Purpose::Node {
                return None;
            }
        }
        // The whole list, before anything is built.
        let may_install = packages::may_install();
        let go = missing_go();
        let (nightly, packages) = nightly::lacking(
            Nightly::find(may_install),
            go.is_some() || build_ebpf::has_debian(),
            |nightly| packages::missing(purpose, nightly),
            build_ebpf::nightly_builds,
        );
        if !may_install && (!packages.is_empty() || go.is_some()) {
            packages::say_what_to_install(&packages, go.as_deref());
            return None;
        }
        if let Some(problem) = &go {
            say(&format!("Please {problem}"));
        }
        let lacking = [
            (Task::Packages, !packages.is_empty()),
            (Task::Linker, !nightly && !tools::bpf_linker().is_file()),
            // It sees by itself which of its programs are there.
            (Task::ControlPlane, true),
            (Task::H2spec, !tools::h2spec().is_file()),
            (Task::Prometheus, !tools::prometheus().is_file() || !tools::promtool().is_file()),
            (Task::Collector, !tools::otel_collector().is_file()),
            (Task::PrometheusOperator, !tools::prometheus_operator().is_file()),
            (Task::PrometheusOperatorNext, !tools::prometheus_operator_next().is_file()),
            (Task::ElasticOperator, !tools::elastic_operator().is_file()),
            (Task::Helm, helm::lacking().next().is_some()),
            (Task::Crane, !tools::crane().is_file()),
        ];
        let lacking = lacking.into_iter().filter_map(|(task, lacks)| lacks.then_some(task));
        let tasks = lacking.filter(|task| task.is_due(purpose, go.is_none())).collect();
        Some(Self { packages, tasks, is_enough: go.is_none() && assets.is_none() })
    }

    /// Installs packages, and what the kernel programs are linked with.
    ///
    /// # Errors
    /// Something cannot be installed.
    pub(crate) fn install(&self) -> Result<()> {
        self.run(|task| matches!(task, Task::Packages | Task::Linker))
    }

    /// Builds the programs that are written in Go. Cargo may build beside it.
    ///
    /// # Errors
    /// A program cannot be built.
    pub(crate) fn build_programs(&self) -> Result<Readiness> {
        self.run(|task| !matches!(task, Task::Packages | Task::Linker))?;
        if !self.is_enough {
            return Ok(Readiness::NotReady);
        }
        say(&format!("everything is there; what we built is in {}", tools::cache().display()));
        Ok(Readiness::Ready)
    }

    fn run(&self, chosen: impl Fn(Task) -> bool) -> Result<()> {
        let mut tasks = self.tasks.iter().filter(|task| chosen(**task));
        tasks.try_for_each(|task| task.run(&self.packages))
    }
}

impl Task {
    /// Whether it is done where it is not done yet. Without Go there is no node, so that nothing is done for one.
    fn is_due(self, purpose: Purpose, has_go: bool) -> bool {
        match self {
            Self::Packages | Self::Linker => has_go || purpose == Purpose::Tests,
            Self::ControlPlane => has_go,
            Self::H2spec
            | Self::Prometheus
            | Self::Collector
            | Self::PrometheusOperator
            | Self::PrometheusOperatorNext
            | Self::ElasticOperator
            | Self::Helm
            | Self::Crane => has_go && purpose == Purpose::Tests,
        }
    }

    fn run(self, packages: &[packages::Need]) -> Result<()> {
        let seconds = Duration::from_secs;
        match self {
            Self::Packages => packages::install(packages),
            Self::Linker => {
                step("build bpf-linker, for the kernel programs, once per machine", seconds(60), build_linker)
            }
            Self::ControlPlane => control_plane(),
            Self::H2spec => {
                step("build h2spec, which asks the proxy whether it speaks HTTP/2", seconds(10), build_h2spec)
            }
            Self::Prometheus => step(
                "build Prometheus and promtool, for tests of metrics, once per machine",
                seconds(300),
                build_prometheus,
            ),
            Self::Collector => {
                step("build the OpenTelemetry collector, for tests of traces, once per machine", seconds(60), || {
                    build_tool(&tools::otel_collector(), "xtask/collector", ".")
                })
            }
            Self::PrometheusOperator => step(
                "build prometheus-operator, an operator that is not ours, for tests, once per machine",
                seconds(120),
                operators::build_prometheus_operator,
            ),
            Self::PrometheusOperatorNext => step(
                "build a newer prometheus-operator, to which tests upgrade it, once per machine",
                seconds(120),
                operators::build_prometheus_operator_next,
            ),
            Self::ElasticOperator => step(
                "build ECK, an operator with webhooks that is not ours, for tests, once per machine",
                seconds(300),
                operators::build_elastic_operator,
            ),
            Self::Helm => helm::prepare(&tools::HELMS).map(drop),
            Self::Crane => step("build crane, a registry for tests, once per machine", seconds(30), build_crane),
        }
    }
}

/// Installs what only benchmarks need. Who may not install packages goes without, and the tables say so.
///
/// # Errors
/// Where something cannot be installed.
pub fn for_benches() -> Result<()> {
    packages::for_benches()
}

/// Builds what simulates nodes and pods.
///
/// # Errors
/// Where it cannot be built.
pub fn for_simulated_pods() -> Result<()> {
    if tools::kwok().is_file() {
        return Ok(());
    }
    if let Some(problem) = missing_go() {
        bail!("kwok is built with Go: {problem}");
    }
    step(
        "build kwok, which simulates nodes and pods, for a benchmark, once per machine",
        Duration::from_secs(90),
        || build_tool(&tools::kwok(), "xtask/kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    )
}

/// What to do about Go, where it is not there, or too old. It builds the API server, and the operators of the tests.
fn missing_go() -> Option<String> {
    let output = Command::new("go").args(["env", "GOVERSION"]).output();
    let version = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    go_problem(version.ok().as_deref())
}

/// Whether Go is there, and new enough.
pub fn has_go() -> bool {
    missing_go().is_none()
}

/// What is wrong with this version of Go; none: it is not installed.
fn go_problem(version: Option<&str>) -> Option<String> {
    let found = match version {
        Some(version) if go_version(version).is_some_and(|found| found >= GO) => return None,
        Some(version) => format!("; found {version:?}"),
        None => String::new(),
    };
    let (major, minor) = GO;
    Some(format!("install Go {major}.{minor} or newer (go.dev/dl): the test bed's API server is built with it{found}"))
}

/// Builds what is missing of the control plane; a folder that the user names is used as it is.
fn control_plane() -> Result<()> {
    let is_there = |program: &str| tools::control_plane(program).is_file();
    if to_build(tools::assets().is_some(), is_there).next().is_some() {
        let gigabytes = disk_space::GO_BUILDS_MB / 100;
        let (whole, tenth) = (gigabytes / 10, gigabytes % 10);
        say(&format!(
            "Go keeps up to {whole}.{tenth} GB of what it builds now in `go env GOCACHE`; afterwards `go clean -cache` gives them back"
        ));
    }
    for (program, package, time) in to_build(tools::assets().is_some(), is_there) {
        let what = format!("build {program}, for a real Kubernetes, once per machine");
        step(&what, Duration::from_secs(*time), || build_go(program, package))?;
    }
    Ok(())
}

/// Which programs are ours to build: none of those that a folder of the user's must have.
fn to_build(
    has_assets: bool,
    is_there: impl Fn(&str) -> bool,
) -> impl Iterator<Item = &'static (&'static str, &'static str, u64)> {
    let ours = move |program: &str| !(has_assets && tools::is_of_assets(program));
    CONTROL_PLANE.iter().filter(move |(program, ..)| ours(program) && !is_there(program))
}

/// `go1.26.8` as (1, 26).
fn go_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.strip_prefix("go")?.split(|one: char| !one.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn build_go(program: &str, package: &str) -> Result<()> {
    let target = tools::control_plane(program);
    let folder = target.parent().context("the folder of a tool")?;
    fs::create_dir_all(folder)?;
    let staged = tools::staged(&target);
    let mut go = Command::new("go");
    let flags = versions::flags(tools::KUBERNETES);
    go.args(["build", "-trimpath", "-ldflags", &flags, "-o"]).arg(&staged).arg(package);
    run(go.current_dir(root().join("xtask/control-plane")).env("CGO_ENABLED", "0"))?;
    Ok(fs::rename(&staged, &target)?)
}

fn build_h2spec() -> Result<()> {
    build_tool(&tools::h2spec(), "xtask/h2spec", "github.com/summerwind/h2spec/cmd/h2spec")
}

fn build_crane() -> Result<()> {
    build_tool(&tools::crane(), "xtask/crane", "github.com/google/go-containerregistry/cmd/crane")
}

fn build_prometheus() -> Result<()> {
    for program in [tools::prometheus(), tools::promtool()].iter().filter(|program| !program.is_file()) {
        let name = program.file_name().context("the name of a tool")?.to_string_lossy();
        build_tool(program, "xtask/prometheus", &format!("github.com/prometheus/prometheus/cmd/{name}"))?;
    }
    Ok(())
}

/// Builds a package of a Go module that the module in `from` requires.
fn build_tool(program: &Path, from: &str, package: &str) -> Result<()> {
    let folder = program.parent().context("the folder of a tool")?;
    let name = program.file_name().context("the name of a tool")?;
    tools::put(folder, |staged| {
        let mut go = Command::new("go");
        go.args(["build", "-trimpath", "-ldflags", "-s -w", "-o"]).arg(staged.join(name));
        run(go.arg(package).env("CGO_ENABLED", "0").current_dir(root().join(from)))
    })
}

fn build_linker() -> Result<()> {
    let target = tools::bpf_linker();
    let folder = target.ancestors().nth(2).context("the folder of a tool")?;
    tools::put(folder, |staged| {
        let path = env::var("PATH").unwrap_or_default();
        let mut command = Command::new("cargo");
        with_own_toolchain(&mut command)
            .args(["install", "--quiet", "bpf-linker", "--version", tools::BPF_LINKER, "--locked"])
            .args(["--no-default-features", "--features", "llvm-22", "--root"])
            .arg(staged)
            .env("LLVM_PREFIX", "/usr/lib/llvm-22")
            .env("PATH", format!("/usr/lib/llvm-22/bin:{path}"))
            .current_dir(root());
        run(&mut command)
    })
}

/// Builds a cargo subcommand that only one of our commands needs, once per machine; gives its program.
///
/// # Errors
/// Where it cannot be built.
pub fn cargo_tool(name: &str, version: &str, why: &str) -> Result<PathBuf> {
    let folder = tools::cache().join(name).join(version);
    let program = folder.join("bin").join(name);
    if succeeds(Command::new(&program).arg("--version")) {
        return Ok(program);
    }
    step(&format!("build {name}, {why}, once per machine"), Duration::from_mins(3), || {
        tools::put(&folder, |staged| {
            let mut command = Command::new("cargo");
            with_own_toolchain(&mut command)
                .args(["install", "--quiet", name, "--version", version, "--locked", "--root"])
                .arg(staged)
                .current_dir(root());
            run(&mut command)
        })
    })?;
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_or_missing_go_is_reported_and_a_new_one_is_not() {
        assert_eq!(go_problem(Some("go1.26.8")), None);
        assert_eq!(go_problem(Some("go1.27rc1")), None);
        let old = go_problem(Some("go1.19.8")).unwrap();
        assert!(old.starts_with("install Go 1.26 or newer") && old.contains("go1.19.8"), "{old}");
        assert!(go_problem(None).unwrap().starts_with("install Go 1.26 or newer"));
    }

    #[test]
    fn the_demo_builds_only_its_own_tools_and_none_without_go() {
        let operators = [Task::PrometheusOperator, Task::PrometheusOperatorNext, Task::ElasticOperator];
        let tools = [Task::Packages, Task::Linker, Task::ControlPlane, Task::H2spec, Task::Prometheus, Task::Collector];
        let all = [&tools, &operators[..], &[Task::Helm, Task::Crane]].concat();
        let due = |purpose, has_go| -> Vec<Task> {
            all.iter().copied().filter(|task| task.is_due(purpose, has_go)).collect()
        };
        assert_eq!(due(Purpose::Node, true), all[..3]);
        assert_eq!(due(Purpose::Tests, true), all);
        assert_eq!(due(Purpose::Node, false), []);
        assert_eq!(due(Purpose::Tests, false), all[..2], "unit tests run");
    }

    #[test]
    fn a_folder_of_the_users_is_not_built_into() {
        let built = |has_assets, there: &[&str]| -> Vec<&str> {
            to_build(has_assets, |one| there.contains(&one)).map(|(program, ..)| *program).collect()
        };
        let nodes = ["kubelet", "kube-scheduler", "kube-proxy"];
        assert_eq!(built(false, &["kube-controller-manager", "kubectl"])[2..], nodes);
        assert_eq!(built(true, &["kube-controller-manager", "kubectl"]), nodes);
    }

    #[test]
    fn the_versions_are_those_that_are_built() {
        let versions = [
            ("control-plane", format!("k8s.io/kubernetes {} ", tools::KUBERNETES)),
            ("control-plane", format!("go.etcd.io/etcd/server/v3 {} ", tools::ETCD)),
            ("prometheus", format!("github.com/prometheus/prometheus {} ", tools::PROMETHEUS)),
            ("h2spec", format!("github.com/summerwind/h2spec {}+incompatible ", tools::H2SPEC)),
            (
                "prometheus-operator",
                format!("github.com/prometheus-operator/prometheus-operator {} ", tools::PROMETHEUS_OPERATOR),
            ),
            (
                "prometheus-operator-next",
                format!("github.com/prometheus-operator/prometheus-operator {} ", tools::PROMETHEUS_OPERATOR_NEXT),
            ),
            ("eck", format!("github.com/elastic/cloud-on-k8s/v3 {} ", tools::ECK)),
            ("kubernetes-1.30", format!("k8s.io/kubernetes {} ", tools::OTHER_KUBERNETES[0])),
            ("kubernetes-1.33", format!("k8s.io/kubernetes {} ", tools::OTHER_KUBERNETES[1])),
            ("kubernetes-1.37", format!("k8s.io/kubernetes {} ", tools::OTHER_KUBERNETES[2])),
            ("helm-v3", format!("helm.sh/helm/v3 {} ", tools::HELM_3)),
            ("helm-v4", format!("helm.sh/helm/v4 {} ", tools::HELM_4)),
            ("crane", format!("github.com/google/go-containerregistry {} ", tools::CRANE)),
            ("kwok", format!("sigs.k8s.io/kwok {} ", tools::KWOK)),
        ];
        for (module, version) in versions {
            let text = fs::read_to_string(root().join("xtask").join(module).join("go.mod")).unwrap();
            assert!(text.contains(&version), "{module}/go.mod does not name {version}");
        }
    }

    #[test]
    fn the_version_of_go_is_read_from_what_go_says() {
        assert_eq!(go_version("go1.26.8"), Some((1, 26)));
        assert_eq!(go_version("go1.27-rc1"), Some((1, 27)));
        assert_eq!(go_version("devel"), None);
    }
}
