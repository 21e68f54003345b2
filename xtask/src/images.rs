//! Builds the images that a cluster runs, without Docker.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};

use crate::paths::Paths;
use crate::platform::Platform;
use crate::progress::{say, step};
use crate::run::{cargo, root, run};
use crate::{build_ebpf, oci, tools};

/// The largest archive that we hand out: an image is pulled by every node of a cluster.
pub(crate) const LARGEST_BYTES: u64 = 25_000_000;

/// How long a crate takes to build on two cores for the first time.
pub(crate) const ABOUT: Duration = Duration::from_mins(4);

/// Variable that names a folder in which our programs are, built as for tests, and the images that tests have built.
pub(crate) const PROGRAMS: &str = "CTRLMESH_TEST_PROGRAMS";

/// The folder of these images in that one.
const IMAGES: &str = "images";

/// Which images to build.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Build this image only; may be given several times [default: proxy, manager, cli and example-operator]
    #[arg(value_name = "NAME")]
    images: Vec<Image>,
    /// Build what is in Rust without optimisation or compression, as for tests: quick to build, large and slow
    #[arg(long)]
    debug: bool,
}

/// An image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Image {
    /// ctrlmesh-proxy
    Proxy,
    /// ctrlmesh-manager
    Manager,
    /// ctrlmesh, the command, for `helm test`
    Cli,
    /// The operator that stands in for the user's
    ExampleOperator,
    /// prometheus-operator, which we did not write
    PrometheusOperator,
    /// A newer version of it
    PrometheusOperatorNext,
    /// Elastic's operator, which we did not write
    ElasticOperator,
    /// The pause container of the node bed's pods
    Pause,
    /// The program that the node bed's tests run in pods
    Probe,
    /// kubectl, for tests that run it in a pod
    Kubectl,
}

/// How a program is built.
enum Source {
    /// A crate of the workspace.
    Crate,
    /// A package of a Go module: the module's folder, and the package.
    Go(&'static str, &'static str),
    /// A program of the tool cache.
    Built(PathBuf),
}

impl Image {
    /// The name by which a pod asks for it.
    pub fn name(self) -> String {
        let version = env!("CARGO_PKG_VERSION");
        let name = self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        format!("ctrlmesh.dev/{name}:{version}")
    }

    /// The name of the program in it.
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::Proxy => "ctrlmesh-proxy",
            Self::Manager => "ctrlmesh-manager",
            Self::Cli => "ctrlmesh",
            Self::ExampleOperator => "example-operator",
            Self::PrometheusOperator | Self::PrometheusOperatorNext => "prometheus-operator",
            Self::ElasticOperator => "elastic-operator",
            Self::Pause => "pause",
            Self::Probe => "probe",
            Self::Kubectl => "kubectl",
        }
    }

    /// The name of its archive.
    fn archive(self) -> String {
        let next = if self == Self::PrometheusOperatorNext { "-next" } else { "" };
        format!("{}{next}.tar", self.program())
    }

    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::Proxy => "ctrlmesh: gives each replica of an operator its share of the objects",
            Self::Manager => "ctrlmesh: decides the shares and tells the proxies",
            Self::Cli => "ctrlmesh: the command, which checks an installation",
            Self::ExampleOperator => "An ordinary operator, to try ctrlmesh with",
            Self::PrometheusOperator | Self::PrometheusOperatorNext => "prometheus-operator, for tests of ctrlmesh",
            Self::ElasticOperator => "Elastic Cloud on Kubernetes, for tests of ctrlmesh",
            Self::Pause => "Holds the namespaces of a pod",
            Self::Probe => "Answers, asks and reads, for tests",
            Self::Kubectl => "kubectl, for tests",
        }
    }

    /// The variables of its program, each `NAME=value`.
    pub(crate) fn environment(self) -> &'static [&'static str] {
        match self {
            // A proxy that was told no policy would let everything pass.
            Self::Proxy => &["CTRLMESH_PROXY_REQUIRE_POLICY=true"],
            _ => &[],
        }
    }

    fn source(self) -> Source {
        match self {
            Self::Proxy | Self::Manager | Self::Cli => Source::Crate,
            Self::ExampleOperator => Source::Go("deploy/example-operator", "./cmd"),
            Self::PrometheusOperator => Source::Built(tools::prometheus_operator()),
            Self::PrometheusOperatorNext => Source::Built(tools::prometheus_operator_next()),
            Self::ElasticOperator => Source::Built(tools::elastic_operator()),
            Self::Pause => Source::Go("xtask/control-plane", "./pause"),
            Self::Probe => Source::Go("xtask/control-plane", "./probe"),
            Self::Kubectl => Source::Built(tools::control_plane("kubectl")),
        }
    }
}

/// Builds images, and says where they are.
///
/// # Errors
/// Where a program cannot be built, or an image is larger than it may be.
pub fn run_images(options: &Options) -> Result<()> {
    let all = [Image::Proxy, Image::Manager, Image::Cli, Image::ExampleOperator];
    let wanted = if options.images.is_empty() { &all[..] } else { &options.images };
    for archive in build_anew(wanted, options.debug)? {
        let bytes = fs::metadata(&archive)?.len();
        say(&format!("{} ({} kB)", archive.display(), bytes / 1000));
    }
    Ok(())
}

/// Where the images are built.
fn folder(debug: bool) -> PathBuf {
    folder_of(&root().join("target/images"), debug)
}

/// The folder, below that of all images, of those that are built so.
fn folder_of(all: &Path, debug: bool) -> PathBuf {
    if debug { all.join("debug") } else { all.to_owned() }
}

/// The archive of an image, once it is built.
pub(crate) fn archive(image: Image, debug: bool) -> PathBuf {
    folder(debug).join(image.archive())
}

/// Removes what builds that were interrupted left.
pub fn sweep() {
    for folder in [folder(true), folder(false)] {
        tools::sweep_folder(&folder);
    }
}

/// The archives of images: those that other tests of the same run have built, where there are any, else built anew. Of
/// those who want the same one at once, one builds it.
///
/// # Errors
/// As [`build_anew`].
pub fn build(images: &[Image], debug: bool) -> Result<Vec<PathBuf>> {
    let Some(programs) = env::var_os(PROGRAMS) else { return build_anew(images, debug) };
    let folder = folder_of(&Path::new(&programs).join(IMAGES), debug);
    fs::create_dir_all(&folder)?;
    let mut archives = Vec::new();
    for image in images {
        let archive = folder.join(image.archive());
        let lock = File::create(archive.with_extension("lock"))?;
        lock.lock()?;
        if !archive.is_file() {
            build_into(&folder, &[*image], debug)?;
        }
        // Held until here; where a process is killed, the kernel lets go of it.
        drop(lock);
        archives.push(archive);
    }
    Ok(archives)
}

/// Builds images into `target/images`, or `target/images/debug`; gives the archives.
///
/// # Errors
/// Where a program cannot be built, or an image is larger than it may be.
pub fn build_anew(images: &[Image], debug: bool) -> Result<Vec<PathBuf>> {
    sweep();
    build_into(&folder(debug), images, debug)
}

fn build_into(folder: &Path, images: &[Image], debug: bool) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(folder)?;
    let mut archives = Vec::new();
    for image in images {
        let archive = folder.join(image.archive());
        // Several may build at once, also in one process: who is last wins, and a reader sees a whole archive.
        let scratch = tools::staged(&archive);
        fs::create_dir_all(&scratch)?;
        let result = build_one(*image, debug, &scratch);
        let moved = result.and_then(|built| Ok(fs::rename(built, &archive)?));
        fs::remove_dir_all(&scratch)?;
        moved.with_context(|| format!("build the image {}", image.name()))?;
        archives.push(archive.canonicalize()?);
    }
    Ok(archives)
}

fn build_one(image: Image, debug: bool, scratch: &Path) -> Result<PathBuf> {
    let files = scratch.join("files");
    fs::create_dir(&files)?;
    let program = files.join(image.program());
    match image.source() {
        Source::Crate => {
            let (built, paths) = build_crate(image.program(), debug)?;
            // Names of functions stay, for backtraces; what only a debugger reads goes.
            run(Command::new("strip").arg("--strip-debug").arg("-o").arg(&program).arg(built))?;
            paths.map_or(Ok(()), |paths| paths.are_not_in(&program))?;
            add_libraries(&program, &files)?;
        }
        Source::Go(module, package) => build_go(module, package, &program)?,
        Source::Built(from) => {
            let what = || format!("{} is not there: run `cargo xtask setup`", from.display());
            fs::copy(&from, &program).with_context(what)?;
        }
    }
    let name = image.name();
    let about = oci::About {
        name: &name,
        description: image.description(),
        entrypoint: &format!("/{}", image.program()),
        environment: image.environment(),
        local: debug,
        platform: Platform::of_machine()?,
        source: None,
    };
    let archive = scratch.join("archive");
    oci::write(&about, &files, scratch, &archive)?;
    let bytes = fs::metadata(&archive)?.len();
    ensure!(debug || bytes <= LARGEST_BYTES, "{bytes} bytes are more than {LARGEST_BYTES}");
    Ok(archive)
}

/// Builds our programs as images for tests have them, into a folder of this run, and gives it. Those who find it in
/// [`PROGRAMS`] build none: cargo keeps one program of a name, and would exchange it under the tests that run
/// meanwhile, which have other features. Where the run does not remove it, the next build does.
///
/// # Errors
/// Where a program cannot be built or copied.
pub(crate) fn build_programs() -> Result<PathBuf> {
    sweep();
    let folder = tools::staged(&folder(false).join("programs"));
    fs::create_dir_all(&folder)?;
    for image in [Image::Proxy, Image::Manager, Image::Cli] {
        fs::copy(build_crate(image.program(), true)?.0, folder.join(image.program()))?;
    }
    Ok(folder)
}

/// Builds a program of ours; gives where it is, and of what it must not speak.
fn build_crate(name: &str, debug: bool) -> Result<(PathBuf, Option<Paths>)> {
    if let Some(programs) = env::var_os(PROGRAMS).filter(|_| debug) {
        return Ok((PathBuf::from(programs).join(name), None));
    }
    // The command runs a proxy, too.
    if [Image::Proxy, Image::Cli].map(Image::program).contains(&name) {
        build_ebpf::build()?;
    }
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let (profile, folder, target) = if debug {
        ("dev", "debug", target)
    } else {
        // A folder of its own: with other flags everything in it would be built anew each time.
        let build = target.join("images/build");
        fs::create_dir_all(&build)?;
        // As the compiler is told of it.
        ("release", "release", build.canonicalize()?)
    };
    let arguments = ["build", "--quiet", "--locked", "--profile", profile, "--package", name];
    let mut build = cargo(&arguments);
    build.arg("--target-dir").arg(&target);
    let paths = (!debug).then(|| Paths::of(&target)).transpose()?;
    if let Some(paths) = &paths {
        paths.keep_out(&mut build);
    }
    step(&format!("build {name}; the first time takes minutes"), ABOUT, || run(&mut build))?;
    Ok((target.join(folder).join(name), paths))
}

fn build_go(module: &str, package: &str, program: &Path) -> Result<()> {
    let mut go = Command::new("go");
    go.args(["build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid=", "-o"])
        .arg(program)
        .arg(package)
        .current_dir(root().join(module))
        .env("CGO_ENABLED", "0");
    run(&mut go)
}

/// Copies the shared libraries that `program` needs, and the loader that finds them, to where it looks for them.
fn add_libraries(program: &Path, files: &Path) -> Result<()> {
    let output = Command::new("ldd").arg(program).output().context("start ldd")?;
    ensure!(output.status.success(), "ldd: {}", String::from_utf8_lossy(&output.stderr));
    for library in libraries(&String::from_utf8_lossy(&output.stdout))? {
        let target = files.join(library.strip_prefix("/").context("a library without a path")?);
        fs::create_dir_all(target.parent().context("the folder of a library")?)?;
        fs::copy(&library, &target).with_context(|| format!("copy {}", library.display()))?;
    }
    Ok(())
}

/// The files in what ldd says: `libc.so.6 => /lib/libc.so.6 (0x…)`, and the loader, which has a path only.
fn libraries(text: &str) -> Result<Vec<PathBuf>> {
    ensure!(!text.contains("not found"), "a library is not there:\n{text}");
    let path = |line: &str| {
        let (name, address) = line.trim().rsplit_once(" (0x")?;
        let path = name.rsplit_once(" => ").map_or(name, |(_, path)| path);
        (address.ends_with(')') && path.starts_with('/')).then(|| PathBuf::from(path))
    };
    Ok(text.lines().filter_map(path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_that_docker_builds_say_the_same_of_themselves() {
        let ours = include_str!("../../deploy/Dockerfile");
        let example = include_str!("../../deploy/example-operator/Dockerfile");
        for (image, file) in
            [(Image::Proxy, ours), (Image::Manager, ours), (Image::Cli, ours), (Image::ExampleOperator, example)]
        {
            let name = image.name();
            let (title, version) = name.trim_start_matches("ctrlmesh.dev/").split_once(':').unwrap();
            let title = format!("LABEL org.opencontainers.image.title=\"{title}\"");
            let label = file.split("FROM ").find(|stage| stage.contains(&title)).expect("a stage");
            for (key, value) in [("version", version), ("licenses", "Apache-2.0"), ("description", image.description())]
            {
                let said = format!("org.opencontainers.image.{key}=\"{value}\"");
                assert!(label.contains(&said), "{name}: {said}");
            }
            for variable in image.environment() {
                assert!(label.contains(&format!("\nENV {variable}\n")), "{name}: {variable}");
            }
        }
    }

    #[test]
    fn docker_builds_with_what_we_build_with() {
        let file = include_str!("../../deploy/Dockerfile");
        let toolchain = include_str!("../../rust-toolchain.toml");
        let channel = toolchain.split('"').nth(1).unwrap();
        let (minor, _) = channel.rsplit_once('.').unwrap();
        let linker = format!("bpf-linker --version {}", tools::BPF_LINKER);
        let rust = format!("FROM rust:{minor}-bookworm");
        for said in [rust, linker, "cargo xtask images proxy manager cli".to_owned()] {
            assert!(file.contains(&said), "{said}");
        }
        let packages = build_ebpf::HINT.split(' ').filter(|word| word.ends_with("-dev"));
        assert!(packages.clone().count() > 1);
        for package in packages {
            assert!(file.contains(package), "{package}");
        }
    }

    #[test]
    fn libraries_and_the_loader_are_found_but_not_the_vdso() {
        let text = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x00007f)\n\t/lib64/ld-linux.so.2 (0x00007f)\n";
        let found = libraries(text).unwrap();
        assert_eq!(found, [PathBuf::from("/lib/x/libc.so.6"), PathBuf::from("/lib64/ld-linux.so.2")]);
        assert!(libraries("\tlibgone.so => not found\n").is_err());
        assert!(libraries("\tstatically linked\n").unwrap().is_empty());
    }
}
