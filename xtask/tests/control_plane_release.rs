//! What a release publishes, in a real registry: the chart as Helm pushes and pulls it, and images for two platforms.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use xtask::images::Image;
use xtask::platform::Platform;
use xtask::release::{chart, images};
use xtask::source::Source;
use xtask::{helm, tools};

/// Our version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Digests of images that nobody has.
const DIGESTS: [(&str, &str); 3] = [
    ("proxy", "1111111111111111111111111111111111111111111111111111111111111111"),
    ("manager", "2222222222222222222222222222222222222222222222222222222222222222"),
    ("cli", "3333333333333333333333333333333333333333333333333333333333333333"),
];

/// A registry on loopback, which ends with this.
struct Registry {
    process: Child,
    address: String,
    folder: tempfile::TempDir,
}

impl Registry {
    fn start() -> Result<Self> {
        let mut serve = crane(&["registry", "serve", "--address", "127.0.0.1:0"]);
        let mut process = serve.stderr(Stdio::piped()).spawn().context("start crane")?;
        let mut said = BufReader::new(process.stderr.take().context("what the registry says")?).lines();
        let port = loop {
            let line = said.next().context("the registry does not say where it is")??;
            if let Some((_, port)) = line.split_once("serving on port ") {
                break port.trim().to_owned();
            }
        };
        // It goes on to say what it is asked for; nobody else may keep it from that.
        std::thread::spawn(move || said.map_while(Result::ok).for_each(drop));
        Ok(Self { process, address: format!("127.0.0.1:{port}"), folder: tempfile::tempdir()? })
    }

    /// Unpacks the archive of a layout.
    fn unpacked(&self, archive: &Path) -> Result<PathBuf> {
        let name = archive.file_name().context("the name of an archive")?;
        let folder = self.folder.path().join("layouts").join(name);
        fs::create_dir_all(&folder)?;
        said(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&folder))?;
        Ok(folder)
    }

    /// Pushes the archive of a layout under a name; gives what the registry then has, by its digest.
    fn push(&self, archive: &Path, name: &str) -> Result<String> {
        let layout = self.unpacked(archive)?.display().to_string();
        let pushed = said(&mut crane(&["push", &layout, &format!("{}/{name}", self.address)]))?;
        Ok(pushed.trim().rsplit("sha256:").next().unwrap_or_default().to_owned())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // Where it has ended by itself, there is nothing to end.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

impl Registry {
    /// What this version of Helm prints; it has a home in the registry's folder, and knows no cluster.
    fn helm(&self, release: &str, arguments: &[&str]) -> Result<String> {
        let mut helm = helm::command(release, &self.folder.path().join("helm").join(release), None);
        // Helm says of a package when it was made, in the time of the machine.
        said(helm.args(arguments).env("TZ", "UTC"))
    }
}

fn crane(arguments: &[&str]) -> Command {
    let mut crane = Command::new(tools::crane());
    crane.args(arguments);
    crane
}

fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("start {}", command.get_program().display()))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Packages the chart in a new folder.
fn packaged(commit: &str) -> Result<(tempfile::TempDir, chart::Packaged)> {
    let folder = tempfile::tempdir()?;
    let [scratch, out] = ["scratch", "out"].map(|name| folder.path().join(name));
    for folder in [&scratch, &out] {
        fs::create_dir(folder)?;
    }
    let source = Source::new(commit, 1_700_000_000)?;
    let chart = chart::package(&tools::helm(tools::HELM_4), &DIGESTS, &source, &scratch, &out)?;
    Ok((folder, chart))
}

#[test]
fn a_chart_packaged_twice_is_the_same_bytes() -> Result<()> {
    let ((_one, first), (_two, second)) = (packaged("c0ffee")?, packaged("c0ffee")?);
    assert_eq!(first.digest, second.digest);
    assert!(fs::read(first.package)? == fs::read(second.package)?);
    assert!(fs::read(first.layout)? == fs::read(second.layout)?);
    Ok(())
}

#[test]
fn the_layout_of_the_chart_is_what_helm_pushes() -> Result<()> {
    let (registry, (_folder, chart)) = (Registry::start()?, packaged("c0ffee")?);
    let address = &registry.address;
    assert_eq!(registry.push(&chart.layout, "ours/ctrlmesh:1")?, chart.digest);
    for (at, release) in tools::HELMS.into_iter().enumerate() {
        let package = chart.package.display().to_string();
        registry.helm(release, &["push", &package, &format!("oci://{address}/helm-{at}"), "--plain-http"])?;
        let name = format!("{address}/helm-{at}/ctrlmesh:{VERSION}");
        let theirs = said(&mut crane(&["manifest", &name]))?;
        let ours = said(&mut crane(&["manifest", &format!("{address}/ours/ctrlmesh:1")]))?;
        assert_eq!(theirs, ours, "helm {release}");
    }
    Ok(())
}

#[test]
fn helm_installs_the_images_of_the_release_by_digest() -> Result<()> {
    let (registry, (_folder, chart)) = (Registry::start()?, packaged("c0ffee")?);
    registry.push(&chart.layout, &format!("charts/ctrlmesh:{VERSION}"))?;
    let name = format!("oci://{}/charts/ctrlmesh", registry.address);
    let by_digest = format!("{name}@sha256:{}", chart.digest);
    for release in tools::HELMS {
        let shown = registry.helm(release, &["show", "chart", &name, "--version", VERSION, "--plain-http"])?;
        assert!(shown.contains("name: ctrlmesh\n"), "{shown}");
        let text = registry
            .helm(release, &["template", "ctrlmesh", &by_digest, "--plain-http", "--namespace", "ctrlmesh-system"])?;
        for (image, digest) in DIGESTS {
            assert!(text.contains(&format!("ctrlmesh.dev/{image}@sha256:{digest}")), "helm {release}: {image}");
        }
        assert!(!text.contains(&format!(":{VERSION}\"")), "an image by its tag");
        let into = registry.folder.path().join(release);
        fs::create_dir(&into)?;
        registry.helm(release, &["pull", &by_digest, "--plain-http", "--destination", &into.display().to_string()])?;
        let pulled = fs::read_dir(&into)?.next().context("what was pulled")??.path();
        assert!(fs::read(pulled)? == fs::read(&chart.package)?, "helm {release} pulled another package");
    }
    Ok(())
}

#[test]
fn an_image_is_pushed_and_pulled_for_each_platform() -> Result<()> {
    let registry = Registry::start()?;
    let folder = registry.folder.path();
    let mut files = Vec::new();
    for platform in Platform::ALL {
        let of_it = folder.join(platform.name());
        fs::create_dir(&of_it)?;
        fs::write(of_it.join("ctrlmesh-proxy"), format!("for {}", platform.name()))?;
        files.push((platform, of_it));
    }
    let files: Vec<(Platform, &Path)> = files.iter().map(|(platform, folder)| (*platform, folder.as_path())).collect();
    let archive = folder.join("proxy.tar");
    let scratch = folder.join("scratch");
    fs::create_dir(&scratch)?;
    let image = images::write(Image::Proxy, &files, &Source::new("c0ffee", 1)?, &scratch, &archive)?;
    assert_eq!(registry.push(&archive, "proxy:1")?, image.digest, "the registry has other bytes");
    let name = format!("{}/proxy@sha256:{}", registry.address, image.digest);
    said(&mut crane(&["validate", "--remote", &name]))?;
    for (platform, manifest) in image.manifests {
        let on = format!("--platform=linux/{}", platform.name());
        assert_eq!(said(&mut crane(&["digest", &on, &name]))?.trim(), format!("sha256:{manifest}"));
        let exported = folder.join("exported.tar");
        said(&mut crane(&["export", &on, &name, &exported.display().to_string()]))?;
        let program = said(Command::new("tar").args(["-xOf"]).arg(&exported).arg("ctrlmesh-proxy"))?;
        assert_eq!(program, format!("for {}", platform.name()));
    }
    Ok(())
}
