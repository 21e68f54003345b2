//! Makes a bare Debian 12 machine ready, or says what one has to install.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context as _, Result};

use crate::progress::{say, step};
use crate::run::{is_root, root, run, succeeds, with_own_toolchain};
use crate::{build_ebpf, tools};

pub mod kubectl;

/// What is needed: Debian's package, what it is for, and a program or file by which it is known where it was not
/// installed by dpkg.
type Need = (&'static str, &'static str, &'static str);

/// Debian's packages.
const PACKAGES: [Need; 17] = [
    ("bpftool", "sizes and run times of the kernel programs", "bpftool"),
    ("conntrack", "the node bed: kube-proxy", "conntrack"),
    ("containerd", "the node bed", "containerd"),
    ("containernetworking-plugins", "the node bed: pods' networks", "/usr/lib/cni/ptp"),
    ("curl", "tests of the proxy with a client that is not ours", "curl"),
    ("g++", "bpf-linker", "g++"),
    ("gcc", "the TLS library", "gcc"),
    ("iproute2", "network namespaces of the kernel tests", "ip"),
    ("iptables", "the node bed, and the benchmark: what we are compared with", "iptables"),
    ("kmod", "the node bed: kube-proxy", "modprobe"),
    ("libc6-dev", "the TLS library", "/usr/include/stdlib.h"),
    ("nftables", "the node bed: kube-proxy", "nft"),
    ("procps", "the test bed: kill", "ps"),
    ("python3", "clients of the kernel tests", "python3"),
    ("runc", "the node bed", "runc"),
    ("socat", "the node bed: port-forward", "socat"),
    (
        "util-linux",
        "namespaces and capabilities of the kernel tests and of the node bed",
        "setpriv",
    ),
];

/// What only benchmarks need.
const OF_BENCHES: [Need; 1] =
    [("nginx-light", "the benchmark: what we are compared with", "nginx")];

/// Units of systemd that would run what Debian's packages bring: the beds start their own.
const UNITS: [(&str, &str); 2] =
    [("containerd", "containerd.service"), ("nginx-light", "nginx.service")];

/// What keeps Debian's packages from starting what they bring, where it is there: see policy-rc.d(8).
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Runs `$@` with a policy `$0` that starts nothing, and takes it away again however that ends; also one that a former run
/// left because it was killed. One that is not ours stays as it is.
const QUIETLY: &str = r#"
mark='# Of the set-up of ctrlmesh, until it ends'
if [ -e "$0" ] && ! grep -qx "$mark" "$0"; then exec "$@"; fi
trap 'rm -f "$0"' EXIT
trap 'exit 130' INT TERM HUP
printf '#!/bin/sh
%s
exit 101
' "$mark" >"$0" && chmod 755 "$0" || exit
"$@"
"#;

/// More of Debian's packages, where no nightly toolchain with `rust-src` and bpf-linker builds the kernel programs.
const EBPF_PACKAGES: [Need; 5] = [
    ("libpolly-22-dev", "bpf-linker", ""),
    ("libzstd-dev", "bpf-linker", "/usr/include/zstd.h"),
    ("llvm-22-dev", "bpf-linker", ""),
    ("rust-web-src", "the kernel programs: the source of `core`", ""),
    ("rustc-web", "the kernel programs: a compiler that fits bpf-linker's LLVM", ""),
];

/// What other systems need instead of these.
const NIGHTLY: Need =
    ("nightly Rust", "the kernel programs: with rust-src, and bpf-linker on your PATH", "");

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

// === impl Readiness ===

impl From<Readiness> for ExitCode {
    fn from(readiness: Readiness) -> Self {
        match readiness {
            Readiness::Ready => Self::SUCCESS,
            Readiness::NotReady => Self::from(2),
        }
    }
}

/// Installs what is missing.
///
/// # Errors
/// Where something cannot be installed or built.
pub fn run_setup() -> Result<Readiness> {
    tools::sweep();
    if let Some(problem) = assets_problem() {
        say(&problem);
        return Ok(Readiness::NotReady);
    }
    let nightly = build_ebpf::nightly_builds();
    let packages = missing_packages(nightly);
    let go = missing_go();
    if !may_install() && (!packages.is_empty() || go.is_some()) {
        // The whole list, before anything is built.
        say_what_to_install(&packages, go.as_deref());
        return Ok(Readiness::NotReady);
    }
    if !packages.is_empty() {
        install(&packages)?;
    }
    if !nightly && !tools::bpf_linker().is_file() {
        step(
            "build bpf-linker, for the kernel programs, once per machine",
            Duration::from_mins(1),
            build_linker,
        )?;
    }
    if let Some(problem) = go {
        say(&format!("Everything that needs no Go is there. Please {problem}"));
        return Ok(Readiness::NotReady);
    }
    control_plane()?;
    if !tools::h2spec().is_file() {
        let what = "build h2spec, which asks the proxy whether it speaks HTTP/2";
        step(what, Duration::from_secs(10), build_h2spec)?;
    }
    if !tools::prometheus_operator().is_file() {
        let what =
            "build prometheus-operator, an operator that is not ours, for tests, once per machine";
        step(what, Duration::from_mins(2), build_prometheus_operator)?;
    }
    say(&format!("everything is there; what we built is in {}", tools::cache().display()));
    Ok(Readiness::Ready)
}

/// Installs what only benchmarks need; who may not install goes without, and the tables say so.
///
/// # Errors
/// Where it cannot be installed.
pub fn for_benches() -> Result<()> {
    let missing: Vec<Need> = OF_BENCHES.into_iter().filter(|need| !is_there(need)).collect();
    if missing.is_empty() || !may_install() {
        return Ok(());
    }
    install(&missing)
}

/// What to do about Go, where it is not there, or too old. It is always needed: tests compare us with what is written in
/// it, and build their operators with it.
fn missing_go() -> Option<String> {
    let output = Command::new("go").args(["env", "GOVERSION"]).output();
    let version = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    go_problem(version.ok().as_deref())
}

/// Whether Go is there, and new enough.
pub fn has_go() -> bool {
    missing_go().is_none()
}

/// What is wrong with the folder of programs that the user names, if they name one.
fn assets_problem() -> Option<String> {
    let folder = tools::assets()?;
    let mut needed = CONTROL_PLANE.iter().map(|(program, ..)| program);
    let absent = needed
        .find(|program| tools::is_of_assets(program) && !tools::control_plane(program).is_file());
    if let Some(program) = absent {
        let (variable, folder) = (tools::ASSETS, folder.display());
        return Some(format!(
            "{program} is not in {variable}={folder}; put it there, or unset {variable} and it is built"
        ));
    }
    let output = Command::new(folder.join("kube-apiserver")).arg("--version").output();
    let output = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    release_problem(&output.unwrap_or_default())
}

/// What is wrong with what an API server says of its release: the tests know what one minor release does.
fn release_problem(said: &str) -> Option<String> {
    let minor = tools::KUBERNETES.rsplit_once('.').map_or("", |(minor, _)| minor);
    let found = said.strip_prefix("Kubernetes ").unwrap_or(said);
    (!found.starts_with(&format!("{minor}."))).then(|| {
        let variable = tools::ASSETS;
        format!("kube-apiserver in {variable} must be of {minor}, found {found:?}; or unset {variable} and it is built")
    })
}

/// What is wrong with this version of Go; none: it is not installed.
fn go_problem(version: Option<&str>) -> Option<String> {
    let found = match version {
        Some(version) if go_version(version).is_some_and(|found| found >= GO) => return None,
        Some(version) => format!("; found {version:?}"),
        None => String::new(),
    };
    let (major, minor) = GO;
    Some(format!(
        "install Go {major}.{minor} or newer (go.dev/dl): the test bed's API server is built with it{found}"
    ))
}

/// Builds what is missing of the control plane; a folder that the user names is used as it is.
fn control_plane() -> Result<()> {
    let missing =
        CONTROL_PLANE.iter().filter(|(program, ..)| !tools::control_plane(program).is_file());
    for (program, package, time) in missing {
        let what = format!("build {program}, for a real Kubernetes, once per machine");
        step(&what, Duration::from_secs(*time), || build_go(program, package))?;
    }
    Ok(())
}

fn missing_packages(nightly: bool) -> Vec<Need> {
    let ebpf = match nightly {
        true => &[][..],
        false if is_debian() => &EBPF_PACKAGES,
        false => &[NIGHTLY],
    };
    PACKAGES.iter().chain(ebpf).copied().filter(|need| !is_there(need)).collect()
}

/// Whether dpkg has installed it, or it came another way.
fn is_there(&(package, _, known_by): &Need) -> bool {
    let other = match known_by {
        "" => false,
        file if file.starts_with('/') => Path::new(file).is_file(),
        program => tools::on_path(program),
    };
    other || {
        let arguments = ["-W", "-f", "${Status}\n", package];
        let output = Command::new("dpkg-query").args(arguments).output();
        output.is_ok_and(|output| is_installed(&String::from_utf8_lossy(&output.stdout)))
    }
}

/// Whether dpkg says so, of one architecture at least: each has a line.
fn is_installed(status: &str) -> bool {
    status.lines().any(|line| line == "install ok installed")
}

fn is_debian() -> bool {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    is_bookworm(&release) && tools::on_path("apt-get")
}

/// Whether `/etc/os-release` is that of Debian 12: the packages of another are others.
fn is_bookworm(release: &str) -> bool {
    ["ID=debian", "VERSION_ID=\"12\""]
        .iter()
        .all(|wanted| release.lines().any(|line| line == *wanted))
}

/// Whether this is Debian 12 and we are root.
fn may_install() -> bool {
    is_debian() && is_root()
}

fn say_what_to_install(needs: &[Need], go: Option<&str>) {
    say(&what_to_install(needs, go, is_debian()));
}

/// The list for somebody who has to install it, and how on Debian.
fn what_to_install(needs: &[Need], go: Option<&str>, debian: bool) -> String {
    let mut lines = vec![match needs {
        [] => "This machine lacks what the tests need. Please install:".to_owned(),
        _ => "This machine lacks what the tests need, and I can install it only as root and on Debian 12. Please install:".to_owned(),
    }];
    lines.extend(needs.iter().map(|(name, why, _)| format!("  {name:<16} {why}")));
    lines.extend(go.map(|problem| format!("  {:<16} {problem}", "Go")));
    let packages = needs.iter().filter(|need| **need != NIGHTLY).map(|(name, ..)| *name);
    let packages: Vec<&str> = packages.collect();
    if !packages.is_empty() {
        let note = if debian { "" } else { " (other systems call some of them differently)" };
        lines.push(format!("On Debian 12: apt-get install {}{note}", packages.join(" ")));
    }
    if needs.iter().any(|need| EBPF_PACKAGES.contains(need)) {
        let names = EBPF_PACKAGES.map(|(name, ..)| name).join(", ");
        lines.push(format!("Instead of {names} you can have a nightly toolchain with rust-src, and bpf-linker on your PATH."));
    }
    lines.join("\n")
}

fn install(packages: &[Need]) -> Result<()> {
    for (name, why, _) in packages {
        say(&format!("missing: {name} ({why})"));
    }
    step("install Debian packages", Duration::from_mins(1), || {
        run_apt(&["update", "-q"])?;
        let names: Vec<&str> = packages.iter().map(|(name, ..)| *name).collect();
        let arguments = ["install", "-q", "-y", "--no-install-recommends"];
        let installed = run_apt(&[&arguments[..], &names].concat());
        leave_off(&names);
        installed
    })
}

/// apt-get, which starts no daemon of what it installs.
fn run_apt(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("sh");
    command.args(["-c", QUIETLY, POLICY, "apt-get"]).args(arguments);
    run(command.env("DEBIAN_FRONTEND", "noninteractive"))
}

/// What was installed just now is not started at boot either.
fn leave_off(packages: &[&str]) {
    let units = UNITS.iter().filter(|(package, _)| packages.contains(package));
    let units: Vec<&str> = units.map(|(_, unit)| *unit).collect();
    if units.is_empty() || !tools::on_path("systemctl") {
        return;
    }
    // Where no systemd runs, there is nothing that would start them.
    if let Err(error) = run(Command::new("systemctl").arg("disable").args(units)) {
        say(&format!("{error:#}"));
    }
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
    let (major, minor) = tools::KUBERNETES
        .trim_start_matches('v')
        .rsplit_once('.')
        .map_or(("", ""), |(release, _)| release.split_once('.').unwrap_or_default());
    let version = "k8s.io/component-base/version";
    let flags = format!(
        "-s -w -X {version}.gitVersion={} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}",
        tools::KUBERNETES
    );
    let mut go = Command::new("go");
    go.args(["build", "-trimpath", "-ldflags", &flags, "-o"]).arg(&staged).arg(package);
    run(go.current_dir(root().join("xtask/control-plane")).env("CGO_ENABLED", "0"))?;
    Ok(fs::rename(&staged, &target)?)
}

fn build_h2spec() -> Result<()> {
    let folder = tools::h2spec();
    let folder = folder.parent().context("the folder of a tool")?;
    tools::put(folder, |staged| {
        let mut go = Command::new("go");
        go.args(["build", "-trimpath", "-ldflags", "-s -w", "-o"]).arg(staged.join("h2spec"));
        go.arg("github.com/summerwind/h2spec/cmd/h2spec").env("CGO_ENABLED", "0");
        run(go.current_dir(root().join("xtask/h2spec")))
    })
}

/// Builds the program and takes its manifests, which are of the same module.
fn build_prometheus_operator() -> Result<()> {
    const MODULE: &str = "github.com/prometheus-operator/prometheus-operator";
    let program = tools::prometheus_operator();
    let folder = program.parent().context("the folder of a tool")?;
    let go = |arguments: &[&str]| {
        let mut go = Command::new("go");
        go.args(arguments)
            .env("CGO_ENABLED", "0")
            .current_dir(root().join("xtask/prometheus-operator"));
        go
    };
    tools::put(folder, |staged| {
        let mut build =
            go(&["build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid=", "-o"]);
        run(build.arg(staged.join("prometheus-operator")).arg(format!("{MODULE}/cmd/operator")))?;
        let output = go(&["list", "-m", "-f", "{{.Dir}}", MODULE]).output()?;
        let module = PathBuf::from(String::from_utf8(output.stdout)?.trim_end());
        let bundle = module.join("bundle.yaml");
        fs::copy(&bundle, staged.join("bundle.yaml"))
            .with_context(|| format!("copy {}", bundle.display()))?;
        Ok(())
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
    fn a_package_of_several_architectures_is_installed_where_one_is() {
        assert!(is_installed("install ok installed\n"));
        assert!(is_installed("deinstall ok config-files\ninstall ok installed\n"));
        assert!(!is_installed("deinstall ok config-files\n") && !is_installed(""));
    }

    #[test]
    fn a_go_that_is_too_old_or_not_there_is_named_and_a_new_one_is_not() {
        assert_eq!(go_problem(Some("go1.26.8")), None);
        assert_eq!(go_problem(Some("go1.27rc1")), None);
        let old = go_problem(Some("go1.19.8")).unwrap();
        assert!(old.starts_with("install Go 1.26 or newer") && old.contains("go1.19.8"), "{old}");
        assert!(go_problem(None).unwrap().starts_with("install Go 1.26 or newer"));
    }

    #[test]
    fn packages_are_installed_on_debian_12_only() {
        assert!(is_bookworm("NAME=\"Debian\"\nVERSION_ID=\"12\"\nID=debian\n"));
        assert!(!is_bookworm("ID=debian\nVERSION_ID=\"13\"\n"));
        assert!(!is_bookworm("ID=ubuntu\nVERSION_ID=\"12\"\n"));
    }

    #[test]
    fn nothing_is_started_while_packages_are_installed_and_the_policy_goes_again() {
        let folder = env::temp_dir().join(format!("ctrlmesh-policy-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let policy = folder.join("policy-rc.d");
        let quietly = |command: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-c", QUIETLY]).arg(&policy).args(["sh", "-c", command]).arg(&policy);
            shell.status().unwrap().code()
        };
        assert_eq!(quietly(r#""$0"; exit $(($? - 100))"#), Some(1), "it says that nothing starts");
        assert!(!policy.exists());
        assert_eq!(quietly("kill -INT $PPID; sleep 1; exit 7"), Some(130));
        assert!(!policy.exists(), "interrupted");
        assert_eq!(quietly("kill -KILL $PPID"), None);
        assert!(policy.exists(), "nobody could take it away");
        assert_eq!(quietly("true"), Some(0));
        assert!(!policy.exists(), "the next run did");
        fs::write(&policy, "#!/bin/sh\nexit 0\n").unwrap();
        assert_eq!(quietly("true"), Some(0));
        assert!(policy.exists(), "it is the user's");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn programs_of_another_release_are_refused() {
        assert_eq!(release_problem(&format!("Kubernetes {}", tools::KUBERNETES)), None);
        assert_eq!(release_problem("Kubernetes v1.36.0"), None);
        let other = release_problem("Kubernetes v1.33.1").unwrap();
        assert!(other.contains("must be of v1.36, found \"v1.33.1\""), "{other}");
        assert!(release_problem("").is_some());
    }

    #[test]
    fn the_versions_are_those_that_are_built() {
        let versions = [
            ("control-plane", format!("k8s.io/kubernetes {} ", tools::KUBERNETES)),
            ("control-plane", format!("go.etcd.io/etcd/server/v3 {} ", tools::ETCD)),
            ("h2spec", format!("github.com/summerwind/h2spec {}+incompatible ", tools::H2SPEC)),
            (
                "prometheus-operator",
                format!(
                    "github.com/prometheus-operator/prometheus-operator {} ",
                    tools::PROMETHEUS_OPERATOR
                ),
            ),
        ];
        for (module, version) in versions {
            let text =
                fs::read_to_string(root().join("xtask").join(module).join("go.mod")).unwrap();
            assert!(text.contains(&version), "{module}/go.mod does not name {version}");
        }
    }

    #[test]
    fn only_what_is_missing_is_asked_for() {
        let go = go_problem(None);
        let text = what_to_install(&[], go.as_deref(), true);
        assert!(text.contains("install Go 1.26") && !text.contains("apt-get"), "{text}");
        assert!(!text.contains("only as root") && !text.contains("nightly"), "{text}");
        let text = what_to_install(&PACKAGES[..1], None, true);
        assert!(text.contains("On Debian 12: apt-get install bpftool"), "{text}");
        assert!(!text.contains("nightly"), "{text}");
        let text = what_to_install(&EBPF_PACKAGES[..1], None, false);
        assert!(
            text.contains("only as root and on Debian 12") && text.contains("nightly"),
            "{text}"
        );
    }

    #[test]
    fn what_did_not_come_from_dpkg_is_known_by_its_program_or_file() {
        assert!(is_there(&("no-such-package", "", "/proc/self/status")));
        assert!(is_there(&("no-such-package", "", "cargo")));
        assert!(!is_there(&("no-such-package", "", "no-such-program")));
        assert!(!is_there(&("no-such-package", "", "")));
    }

    #[test]
    fn the_version_of_go_is_read_from_what_go_says() {
        assert_eq!(go_version("go1.26.8"), Some((1, 26)));
        assert_eq!(go_version("go1.27-rc1"), Some((1, 27)));
        assert_eq!(go_version("devel"), None);
    }
}
