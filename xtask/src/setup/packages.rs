//! The Debian packages that are needed, and their installation.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::progress::{say, step};
use crate::run::{is_root, run};
use crate::setup::Purpose;
use crate::tools;

/// What is needed: Debian's package, what it is for, and a program or file by which it is known where it was not
/// installed by dpkg.
pub(super) type Need = (&'static str, &'static str, &'static str);

/// Debian's packages.
const PACKAGES: [Need; 17] = [
    ("bpftool", "sizes and run times of the kernel programs", "bpftool"),
    ("conntrack", "the node bed: kube-proxy", "conntrack"),
    ("containerd", "the node bed", "containerd"),
    ("containernetworking-plugins", "the node bed: pods' networks", "/usr/lib/cni/ptp"),
    ("curl", "tests of the proxy with a client that is not ours", "curl"),
    ("g++", "bpf-linker", "g++"),
    ("gcc", "the TLS library, and wall clocks for tests", "gcc"),
    ("iproute2", "network namespaces of the kernel tests", "ip"),
    ("iptables", "the node bed, and the benchmark: what we are compared with", "iptables"),
    ("kmod", "the node bed: kube-proxy", "modprobe"),
    ("libc6-dev", "the TLS library", "/usr/include/stdlib.h"),
    ("nftables", "the node bed: kube-proxy; tests: partitions", "nft"),
    ("procps", "the test bed: kill", "ps"),
    ("python3", "clients of the kernel tests", "python3"),
    ("runc", "the node bed", "runc"),
    ("socat", "the node bed: port-forward", "socat"),
    ("util-linux", "namespaces and capabilities of the kernel tests and of the node bed", "setpriv"),
];

/// What tests need beside them.
const OF_TESTS: [Need; 3] = [
    ("chromium", "tests: a browser for the page of `ctrlmesh dashboard`", "chromium"),
    ("default-jdk-headless", "tests: an operator in Java", "javac"),
    ("maven", "tests: the client of an operator in Java", "mvn"),
];

/// What only benchmarks need.
const OF_BENCHES: [Need; 2] = [
    ("haproxy", "the benchmark: what we are compared with", "haproxy"),
    ("nginx-light", "the benchmark: what we are compared with", "nginx"),
];

/// Units of systemd that would run what Debian's packages bring: the beds start their own.
const UNITS: [(&str, &str); 3] =
    [("containerd", "containerd.service"), ("haproxy", "haproxy.service"), ("nginx-light", "nginx.service")];

/// What keeps Debian's packages from starting what they bring, where it is there: see policy-rc.d(8).
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Runs `$@` with a policy `$0` that starts nothing, and takes it away again however that ends; also one that a former
/// run left because it was killed. One that is not ours stays as it is.
const QUIETLY: &str = r#"
mark='# Of the set-up of ctrlmesh, until it ends'
if [ -e "$0" ] && ! grep -qx "$mark" "$0"; then exec "$@"; fi
trap 'rm -f "$0"' EXIT
trap 'exit 130' INT TERM HUP
printf '#!/bin/sh\n%s\nexit 101\n' "$mark" >"$0" && chmod 755 "$0" || exit
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
    ("nightly Rust", "the kernel programs: with rust-src, and on your PATH bpf-linker built for its LLVM", "");

/// Installs what only benchmarks need; who may not install goes without, and the tables say so.
///
/// # Errors
/// Where it cannot be installed.
pub(super) fn for_benches() -> Result<()> {
    let missing: Vec<Need> = OF_BENCHES.into_iter().filter(|need| !is_there(need)).collect();
    if missing.is_empty() || !may_install() {
        return Ok(());
    }
    install(&missing)
}

/// What is not there for a purpose; `nightly` says whether a nightly toolchain builds the kernel programs.
pub(super) fn missing(purpose: Purpose, nightly: bool) -> Vec<Need> {
    let ebpf = match nightly {
        true => &[][..],
        false if is_debian() => &EBPF_PACKAGES,
        false => &[NIGHTLY],
    };
    let of_tests = OF_TESTS.iter().filter(|_| purpose == Purpose::Tests);
    PACKAGES.iter().chain(of_tests).chain(ebpf).copied().filter(|need| !is_there(need)).collect()
}

/// Whether dpkg has installed it, or it came another way.
pub(super) fn is_there(&(package, _, known_by): &Need) -> bool {
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
    ["ID=debian", "VERSION_ID=\"12\""].iter().all(|wanted| release.lines().any(|line| line == *wanted))
}

/// Whether this is Debian 12 and we are root.
pub(super) fn may_install() -> bool {
    is_debian() && is_root()
}

pub(super) fn say_what_to_install(needs: &[Need], go: Option<&str>) {
    say(&what_to_install(needs, go, is_debian()));
}

/// The list for somebody who has to install it, and how on Debian.
fn what_to_install(needs: &[Need], go: Option<&str>, debian: bool) -> String {
    let mut lines = vec![match needs {
        [] => "This machine lacks what is needed. Please install:".to_owned(),
        _ => "This machine lacks what is needed, and I can install it only as root and on Debian 12. Please install:"
            .to_owned(),
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
        lines.push(format!("Instead of {names} you can have a nightly toolchain with rust-src, and on your PATH bpf-linker built for its LLVM."));
    }
    lines.join("\n")
}

pub(super) fn install(packages: &[Need]) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use std::env;

    use super::*;
    use crate::setup::go_problem;

    #[test]
    fn a_package_of_several_architectures_is_installed_where_one_is() {
        assert!(is_installed("install ok installed\n"));
        assert!(is_installed("deinstall ok config-files\ninstall ok installed\n"));
        assert!(!is_installed("deinstall ok config-files\n") && !is_installed(""));
    }

    #[test]
    fn packages_are_installed_on_debian_12_only() {
        assert!(is_bookworm("NAME=\"Debian\"\nVERSION_ID=\"12\"\nID=debian\n"));
        assert!(!is_bookworm("ID=debian\nVERSION_ID=\"13\"\n"));
        assert!(!is_bookworm("ID=ubuntu\nVERSION_ID=\"12\"\n"));
    }

    #[test]
    fn no_service_starts_during_installation() {
        let folder = env::temp_dir().join(format!("ctrlmesh-policy-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let policy = folder.join("policy-rc.d");
        let quietly = |command: &str| {
            // Who runs us in the background may have it do nothing, which no shell can change.
            let mut shell = Command::new("env");
            shell
                .args(["--default-signal=INT", "sh", "-c", QUIETLY])
                .arg(&policy)
                .args(["sh", "-c", command])
                .arg(&policy);
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
    fn only_what_is_missing_is_asked_for() {
        let go = go_problem(None);
        let text = what_to_install(&[], go.as_deref(), true);
        assert!(text.contains("install Go 1.26") && !text.contains("apt-get"), "{text}");
        assert!(!text.contains("only as root") && !text.contains("nightly"), "{text}");
        let text = what_to_install(&PACKAGES[..1], None, true);
        assert!(text.contains("On Debian 12: apt-get install bpftool"), "{text}");
        assert!(!text.contains("nightly"), "{text}");
        let text = what_to_install(&EBPF_PACKAGES[..1], None, false);
        assert!(text.contains("only as root and on Debian 12") && text.contains("nightly"), "{text}");
    }

    #[test]
    fn what_did_not_come_from_dpkg_is_known_by_its_program_or_file() {
        assert!(is_there(&("no-such-package", "", "/proc/self/status")));
        assert!(is_there(&("no-such-package", "", "cargo")));
        assert!(!is_there(&("no-such-package", "", "no-such-program")));
        assert!(!is_there(&("no-such-package", "", "")));
    }
}
