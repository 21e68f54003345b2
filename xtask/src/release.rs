//! `cargo xtask release --dry-run`: makes all that a release publishes, and publishes nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum as _};

use crate::images::Image;
use crate::platform::Platform;
use crate::progress::{say, step};
use crate::run::root;
use crate::setup::{self, Readiness};
use crate::source::{Source, said};
use crate::{build_ebpf, disk_space, oci, tools};

mod libraries;
mod programs;
pub mod images;
mod chart_config;
pub mod chart;
mod archive;
mod crates;
mod licences;
mod sbom;
mod provenance;
mod checklist;
mod again;

use self::crates::Crates;
use self::images::ImageArchive;
use self::libraries::{Libraries, Package};
use self::programs::Program;

/// Our version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The crate by which a program is known that has the kernel programs in it.
const LOADS_KERNEL_PROGRAMS: &str = "ctrlmesh-intercept";

/// The manifest of the workspace.
const MANIFEST: &str = "Cargo.toml";

/// The manifest of the kernel programs, their package, and what they are built for.
const KERNEL: (&str, &str, &str) = ("ctrlmesh-ebpf/Cargo.toml", "ctrlmesh-ebpf", "bpfel-unknown-none");

/// The lock files of what is released.
const LOCKS: [&str; 2] = ["Cargo.lock", "ctrlmesh-ebpf/Cargo.lock"];

/// What a build for one platform takes on the disk, in MB, as measured and rounded up.
const PLATFORM_MB: u64 = 2500;

/// What to make.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Publish nothing. There is nothing else: what publishes is in the checklist that this prints
    #[arg(long)]
    dry_run: bool,
    /// Where to put the files [default: target/dist/VERSION]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Make it for this platform only; may be given several times [default: all]
    #[arg(long, value_name = "NAME")]
    platform: Vec<Platform>,
    /// Build it a second time, from a clone in another folder, and fail where a byte differs
    #[arg(long)]
    verify: bool,
    /// Take Debian's packages from this folder, in which a folder for each platform has them, and fetch none
    #[arg(long, value_name = "FOLDER")]
    libraries: Option<PathBuf>,
    /// Who builds, as a URI, for the provenance
    #[arg(long, value_name = "URI", default_value = provenance::BUILDER)]
    builder: String,
}

/// What was made.
struct Made {
    source: Source,
    programs: Vec<Program>,
    images: Vec<ImageArchive>,
    packages: Vec<Package>,
    /// The digest of the chart.
    chart: String,
}

/// The name of an image in the chart's values, and after the registry.
fn chart_name(image: Image) -> String {
    image.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Makes a release, and prints the checklist.
///
/// # Errors
/// Where something cannot be built, or differs when it is built again.
pub fn run_release(options: &Options) -> Result<Readiness> {
    ensure!(
        options.dry_run,
        "this command publishes nothing, since the project has no registry: give --dry-run, which makes the files and \
         prints the commands that publish and sign them"
    );
    let platforms = match options.platform.as_slice() {
        [] => Platform::ALL.to_vec(),
        some => Platform::ALL.into_iter().filter(|platform| some.contains(platform)).collect(),
    };
    let source = Source::of_checkout()?;
    let dist = dist();
    let out = std::path::absolute(options.out.clone().unwrap_or_else(|| dist.join(VERSION)))?;
    ensure_replaceable(&out)?;
    let builds = platforms.len() as u64 * if options.verify { 2 } else { 1 };
    disk_space::check(vec![disk_space::target(builds * PLATFORM_MB)])?;
    if setup::for_release(&platforms)? == Readiness::NotReady {
        return Ok(Readiness::NotReady);
    }
    fs::create_dir_all(&dist)?;
    tools::sweep_folder(&dist);
    let scratch = tools::staged(&dist.join("work"));
    fs::create_dir(&scratch)?;
    let result = make_all(options, &platforms, source, &scratch, &out);
    // What differs is to be looked at.
    if result.is_ok() || !options.verify {
        fs::remove_dir_all(&scratch)?;
    }
    result.map(|()| Readiness::Ready)
}

/// Where releases are made.
fn dist() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from).join("dist")
}

/// A folder that has other files than a release's stays as it is.
fn ensure_replaceable(out: &Path) -> Result<()> {
    let is_empty = fs::read_dir(out).map_or(true, |mut entries| entries.next().is_none());
    ensure!(
        is_empty || out.join(archive::SUMS).is_file(),
        "{} has files that are of no release: name another folder with --out",
        out.display()
    );
    Ok(())
}

fn make_all(options: &Options, platforms: &[Platform], source: Source, scratch: &Path, out: &Path) -> Result<()> {
    let debian = match &options.libraries {
        Some(folder) => folder.canonicalize().with_context(|| format!("find {}", folder.display()))?,
        None => fetch(platforms, &scratch.join("debian"))?,
    };
    let made = tools::put(out, |staged| {
        let all = make(options, platforms, source, &debian, scratch, staged)?;
        ensure!(Source::of_checkout()? == all.source, "the checkout was changed while it was built");
        archive::write_sums(staged, &all.source)?;
        Ok(all)
    })?;
    if options.verify {
        again::compare(&made.source, platforms, &debian, &options.builder, scratch, out)?;
    }
    say(&format!("{} has:", out.display()));
    for (name, sha256) in archive::sums(out)? {
        say(&format!("  {sha256}  {name}"));
    }
    say(&format!("\nRelease {VERSION}, the checklist:\n\n{}", checklist(platforms, &made, options.verify)?));
    Ok(())
}

/// Fetches Debian's packages for each platform, and gives the folder.
fn fetch(platforms: &[Platform], folder: &Path) -> Result<PathBuf> {
    for platform in platforms {
        let folder = folder.join(platform.name());
        fs::create_dir_all(&folder)?;
        libraries::fetch(*platform, &folder.canonicalize()?)?;
    }
    Ok(folder.canonicalize()?)
}

fn make(
    options: &Options,
    platforms: &[Platform],
    source: Source,
    debian: &Path,
    scratch: &Path,
    out: &Path,
) -> Result<Made> {
    build_ebpf::build()?;
    let (mut built, mut packages) = (Vec::new(), Vec::new());
    for platform in platforms {
        let unpacked = scratch.join("unpacked").join(platform.name());
        let libraries = Libraries::unpack(*platform, &debian.join(platform.name()), &unpacked)?;
        let texts = scratch.join("licences").join(platform.name());
        step("gather the texts of licences", Duration::from_secs(5), || licences::write(*platform, &texts))?;
        for image in programs::IMAGES {
            let program = programs::build(image, &libraries, *platform, &scratch.join("images"))?;
            libraries.add_licences(&program.files)?;
            licences::add(&texts, &program.files)?;
            built.push(program);
        }
        archive::pack(*platform, &built, &texts, &source, scratch, out)?;
        packages.extend(libraries.packages);
    }
    let images = programs::IMAGES.iter().map(|image| write_image(*image, &built, &source, scratch, out));
    let images: Vec<ImageArchive> = images.collect::<Result<_>>()?;
    let names: Vec<String> = images.iter().map(|image| chart_name(image.image)).collect();
    let digests: Vec<(&str, &str)> =
        names.iter().map(String::as_str).zip(images.iter().map(|image| image.digest.as_str())).collect();
    let folder = scratch.join("of-the-chart");
    fs::create_dir_all(&folder)?;
    let chart = chart::package(&tools::helm(tools::HELM_4), &digests, &source, &folder, out)?.digest;
    let made = Made { source, programs: built, images, packages, chart };
    let about = Duration::from_secs(5);
    step("write the bills of materials", about, || write_bills(&made, out))?;
    write_provenance(options, platforms, &made, out)?;
    Ok(made)
}

fn write_image(
    image: Image,
    programs: &[Program],
    source: &Source,
    scratch: &Path,
    out: &Path,
) -> Result<ImageArchive> {
    let of_it = programs.iter().filter(|program| program.image == image);
    let files: Vec<(Platform, &Path)> = of_it.map(|program| (program.platform, program.files.as_path())).collect();
    let name = chart_name(image);
    let folder = scratch.join("archives").join(&name);
    fs::create_dir_all(&folder)?;
    images::write(image, &files, source, &folder, &out.join(format!("ctrlmesh-{name}-{VERSION}.oci.tar")))
}

fn write_bills(made: &Made, out: &Path) -> Result<()> {
    let rust = said(Command::new("rustc").arg("--version").current_dir(root()))?;
    let rust = rust.split(' ').nth(1).context("the version of rustc")?;
    let (manifest, package, target) = KERNEL;
    let kernel = Crates::of(manifest, package, target)?;
    for program in &made.programs {
        let (image, platform) = (program.image, program.platform);
        let crates = Crates::of(MANIFEST, program.package(), platform.target())?;
        let loads = crates.all.keys().any(|(name, _)| name == LOADS_KERNEL_PROGRAMS);
        let archive = made.images.iter().find(|archive| archive.image == image).context("an image's archive")?;
        let manifest = archive.manifests.iter().find(|(of, _)| *of == platform).context("an image's manifest")?;
        let packages: Vec<Package> = made.packages.iter().filter(|one| one.platform == platform).cloned().collect();
        let document = sbom::document(&sbom::Contents {
            name: &image.name(),
            platform,
            manifest: &manifest.1,
            program: &oci::sha256(&program.path())?,
            crates: &crates,
            kernel: loads.then_some(&kernel),
            packages: &packages,
            rust,
            source: &made.source,
        });
        let name = format!("ctrlmesh-{}-{VERSION}-linux-{}.cdx.json", chart_name(image), platform.name());
        fs::write(out.join(name), serde_json::to_string_pretty(&document)? + "\n")?;
    }
    Ok(())
}

fn write_provenance(options: &Options, platforms: &[Platform], made: &Made, out: &Path) -> Result<()> {
    let mut subjects = archive::sums(out)?;
    for image in &made.images {
        let name = chart_name(image.image);
        subjects.push((name.clone(), image.digest.clone()));
        let of_platform =
            |(platform, digest): &(Platform, String)| (format!("{name} for {}", platform.name()), digest.clone());
        subjects.extend(image.manifests.iter().map(of_platform));
    }
    subjects.push(("charts/ctrlmesh".to_owned(), made.chart.clone()));
    let locks = LOCKS.map(|name| Ok((name.to_owned(), oci::sha256(&root().join(name))?)));
    let locks: Vec<(String, String)> = locks.into_iter().collect::<Result<_>>()?;
    let names: Vec<&'static str> = platforms.iter().map(|platform| platform.name()).collect();
    let statement = provenance::statement(&provenance::Facts {
        version: VERSION,
        source: &made.source,
        builder: &options.builder,
        subjects: &subjects,
        platforms: &names,
        locks: &locks,
        packages: &made.packages,
        tools: &tools_said(platforms)?,
    });
    let file = out.join(format!("ctrlmesh-{VERSION}.intoto.json"));
    Ok(fs::write(file, serde_json::to_string_pretty(&statement)? + "\n")?)
}

/// What the tools say of their versions, the first line of each.
fn tools_said(platforms: &[Platform]) -> Result<Vec<(&'static str, String)>> {
    let first = |name: &str| -> Result<String> {
        let text = said(Command::new(name).arg("--version").current_dir(root()))?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    };
    let mut all = vec![("rustc", first("rustc")?), ("cargo", first("cargo")?)];
    for platform in platforms {
        let name = match platform {
            Platform::Amd64 => "gcc for amd64",
            Platform::Arm64 => "gcc for arm64",
        };
        all.push((name, first(&programs::tool(*platform, "gcc"))?));
    }
    all.push(("helm", tools::HELM_4.to_owned()));
    all.push(("bpf-linker", tools::BPF_LINKER.to_owned()));
    Ok(all)
}

fn checklist(platforms: &[Platform], made: &Made, is_verified: bool) -> Result<String> {
    let changelog = fs::read_to_string(root().join("CHANGELOG.md"))?;
    let tried = |platform: &Platform| {
        let mut of_it = made.programs.iter().filter(|program| program.platform == *platform);
        (*platform, of_it.all(|program| program.is_tried))
    };
    let platforms: Vec<(Platform, bool)> = platforms.iter().map(tried).collect();
    let images = made.images.iter().map(|image| (chart_name(image.image), image.digest.clone()));
    let facts = checklist::Facts {
        version: VERSION,
        commit: &made.source.commit,
        changelog: &changelog,
        platforms: &platforms,
        images: &images.collect::<Vec<_>>(),
        chart: &made.chart,
        is_verified,
    };
    Ok(checklist::text(&checklist::items(&facts)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_dry_run_it_says_what_there_is_instead() {
        let (out, platform, libraries, builder) = (None, Vec::new(), None, String::new());
        let options = Options { dry_run: false, out, platform, verify: false, libraries, builder };
        let error = run_release(&options).err().unwrap().to_string();
        assert!(error.contains("publishes nothing") && error.contains("--dry-run"), "{error}");
    }

    #[test]
    fn a_folder_with_other_files_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        ensure_replaceable(folder.path()).unwrap();
        ensure_replaceable(&folder.path().join("none")).unwrap();
        fs::write(folder.path().join("letter.txt"), "").unwrap();
        let error = ensure_replaceable(folder.path()).unwrap_err().to_string();
        assert!(error.contains("name another folder"), "{error}");
        fs::write(folder.path().join(archive::SUMS), "").unwrap();
        ensure_replaceable(folder.path()).unwrap();
    }
}
