//! Keeps the paths of the build machine out of released programs, so that two checkouts give the same bytes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context as _, Result, bail, ensure};

use crate::run::root;

/// Between two flags in a variable that cargo splits.
const SEPARATOR: &str = "\x1f";

/// The folders of this machine whose names get into a program, and what stands for them there.
pub(crate) struct Paths(Vec<(PathBuf, String)>);

impl Paths {
    /// Of a build into `target`, an absolute path without links.
    ///
    /// # Errors
    /// Where the checkout's folder cannot be found out, or nobody knows where cargo keeps its sources.
    pub(crate) fn of(target: &Path) -> Result<Self> {
        let home = env::var_os("CARGO_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let usual = || env::home_dir().map(|home| home.join(".cargo"));
        let cargo = home.or_else(usual).context("neither CARGO_HOME nor HOME is set")?;
        // The last one that fits holds, and the target folder usually lies in the checkout.
        let mut paths: Vec<_> = toolchains().map(|folder| (folder, "/rustup".to_owned())).into_iter().collect();
        paths.extend([
            (cargo, "/cargo".to_owned()),
            (root().canonicalize()?, "/ctrlmesh".to_owned()),
            (target.to_owned(), "/target".to_owned()),
        ]);
        // Whoever has the component rust-src has the library's sources there, and the compiler names them.
        let library = PathBuf::from(rustc("--print=sysroot")?.trim_end()).join("lib/rustlib/src/rust");
        if library.is_dir() {
            let version = rustc("-vV")?;
            let commit = version.lines().find_map(|line| line.strip_prefix("commit-hash: "));
            // As it is called where nobody has them.
            paths.push((library, format!("/rustc/{}", commit.context("rustc names no commit")?)));
        }
        Ok(Self(paths))
    }

    /// Lets `cargo` build without them: what rustc writes, and what a C compiler does that a build script starts.
    pub(crate) fn keep_out(&self, cargo: &mut Command) {
        let rust = self.flags("--remap-path-prefix").join(SEPARATOR.as_ref());
        let own = env::var_os("CFLAGS").into_iter();
        // A C compiler's flags are parted at spaces: one that has any is left out, and the program is looked at all the
        // same.
        let parted = |flag: &OsString| flag.as_encoded_bytes().iter().any(u8::is_ascii_whitespace);
        let mapped = self.flags("-ffile-prefix-map").into_iter().filter(|flag| !parted(flag));
        let c: Vec<OsString> = own.chain(mapped).collect();
        cargo.env("CARGO_ENCODED_RUSTFLAGS", rust).env("CFLAGS", c.join(" ".as_ref()));
    }

    /// The same for a build whose flags are in the configuration of its folder, for programs of `target`: what is said
    /// here is put to those. The kernel programs' debug information is part of the program that loads them.
    pub(crate) fn keep_out_of(&self, target: &str, cargo: &mut Command) {
        let flags = self.flags("--remap-path-prefix");
        let flags: Vec<String> = flags.iter().map(|flag| format!("{:?}", flag.to_string_lossy())).collect();
        cargo.arg("--config").arg(format!("target.{target}.rustflags=[{}]", flags.join(", ")));
    }

    fn flags(&self, name: &str) -> Vec<OsString> {
        let flag = |(from, to): &(PathBuf, String)| {
            let mut flag = OsString::from(format!("{name}="));
            flag.push(from);
            flag.push(format!("={to}"));
            flag
        };
        self.0.iter().map(flag).collect()
    }

    /// Refuses a program that names a folder in one of them all the same.
    ///
    /// # Errors
    /// Where it does, or something cannot be read.
    pub(crate) fn are_not_in(&self, program: &Path) -> Result<()> {
        let bytes = fs::read(program).with_context(|| format!("read {}", program.display()))?;
        let mut folders = Vec::new();
        for (path, _) in &self.0 {
            for entry in fs::read_dir(path).with_context(|| format!("list {}", path.display()))? {
                // With its end, so that `/src` is not found in `/cargo/registry/src`.
                folders.push(entry?.path().join(""));
            }
        }
        let begins = (0..bytes.len()).filter(|at| bytes[*at] == b'/').map(|at| &bytes[at..]);
        let mut pairs = begins.flat_map(|text| folders.iter().map(move |folder| (text, folder)));
        let found = pairs.find(|(text, folder)| text.starts_with(folder.as_os_str().as_encoded_bytes()));
        if let Some((_, folder)) = found {
            let (program, folder) = (program.display(), folder.display());
            bail!("{program} names {folder}, of the machine that built it: another's would differ");
        }
        Ok(())
    }
}

/// Where rustup keeps toolchains, where there is one.
fn toolchains() -> Option<PathBuf> {
    let home = env::var_os("RUSTUP_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let folder = home.or_else(|| Some(env::home_dir()?.join(".rustup")))?;
    folder.is_dir().then_some(folder)
}

/// What the compiler of the checkout says.
fn rustc(question: &str) -> Result<String> {
    let asked = Command::new("rustc").arg(question).current_dir(root()).output();
    let output = asked.context("start rustc")?;
    ensure!(output.status.success(), "rustc: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_remapped_and_a_program_that_has_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [cargo, source] = ["cargo", "src"].map(|name| folder.path().join(name));
        for inside in [cargo.join("registry"), source.join("ctrlmesh-proxy")] {
            fs::create_dir_all(inside).unwrap();
        }
        let paths = Paths(vec![(cargo.clone(), "/cargo".into()), (source.clone(), "/ctrlmesh".into())]);

        let mut command = Command::new("cargo");
        paths.keep_out(&mut command);
        let said: Vec<_> = command.get_envs().filter_map(|(_, value)| value?.to_str()).collect();
        let (cargo, source) = (cargo.display(), source.display());
        let flags = |name: &str, between: &str| format!("{name}={cargo}=/cargo{between}{name}={source}=/ctrlmesh");
        assert!(said.contains(&flags("--remap-path-prefix", "\x1f").as_str()), "{said:?}");
        let c = flags("-ffile-prefix-map", " ");
        assert!(said.iter().any(|said| said.ends_with(&c)), "{said:?}");

        let mut command = Command::new("cargo");
        paths.keep_out_of("bpf", &mut command);
        let said: Vec<_> = command.get_args().filter_map(|said| said.to_str()).collect();
        let flag = |from: &dyn std::fmt::Display, to: &str| format!("\"--remap-path-prefix={from}={to}\"");
        let both = format!("{}, {}", flag(&cargo, "/cargo"), flag(&source, "/ctrlmesh"));
        assert_eq!(said, ["--config", &format!("target.bpf.rustflags=[{both}]")]);

        let program = folder.path().join("program");
        fs::write(&program, format!("\0/cargo/registry{source}/lib.rs at {cargo}")).unwrap();
        paths.are_not_in(&program).unwrap();
        fs::write(&program, format!("\0main.rs{source}/ctrlmesh-proxy/src/lib.rs\0")).unwrap();
        let error = paths.are_not_in(&program).unwrap_err().to_string();
        assert!(error.contains(&format!("names {source}/ctrlmesh-proxy/")), "{error}");
    }
}
