//! The images that we hand out: the same bytes each time, and enough in them to run where nothing may be written.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::{Cluster, Space, is_full, skipped};
use serde_json::Value;
use xtask::images::{self, Image};

/// The largest archive, in bytes.
const LARGEST_BYTES: usize = 25_000_000;

#[test]
fn two_builds_of_an_image_are_equal_and_small() -> Result<()> {
    for image in [Image::Pause, Image::Probe, Image::ExampleOperator] {
        let build = || -> Result<Vec<u8>> {
            let archives = images::build_anew(&[image], false)?;
            Ok(fs::read(archives.first().context("no archive")?)?)
        };
        let (one, other) = (build()?, build()?);
        ensure!(one == other, "{image:?} differs from itself");
        ensure!(one.len() < LARGEST_BYTES, "{image:?} has {} bytes", one.len());
    }
    Ok(())
}

/// Proxy and manager, from folders of different names. That takes many minutes, so only where all counts are full.
#[test]
fn two_checkouts_give_the_same_images() -> Result<()> {
    if !is_full() {
        skipped("two_checkouts_give_the_same_images", "takes many minutes: only with --full")?;
        return Ok(());
    }
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let folder = tempfile::tempdir()?;
    let other = folder.path().join("elsewhere");
    fs::create_dir(&other)?;
    let copy = "tar -C \"$0\" --exclude ./target --exclude ./.git -c . | tar -C \"$1\" -x";
    let copied = Command::new("sh").args(["-c", copy]).args([&ours, &other]).status()?;
    ensure!(copied.success(), "copy the checkout: {copied}");
    for checkout in [&ours, &other] {
        let mut images = Command::new("cargo");
        images.args(["xtask", "images", "proxy", "manager"]).current_dir(checkout);
        let built = images.env_remove("CARGO_TARGET_DIR").env_remove("RUSTC_BOOTSTRAP").status()?;
        ensure!(built.success(), "build images in {}: {built}", checkout.display());
    }
    for archive in ["ctrlmesh-proxy.tar", "ctrlmesh-manager.tar"] {
        let read = |root: &Path| fs::read(root.join("target/images").join(archive));
        let (one, other) = (read(&ours)?, read(&other)?);
        ensure!(one == other, "{archive} depends on the folder of its checkout");
        ensure!(one.len() < LARGEST_BYTES, "{archive} has {} bytes", one.len());
    }
    Ok(())
}

/// What is in an image, but for folders.
fn files(archive: &Path) -> Result<BTreeSet<String>> {
    let folder = tempfile::tempdir()?;
    let tar = |arguments: &[&OsStr]| -> Result<String> {
        let output = Command::new("tar").args(arguments).current_dir(&folder).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    };
    tar(&["-xf".as_ref(), archive.as_os_str()])?;
    let manifest = fs::read_to_string(folder.path().join("manifest.json"))?;
    let manifest: Value = serde_json::from_str(&manifest)?;
    let layers = manifest[0]["Layers"].as_array().context("no layers")?;
    let mut files = BTreeSet::new();
    for layer in layers {
        let listed = tar(&["-tf".as_ref(), layer.as_str().context("a layer")?.as_ref()])?;
        files.extend(listed.lines().filter(|line| !line.ends_with('/')).map(str::to_owned));
    }
    Ok(files)
}

#[test]
fn an_image_has_a_program_and_its_libraries_and_no_cas() -> Result<()> {
    let libraries = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-"];
    for (image, program, is_static) in [
        (Image::Proxy, "ctrlmesh-proxy", false),
        (Image::Manager, "ctrlmesh-manager", false),
        (Image::ExampleOperator, "example-operator", true),
    ] {
        let archives = images::build(&[image], true)?;
        let mut files = files(archives.first().context("no archive")?)?;
        ensure!(files.remove(program), "no {program} in {files:?}");
        let is_library = |file: &String| {
            let name = file.rsplit('/').next().unwrap_or_default();
            file.starts_with("lib") && libraries.iter().any(|one| name.starts_with(one))
        };
        ensure!(files.iter().all(is_library), "{program}: {files:?}");
        ensure!(files.is_empty() == is_static, "{program}: {files:?}");
    }
    Ok(())
}

#[test]
fn proxy_and_manager_start_as_nobody_on_a_read_only_root() -> Result<()> {
    let cluster = Cluster::shared();
    let ours = [Image::Proxy, Image::Manager];
    if let Some(node) = cluster.node() {
        for archive in images::build(&ours, true)? {
            node.load(&archive)?;
        }
    }
    cluster.case("images", |space| {
        for (pod, image) in ["proxy", "manager"].into_iter().zip(ours) {
            let said = run(space, pod, &image.name(), "[--version]")?;
            ensure!(said == format!("ctrlmesh-{pod} {}\n", env!("CARGO_PKG_VERSION")), "{said}");
        }
        Ok(())
    })
}

/// What tests have otherwise is not packed.
#[test]
fn an_image_that_is_packed_as_everybody_gets_it_runs() -> Result<()> {
    let cluster = Cluster::shared();
    if let Some(node) = cluster.node() {
        for archive in images::build(&[Image::ExampleOperator], false)? {
            node.load(&archive)?;
        }
    }
    cluster.case("packed", |space| {
        let said = run(space, "packed", &Image::ExampleOperator.name(), "[--help]")?;
        ensure!(said.contains("leader-elect"), "{said}");
        Ok(())
    })
}

#[test]
fn an_image_runs_as_a_user_that_nobody_else_is() -> Result<()> {
    Cluster::shared().case("nobody", |space| {
        let status = run(space, "nobody", &Image::Probe.name(), "[cat, /proc/self/status]")?;
        let of = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        ensure!(of("Uid:") == Some("\t65532\t65532\t65532\t65532"), "{status}");
        ensure!(of("CapBnd:") == Some("\t0000000000000000"), "{status}");
        Ok(())
    })
}

/// What a program says that runs once, in a pod as restricted as a namespace can ask for.
fn run(space: Space<'_>, pod: &str, image: &str, arguments: &str) -> Result<String> {
    let restricted = "pod-security.kubernetes.io/enforce=restricted";
    space.kubectl(&["label", "--overwrite", "namespace", space.name(), restricted])?;
    space.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {pod}}}\nspec:\n  restartPolicy: Never\n  \
         securityContext: {{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}}}\n  \
         containers:\n  - name: once\n    image: \"{image}\"\n    args: {arguments}\n    \
         securityContext: {{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, \
         capabilities: {{drop: [ALL]}}}}\n"
    ))?;
    space.wait(&format!("pod/{pod}"), "jsonpath={.status.phase}=Succeeded")?;
    space.kubectl(&["logs", pod])
}
