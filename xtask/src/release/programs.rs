//! Builds the programs of a release for a platform, and tries whether they run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, ffi::OsString};

use anyhow::{Context as _, Result, ensure};

use super::libraries::Libraries;
use crate::images::Image;
use crate::paths::Paths;
use crate::platform::Platform;
use crate::progress::step;
use crate::run::{cargo, root, run};
use crate::source::said;
use crate::tools;

/// How long a program takes to build on two cores: with its dependencies for the first time.
const ABOUT: Duration = Duration::from_mins(8);

/// What is released: what the chart installs, and the command that people run.
pub(crate) const IMAGES: [Image; 3] = [Image::Proxy, Image::Manager, Image::Cli];

/// A program of a platform, and all that its image has.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) image: Image,
    pub(crate) platform: Platform,
    /// The folder of the image's files.
    pub(crate) files: PathBuf,
    /// Whether it was started, and said its version.
    pub(crate) is_tried: bool,
}

impl Program {
    /// The program itself.
    pub(crate) fn path(&self) -> PathBuf {
        self.files.join(self.image.program())
    }

    /// The package that it is built from.
    pub(crate) fn package(&self) -> &'static str {
        self.image.program()
    }
}

/// Builds one program into a folder below `scratch`.
///
/// # Errors
/// Where it cannot be built, names a folder of this machine, or does not run.
pub(crate) fn build(image: Image, libraries: &Libraries, platform: Platform, scratch: &Path) -> Result<Program> {
    let files = scratch.join(platform.name()).join(image.program());
    fs::create_dir_all(&files)?;
    let program = files.join(image.program());
    let (built, paths) = compile(image.program(), platform)?;
    // Names of functions stay, for backtraces; what only a debugger reads goes.
    run(Command::new(tool(platform, "strip")).arg("--strip-debug").arg("-o").arg(&program).arg(built))?;
    paths.are_not_in(&program)?;
    let loader = libraries.add(&program, &files)?;
    let is_tried = try_it(platform, &loader, &files, &program)?;
    Ok(Program { image, platform, files, is_tried })
}

/// Has cargo build a package for a platform; gives the program, and of what it must not speak.
fn compile(package: &str, platform: Platform) -> Result<(PathBuf, Paths)> {
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let target = target.join("dist/build");
    fs::create_dir_all(&target)?;
    // As the compiler is told of it.
    let target = target.canonicalize()?;
    let mut build = cargo(&["build", "--quiet", "--locked", "--release", "--package", package]);
    build.args(["--target", platform.target(), "--target-dir"]).arg(&target);
    let paths = Paths::of(&target)?;
    paths.keep_out(&mut build);
    build.envs(tools_of(platform));
    let what = format!("build {package} for {}; the first time takes long", platform.name());
    step(&what, ABOUT, || run(&mut build))?;
    Ok((target.join(platform.target()).join("release").join(package), paths))
}

/// Variables that name the tools of another machine's programs, for cargo, and for build scripts with C in them.
fn tools_of(platform: Platform) -> Vec<(String, OsString)> {
    if !platform.is_foreign() {
        return Vec::new();
    }
    let target = platform.target().replace('-', "_");
    let linker = format!("CARGO_TARGET_{}_LINKER", target.to_uppercase());
    let named = [(linker, "gcc"), (format!("CC_{target}"), "gcc"), (format!("AR_{target}"), "ar")];
    named.map(|(variable, name)| (variable, tool(platform, name).into())).into()
}

/// What a tool is called that works for a platform.
pub(crate) fn tool(platform: Platform, name: &str) -> String {
    if platform.is_foreign() { format!("{}-{name}", platform.gnu()) } else { name.to_owned() }
}

/// Starts a program with the libraries of its image, and no others: false where nothing here runs it.
fn try_it(platform: Platform, loader: &Path, files: &Path, program: &Path) -> Result<bool> {
    let mut command = if platform.is_foreign() {
        if !tools::on_path(platform.emulator()) {
            return Ok(false);
        }
        let mut emulator = Command::new(platform.emulator());
        emulator.arg(loader);
        emulator
    } else {
        Command::new(loader)
    };
    command.arg("--library-path").arg(files.join("lib").join(platform.gnu())).arg(program).arg("--version");
    check_version(&said(&mut command).with_context(|| format!("try {}", program.display()))?)?;
    Ok(true)
}

/// Refuses a program that says, as `ctrlmesh 1.2.3`, that it has another version than we.
fn check_version(said: &str) -> Result<()> {
    let wanted = env!("CARGO_PKG_VERSION");
    let is_it = said.split(' ').nth(1).is_some_and(|version| version == wanted);
    ensure!(is_it, "a program says that it is {said:?}, and not version {wanted}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_machines_programs_are_built_with_its_tools() {
        let other = Platform::ALL.into_iter().find(|platform| platform.is_foreign()).unwrap();
        let target = other.target().replace('-', "_");
        let tools = tools_of(other);
        let linker = tools.iter().find(|(name, _)| name.starts_with("CARGO_TARGET_")).unwrap();
        assert_eq!(linker.0, format!("CARGO_TARGET_{}_LINKER", target.to_uppercase()));
        assert_eq!(linker.1.to_str().unwrap(), format!("{}-gcc", other.gnu()));
        assert!(tools.iter().any(|(name, _)| *name == format!("CC_{target}")), "{tools:?}");
        assert!(tools_of(Platform::of_machine().unwrap()).is_empty());
    }

    #[test]
    fn a_program_of_another_version_is_refused() {
        check_version(concat!("ctrlmesh-proxy ", env!("CARGO_PKG_VERSION"))).unwrap();
        for said in ["ctrlmesh-proxy 0.0.0", concat!("ctrlmesh-proxy-", env!("CARGO_PKG_VERSION")), ""] {
            let error = check_version(said).unwrap_err().to_string();
            assert!(error.contains("and not version"), "{error}");
        }
    }
}
