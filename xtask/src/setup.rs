//! Makes a bare Debian 12 machine ready, or says what one has to install.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context as _, Result, bail};

use crate::run::{is_root, root, run, say, step, succeeds, with_own_toolchain};
use crate::{build_ebpf, tools};

/// Debian's packages, and what each is for.
const PACKAGES: [(&str, &str); 19] = [
    ("bpftool", "sizes and run times of the kernel programs"),
    ("conntrack", "the node bed: kube-proxy"),
    ("containerd", "the node bed"),
    ("containernetworking-plugins", "the node bed: pods' networks"),
    ("curl", "tests of the proxy with a client that is not ours"),
    ("g++", "bpf-linker"),
    ("gcc", "the TLS library"),
    ("iproute2", "network namespaces of the kernel tests"),
    ("iptables", "the benchmark: what we are compared with"),
    ("kmod", "the node bed: kube-proxy"),
    ("libc6-dev", "the TLS library"),
    ("libcap2-bin", "tests that drop capabilities"),
    ("nftables", "the node bed: kube-proxy"),
    ("nginx-light", "the benchmark: what we are compared with"),
    ("procps", "the test bed: kill"),
    ("python3", "clients of the kernel tests"),
    ("runc", "the node bed"),
    ("socat", "the node bed: port-forward"),
    ("util-linux", "network namespaces of the kernel tests"),
];

/// More of Debian's packages, where there is no nightly toolchain with `rust-src` and bpf-linker.
const EBPF_PACKAGES: [(&str, &str); 5] = [
    ("libpolly-22-dev", "bpf-linker"),
    ("libzstd-dev", "bpf-linker"),
    ("llvm-22-dev", "bpf-linker"),
    ("rust-web-src", "the kernel programs: the source of `core`"),
    ("rustc-web", "the kernel programs: a compiler that fits bpf-linker's LLVM"),
];

/// The programs of the test beds: name, Go package, and about how long the first build takes.
const CONTROL_PLANE: [(&str, &str, &str); 7] = [
    ("etcd", "go.etcd.io/etcd/server/v3", "1 min"),
    ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", "3 to 5 min"),
    ("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", "1 min"),
    ("kubelet", "k8s.io/kubernetes/cmd/kubelet", "2 min"),
    ("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler", "30 s"),
    ("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy", "30 s"),
    ("kubectl", "k8s.io/kubernetes/cmd/kubectl", "30 s"),
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
    let packages = missing_packages();
    let mut readiness = Readiness::Ready;
    if !packages.is_empty() && may_install() {
        install(&packages)?;
    } else if !packages.is_empty() {
        say_what_to_install(&packages);
        readiness = Readiness::NotReady;
    }
    control_plane()?;
    if !build_ebpf::has_linker() && readiness == Readiness::Ready {
        step(
            "build bpf-linker, for the kernel programs (about 1 min, once per machine)",
            build_linker,
        )?;
    }
    if readiness == Readiness::Ready {
        say(&format!("everything is there; what we built is in {}", tools::cache().display()));
    }
    Ok(readiness)
}

/// Builds what is missing of the control plane; a folder that the user names is used as it is.
fn control_plane() -> Result<()> {
    let missing =
        CONTROL_PLANE.iter().filter(|(program, ..)| !tools::control_plane(program).is_file());
    for (program, package, time) in missing {
        if let Some(folder) = tools::assets().filter(|_| tools::is_of_assets(program)) {
            let (variable, folder) = (tools::ASSETS, folder.display());
            bail!(
                "{program} is not in {variable}={folder}; put it there, or unset {variable} and it is built"
            );
        }
        check_go()?;
        let what = format!(
            "build {program}, for a real Kubernetes in tests (about {time}, once per machine)"
        );
        step(&what, || build_go(program, package))?;
    }
    Ok(())
}

fn missing_packages() -> Vec<(&'static str, &'static str)> {
    let ebpf = if build_ebpf::nightly().is_some() { &[][..] } else { &EBPF_PACKAGES };
    PACKAGES.iter().chain(ebpf).copied().filter(|(name, _)| !is_installed(name)).collect()
}

fn is_installed(package: &str) -> bool {
    let status = Command::new("dpkg-query").args(["-W", "-f", "${Status}", package]).output();
    status.is_ok_and(|output| output.stdout == b"install ok installed")
}

/// Whether this is Debian and we are root.
fn may_install() -> bool {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let debian = release.lines().any(|line| line == "ID=debian") && tools::on_path("apt-get");
    debian && is_root()
}

fn say_what_to_install(packages: &[(&str, &str)]) {
    say(
        "This machine lacks what the tests need, and I can install it only as root and on Debian. Please install:",
    );
    for (name, why) in packages {
        say(&format!("  {name:<16} {why}"));
    }
    let names: Vec<&str> = packages.iter().map(|(name, _)| *name).collect();
    say(&format!("On Debian 12: apt-get install {}", names.join(" ")));
    say(
        "Instead of rustc-web, rust-web-src, llvm-22-dev, libpolly-22-dev and libzstd-dev you can have a nightly",
    );
    say("toolchain with rust-src, and bpf-linker on your PATH. Go must be 1.26 or newer.");
}

fn install(packages: &[(&str, &str)]) -> Result<()> {
    for (name, why) in packages {
        say(&format!("missing: {name} ({why})"));
    }
    step("install Debian packages (about 1 min)", || {
        run_apt(&["update", "-q"])?;
        let names = packages.iter().map(|(name, _)| *name);
        run_apt(
            &["install", "-q", "-y", "--no-install-recommends"]
                .into_iter()
                .chain(names)
                .collect::<Vec<_>>(),
        )
    })
}

/// apt-get, which starts no daemon of what it installs.
fn run_apt(arguments: &[&str]) -> Result<()> {
    run(Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("RUNLEVEL", "1"))
}

fn check_go() -> Result<()> {
    let hint = format!(
        "install Go {}.{} or newer (go.dev/dl): the test bed's API server is built with it",
        GO.0, GO.1
    );
    let output =
        Command::new("go").args(["env", "GOVERSION"]).output().with_context(|| hint.clone())?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match go_version(&version) {
        Some(found) if found >= GO => Ok(()),
        _ => bail!("{hint}; found {version:?}"),
    }
}

/// `go1.26.8` as (1, 26).
fn go_version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.strip_prefix("go")?.split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn build_go(program: &str, package: &str) -> Result<()> {
    let target = tools::control_plane(program);
    let folder = target.parent().context("the folder of a tool")?;
    fs::create_dir_all(folder)?;
    let staged = folder.join(format!(".{program}.{}", std::process::id()));
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
    step(&format!("build {name}, {why}, once per machine"), || {
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
    fn the_version_of_go_is_read_from_what_go_says() {
        assert_eq!(go_version("go1.26.8"), Some((1, 26)));
        assert_eq!(go_version("go1.27-rc1"), Some((1, 27)));
        assert_eq!(go_version("devel"), None);
    }
}
