//! Which programs of others do we use, in which versions, and where are they?
//!
//! Programs that we build live in one folder outside the checkout, a folder per version, so that a second clone finds
//! them there. They are put in place by a rename: what is there is whole.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{env, fs, io, process};

/// Variable that names the folder of the programs that we build.
pub const CACHE: &str = "CTRLMESH_TOOLS";

/// Variable that names a folder with etcd and kube-apiserver to use instead of ours, as in controller-runtime's envtest.
pub const ASSETS: &str = "KUBEBUILDER_ASSETS";

/// The release of Kubernetes that the test bed runs.
pub const KUBERNETES: &str = "v1.36.3";

/// The release of etcd that the test bed runs.
pub const ETCD: &str = "v3.6.8";

/// The release of bpf-linker, and the LLVM that it is built with.
pub const BPF_LINKER: &str = "0.13.0";

/// The release of cargo-deny.
pub const CARGO_DENY: &str = "0.20.2";

/// The release of cargo-fuzz.
pub const CARGO_FUZZ: &str = "0.13.2";

/// The programs that a folder of [`ASSETS`] must have; of all others ours is used where it lacks them.
const OF_ASSETS: [&str; 2] = ["etcd", "kube-apiserver"];

/// The folder of the programs that we build: `$CTRLMESH_TOOLS`, else `ctrlmesh` in `$XDG_CACHE_HOME`, else in `~/.cache`.
pub fn cache() -> PathBuf {
    folder(CACHE)
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("ctrlmesh")))
        .or_else(|| Some(folder("HOME")?.join(".cache/ctrlmesh")))
        .unwrap_or_else(|| PathBuf::from(".cache/ctrlmesh"))
}

/// A program of Kubernetes, such as `kube-apiserver` or `kubelet`, or `etcd`.
pub fn control_plane(program: &str) -> PathBuf {
    match assets() {
        Some(folder) if folder.join(program).is_file() || is_of_assets(program) => {
            folder.join(program)
        }
        _ if program == "etcd" => cache().join("etcd").join(ETCD).join(program),
        _ => cache().join("kubernetes").join(KUBERNETES).join(program),
    }
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

/// The linker of the kernel programs, as we build it.
pub fn bpf_linker() -> PathBuf {
    cache().join("bpf-linker").join(format!("{BPF_LINKER}-llvm22")).join("bin/bpf-linker")
}

/// Whether a program of this name is on `$PATH`.
pub fn on_path(program: &str) -> bool {
    let folders = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&folders).any(|folder| folder.join(program).is_file())
}

/// Builds into a folder beside `target`, and puts it in place by a rename.
///
/// # Errors
/// Where `build` fails, or a folder cannot be made or moved.
pub fn put(target: &Path, build: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let name = target.file_name().unwrap_or(OsStr::new("tool")).to_string_lossy();
    let staged = target.with_file_name(format!(".{name}.{}", process::id()));
    fs::create_dir_all(&staged)?;
    let result = build(&staged).and_then(|()| Ok(replace(&staged, target)?));
    if staged.exists() {
        fs::remove_dir_all(&staged)?;
    }
    result
}

/// Moves `staged` to `target`; what another process put there meanwhile is as good.
fn replace(staged: &Path, target: &Path) -> io::Result<()> {
    match fs::rename(staged, target) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            fs::remove_dir_all(target)?;
            fs::rename(staged, target)
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_build_leaves_nothing_and_a_later_one_replaces_it() {
        let folder = env::temp_dir().join(format!("ctrlmesh-xtask-{}", process::id()));
        let target = folder.join("tool");
        let failed = put(&target, |staged| {
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
