//! Versions and paths of third-party programs.
//!
//! Programs that we build live in one folder outside the checkout, a folder per version, so that a second clone finds
//! them there. They are put in place by a rename: what is there is whole.

use std::ffi::OsStr;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs, io, process};

/// Variable that names the folder of the programs that we build.
pub const CACHE: &str = "CTRLMESH_TOOLS";

/// Variable that names a folder with etcd and kube-apiserver to use instead of ours, as in controller-runtime's
/// envtest.
pub const ASSETS: &str = "KUBEBUILDER_ASSETS";

/// The release of Kubernetes that the test bed runs.
pub const KUBERNETES: &str = "v1.36.3";

/// Other releases of Kubernetes, from the oldest that we work with: their API servers have to take our manifests. The
/// folders `xtask/kubernetes-1.30` and so on name them.
pub const OTHER_KUBERNETES: [&str; 3] = ["v1.30.14", "v1.33.13", "v1.37.2"];

/// The release of etcd that the test bed runs.
pub const ETCD: &str = "v3.6.8";

/// The release of h2spec, as `xtask/h2spec/go.mod` names it.
pub const H2SPEC: &str = "v2.2.1";

/// The release of prometheus-operator, as `xtask/prometheus-operator/go.mod` names it.
pub const PROMETHEUS_OPERATOR: &str = "v0.85.0";

/// Of Prometheus 3.7.3: its Go module counts otherwise.
pub const PROMETHEUS: &str = "v0.307.3";

/// The release of the OpenTelemetry collector, as `xtask/collector/go.mod` names it.
pub const OTEL_COLLECTOR: &str = "v0.165.0";

/// Of the newer prometheus-operator, to which tests upgrade it.
pub const PROMETHEUS_OPERATOR_NEXT: &str = "v0.87.1";

/// The release of Elastic's operator (Elastic Cloud on Kubernetes), as `xtask/eck/go.mod` names it.
pub const ECK: &str = "v3.5.0";

/// The releases of Helm, as `xtask/helm-v3/go.mod` and `xtask/helm-v4/go.mod` name them.
pub const HELM_3: &str = "v3.22.0";
pub const HELM_4: &str = "v4.3.2";

/// Both, the older first.
pub const HELMS: [&str; 2] = [HELM_3, HELM_4];

/// The release of crane, as `xtask/crane/go.mod` names it.
pub const CRANE: &str = "v0.22.1";

/// The release of kwok, as `xtask/kwok/go.mod` names it.
pub const KWOK: &str = "v0.8.0";

/// The release of bpf-linker, and the LLVM that it is built with.
pub const BPF_LINKER: &str = "0.13.0";

/// The release of cargo-deny.
pub const CARGO_DENY: &str = "0.20.2";

/// The release of cargo-fuzz.
pub const CARGO_FUZZ: &str = "0.13.2";

/// The programs that a folder of [`ASSETS`] must have; of all others ours is used where it lacks them.
const OF_ASSETS: [&str; 2] = ["etcd", "kube-apiserver"];

/// After what time a build that nobody touches, and whose process is not to be seen here, has been interrupted: it may
/// be of another container, or of another machine.
const ABANDONED_AFTER: Duration = Duration::from_hours(1);

/// The folder of the programs that we build: `$CTRLMESH_TOOLS`, else `ctrlmesh` in `$XDG_CACHE_HOME`, else in
/// `~/.cache`. Who has no home, has it where everybody keeps what is to last.
pub fn cache() -> PathBuf {
    let home = env::home_dir().filter(|home| home.is_absolute());
    cache_of(folder(CACHE), folder("XDG_CACHE_HOME"), home)
}

fn cache_of(tools: Option<PathBuf>, caches: Option<PathBuf>, home: Option<PathBuf>) -> PathBuf {
    let caches = || caches.or_else(|| Some(home?.join(".cache")));
    tools.or_else(|| Some(caches()?.join("ctrlmesh"))).unwrap_or_else(|| PathBuf::from("/var/cache/ctrlmesh"))
}

/// A program of Kubernetes, such as `kube-apiserver` or `kubelet`, or `etcd`.
pub fn control_plane(program: &str) -> PathBuf {
    match assets() {
        Some(folder) if folder.join(program).is_file() || is_of_assets(program) => folder.join(program),
        _ if program == "etcd" => cache().join("etcd").join(ETCD).join(program),
        _ => cache().join("kubernetes").join(KUBERNETES).join(program),
    }
}

/// The API server of one of [`OTHER_KUBERNETES`].
pub fn api_server_of(release: &str) -> PathBuf {
    cache().join("kubernetes").join(release).join("kube-apiserver")
}

/// The folder of programs to use instead of ours, where the user names one.
pub fn assets() -> Option<PathBuf> {
    folder(ASSETS)
}

/// Whether a folder of [`ASSETS`] must have this program.
pub fn is_of_assets(program: &str) -> bool {
    OF_ASSETS.contains(&program)
}

/// The folder that a variable names, made absolute: tests run in other folders than we do.
fn folder(variable: &str) -> Option<PathBuf> {
    let value = env::var_os(variable).filter(|value| !value.is_empty())?;
    std::path::absolute(value).ok()
}

/// What asks a server whether it speaks HTTP/2, as we build it.
pub fn h2spec() -> PathBuf {
    cache().join("h2spec").join(H2SPEC).join("h2spec")
}

/// A Prometheus server, without its pages.
pub fn prometheus() -> PathBuf {
    cache().join("prometheus").join(PROMETHEUS).join("prometheus")
}

/// Checks rules and metrics, of the same release.
pub fn promtool() -> PathBuf {
    cache().join("promtool").join(PROMETHEUS).join("promtool")
}

/// An OpenTelemetry collector that takes OTLP and prints it.
pub fn otel_collector() -> PathBuf {
    cache().join("otel-collector").join(OTEL_COLLECTOR).join("otel-collector")
}

/// An operator that we did not write, as we build it; beside it lies `bundle.yaml`, its manifests.
pub fn prometheus_operator() -> PathBuf {
    cache().join("prometheus-operator").join(PROMETHEUS_OPERATOR).join("prometheus-operator")
}

/// The same in a newer version.
pub fn prometheus_operator_next() -> PathBuf {
    cache().join("prometheus-operator").join(PROMETHEUS_OPERATOR_NEXT).join("prometheus-operator")
}

/// An operator with webhooks that we did not write, as we build it; beside it lie `crds.yaml`, `webhook.yaml` and the
/// folder `samples`, of its module.
pub fn elastic_operator() -> PathBuf {
    cache().join("eck").join(ECK).join("elastic-operator")
}

/// Helm, in the release [`HELM_3`] or [`HELM_4`].
pub fn helm(release: &str) -> PathBuf {
    cache().join("helm").join(release).join("helm")
}

/// A client of registries, and a registry for tests.
pub fn crane() -> PathBuf {
    cache().join("crane").join(CRANE).join("crane")
}

/// What simulates nodes and pods for a benchmark.
pub fn kwok() -> PathBuf {
    cache().join("kwok").join(KWOK).join("kwok")
}

/// The linker of the kernel programs, as we build it.
pub fn bpf_linker() -> PathBuf {
    cache().join("bpf-linker").join(format!("{BPF_LINKER}-llvm22")).join("bin/bpf-linker")
}

/// Whether a program of this name is on `$PATH`.
pub fn on_path(program: &str) -> bool {
    let folders = env::var_os("PATH").unwrap_or_default();
    // What only root uses is not on everybody's path.
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&folders).chain(system).any(|folder| folder.join(program).is_file())
}

/// Removes what builds that were interrupted left in the cache: what is named as [`staged`] names it, by a process that
/// is no more. What one that is not to be seen here touched a short time ago stays.
pub fn sweep() {
    for tool in entries(&cache()) {
        for version in entries(&tool).iter().filter(|path| !is_staged(path)) {
            sweep_folder(version);
        }
        sweep_folder(&tool);
    }
}

/// The same in one folder in which builds are put together.
pub fn sweep_folder(folder: &Path) {
    for left in entries(folder).iter().filter(|path| is_staged(path) && is_abandoned(path)) {
        // Where it cannot be removed, it is in the way of nobody.
        drop(fs::remove_dir_all(left).or_else(|_| fs::remove_file(left)));
    }
}

/// Where a build is put together, beside where it will stand: another place each time, because a process of another
/// container may have our number.
pub fn staged(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or(OsStr::new("tool")).to_string_lossy();
    let random = RandomState::new().build_hasher().finish();
    let home = home().unwrap_or_else(|| "elsewhere".to_owned());
    target.with_file_name(format!(".{name}.{random:016x}.{home}.{}", process::id()))
}

/// Whose numbers of processes are ours: the boot of the machine, and the namespace; nothing where `/proc` does not show
/// them. When that namespace is no more, neither are its processes, so that it may come again.
fn home() -> Option<String> {
    let seen = fs::read_link("/proc/self").ok()?;
    (seen.to_str()? == process::id().to_string()).then_some(())?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let space = fs::metadata("/proc/self/ns/pid").ok()?.ino();
    Some(format!("{}-{space}", boot.trim().replace('-', "")))
}

fn is_staged(path: &Path) -> bool {
    owner(path).is_some()
}

/// Where a path is named as [`staged`] names one: whose numbers of processes it was made among, and the process.
fn owner(path: &Path) -> Option<(String, u32)> {
    let name = path.file_name()?.to_str()?.strip_prefix('.')?;
    let mut parts = name.rsplitn(4, '.');
    let process = parts.next()?.parse().ok()?;
    let (home, random, tool) = (parts.next()?, parts.next()?, parts.next()?);
    let is_random = random.len() == 16 && random.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_random && !tool.is_empty()).then(|| (home.to_owned(), process))
}

fn is_abandoned(path: &Path) -> bool {
    let Some((made_in, process)) = owner(path) else { return false };
    let gone = !Path::new("/proc").join(process.to_string()).exists();
    let seen = home().is_some_and(|home| made_in == home);
    let touched = fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let old = touched.and_then(|touched| touched.elapsed().ok()).is_some_and(|age| age > ABANDONED_AFTER);
    gone && (seen || old)
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// Builds into a folder beside `target`, and puts it in place by a rename; gives what `build` gives.
///
/// # Errors
/// Where `build` fails, or a folder cannot be made or moved.
pub fn put<T>(target: &Path, build: impl FnOnce(&Path) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let (staged, before) = (staged(target), inode(target));
    fs::create_dir_all(&staged)?;
    let result = build(&staged).and_then(|built| Ok(replace(&staged, target, before).map(|()| built)?));
    if staged.exists() {
        fs::remove_dir_all(&staged)?;
    }
    result
}

/// Moves `staged` to `target`, in place of the folder that was there `before`. What another process put there meanwhile
/// is as good, and in use: it stays.
fn replace(staged: &Path, target: &Path, before: Option<u64>) -> io::Result<()> {
    match fs::rename(staged, target) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            if inode(target) != before {
                return Ok(());
            }
            // It is broken, or nobody would build it again: for a moment there is none.
            let old = self::staged(target);
            fs::rename(target, &old)?;
            fs::rename(staged, target)?;
            fs::remove_dir_all(old)
        }
        result => result,
    }
}

fn inode(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.ino())
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn tools_are_kept_in_the_users_folder_or_the_usual_cache() {
        let [tools, caches, home] = ["/tools", "/caches", "/home"].map(|at| Some(PathBuf::from(at)));
        let of = |tools: &Option<PathBuf>, caches: &Option<PathBuf>, home: &Option<PathBuf>| {
            cache_of(tools.clone(), caches.clone(), home.clone())
        };
        assert_eq!(of(&tools, &caches, &home), Path::new("/tools"));
        assert_eq!(of(&None, &caches, &home), Path::new("/caches/ctrlmesh"));
        assert_eq!(of(&None, &None, &home), Path::new("/home/.cache/ctrlmesh"));
        assert!(of(&None, &None, &None).is_absolute(), "tests run in other folders");
    }

    #[test]
    fn only_what_an_ended_process_left_long_ago_is_abandoned() {
        let folder = env::temp_dir().join(format!("ctrlmesh-sweep-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let long_ago = SystemTime::now() - 2 * ABANDONED_AFTER;
        let left = |name: &str, at: SystemTime| {
            let path = folder.join(name);
            fs::File::create(&path).unwrap().set_modified(at).unwrap();
            is_abandoned(&path)
        };
        // No process has so high a number.
        let made = |process: u32| format!(".etcd.v3.6.{:016x}.another-boot.{process}", 7);
        assert!(left(&made(4_194_305), long_ago));
        assert!(!left(&made(4_194_306), SystemTime::now()), "it may be of another container");
        assert!(!left(&made(process::id()), long_ago), "we are still at it");
        for name in [".keep", ".backup.4194305", ".etcd.0.another-boot.4194305", "..0000000000000007.b.4194305"] {
            assert!(!left(name, long_ago), "{name} is none of ours");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn leftovers_of_this_boot_go_once_their_process_has_ended() {
        let folder = env::temp_dir().join(format!("ctrlmesh-ended-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let ours = staged(&folder.join("etcd"));
        let name = ours.file_name().unwrap().to_string_lossy().into_owned();
        let (home, number) = name.rsplit_once('.').unwrap();
        assert_eq!(number, process::id().to_string());
        // No process has so high a number.
        let ended = folder.join(format!("{home}.4194305"));
        let foreign = folder.join(format!(".etcd.{:016x}.another-boot.4194305", 7));
        for path in [&ours, &ended, &foreign] {
            fs::create_dir(path).unwrap();
        }
        sweep_folder(&folder);
        assert_eq!([&ours, &ended, &foreign].map(|path| path.exists()), [true, false, true]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_another_process_finished_meanwhile_stays() {
        let folder = env::temp_dir().join(format!("ctrlmesh-meanwhile-{}", process::id()));
        let target = folder.join("tool");
        let write = |folder: &Path, text: &str| fs::write(folder.join("whole"), text);
        put(&target, |ours| {
            put(&target, |theirs| Ok(write(theirs, "theirs")?))?;
            Ok(write(ours, "ours")?)
        })
        .unwrap();
        assert_eq!(fs::read_to_string(target.join("whole")).unwrap(), "theirs");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside it");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_failed_build_leaves_nothing_and_a_later_one_replaces_it() {
        let folder = env::temp_dir().join(format!("ctrlmesh-xtask-{}", process::id()));
        let target = folder.join("tool");
        let failed: anyhow::Result<()> = put(&target, |staged| {
            fs::write(staged.join("half"), "")?;
            anyhow::bail!("as asked")
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        for text in ["one", "two"] {
            put(&target, |staged| Ok(fs::write(staged.join("whole"), text)?)).unwrap();
            assert_eq!(fs::read_to_string(target.join("whole")).unwrap(), text);
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
