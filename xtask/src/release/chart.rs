//! Packages the chart with its images by digest, and writes it as `helm push` would put it into a registry.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};

use super::chart_config::{Chart, go_json};
use crate::oci::{self, Layout};
use crate::run::run;
use crate::source::Source;

/// Helm's media types.
const CONFIG: &str = "application/vnd.cncf.helm.config.v1+json";
const CONTENT: &str = "application/vnd.cncf.helm.chart.content.v1.tar+gzip";

/// A packaged chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packaged {
    /// The package, `NAME-VERSION.tgz`.
    pub package: PathBuf,
    /// The archive of an OCI layout with it.
    pub layout: PathBuf,
    /// Of its manifest, in 64 hexadecimal digits: what `NAME@sha256:` is followed by.
    pub digest: String,
}

/// Packages the chart with these digests of its images, each a name in `values.yaml` and 64 hexadecimal digits, into
/// `out`. `scratch` is a folder to work in.
///
/// # Errors
/// Where Helm refuses the chart, it has no such image, or a file cannot be written.
pub fn package(helm: &Path, digests: &[(&str, &str)], source: &Source, scratch: &Path, out: &Path) -> Result<Packaged> {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(source.seconds);
    let folder = scratch.join("ctrlmesh");
    copy(&crate::chart::folder(), &folder)?;
    let values = folder.join("values.yaml");
    fs::write(&values, pinned(&fs::read_to_string(&values)?, digests)?)?;
    let readme = folder.join("README.md");
    fs::write(&readme, crate::chart::documented(&readme, &values)?)?;
    // Helm takes the times of the files along.
    set_times(&folder, time)?;
    let mut command = Command::new(helm);
    run(command.arg("package").arg(&folder).arg("--destination").arg(out))?;

    let chart = Chart::parse(&fs::read_to_string(folder.join("Chart.yaml"))?)?;
    let package = out.join(format!("{}-{}.tgz", chart.name()?, chart.version()?));
    // What `helm push` says of when it was made.
    File::options().write(true).open(&package)?.set_modified(time)?;
    let layout = out.join(format!("{}-chart-{}.oci.tar", chart.name()?, chart.version()?));
    let digest = write_layout(&chart, &package, source, scratch, &layout)?;
    Ok(Packaged { package, layout, digest })
}

/// Writes the layout; gives the digest of the manifest.
fn write_layout(chart: &Chart, package: &Path, source: &Source, scratch: &Path, archive: &Path) -> Result<String> {
    let layout = Layout::in_folder(scratch)?;
    let config = oci::described(CONFIG, &layout.add_text(&chart.config()?)?);
    let copied = scratch.join("package");
    fs::copy(package, &copied)?;
    let content = oci::described(CONTENT, &layout.add(&copied)?);
    let mut annotations = chart.annotations();
    annotations.insert("org.opencontainers.image.created", &source.time);
    let pair = |(name, value): (&&str, &&str)| Ok(format!("{}:{}", go_json(name)?, go_json(value)?));
    let annotations: Vec<String> = annotations.iter().map(pair).collect::<Result<_>>()?;
    let manifest = layout.add_text(&format!(
        r#"{{"schemaVersion":2,"config":{{{config}}},"layers":[{{{content}}}],"annotations":{{{}}}}}"#,
        annotations.join(",")
    ))?;
    let name = format!("ctrlmesh.dev/{}:{}", chart.name()?, chart.version()?);
    layout.finish(&oci::described(oci::MANIFEST, &manifest), &name, archive)?;
    Ok(manifest.digest)
}

/// The values with these digests in the place of empty ones.
fn pinned(values: &str, digests: &[(&str, &str)]) -> Result<String> {
    let (mut lines, mut group, mut image, mut done) = (Vec::new(), "", "", Vec::new());
    for line in values.lines() {
        match (line.len() - line.trim_start().len(), line.trim_end().strip_suffix(':')) {
            (0, Some(key)) => (group, image) = (key, ""),
            (2, Some(key)) => image = key.trim_start(),
            _ => {}
        }
        let digest = digests.iter().find(|(name, _)| group == "images" && *name == image);
        match digest {
            Some((name, digest)) if line == "    digest: \"\"" => {
                done.push(*name);
                lines.push(format!("    digest: \"sha256:{digest}\""));
            }
            _ => lines.push(line.to_owned()),
        }
    }
    if let Some((name, _)) = digests.iter().find(|(name, _)| !done.contains(name)) {
        bail!("values.yaml has no empty images.{name}.digest");
    }
    Ok(lines.join("\n") + "\n")
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("list {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

fn set_times(folder: &Path, time: SystemTime) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        ensure!(!path.is_symlink(), "{} is a link, which Helm does not take along", path.display());
        if path.is_dir() {
            set_times(&path, time)?;
        } else {
            File::options().write(true).open(path)?.set_modified(time)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_image_gets_its_digest() {
        let values = "images:\n  manager:\n    tag: \"\"\n    digest: \"\"\n  proxy:\n    digest: \"\"\n\
            other:\n  proxy:\n    digest: \"\"\n";
        let done = pinned(values, &[("proxy", "12")]).unwrap();
        assert_eq!(done, values.replacen("proxy:\n    digest: \"\"", "proxy:\n    digest: \"sha256:12\"", 1));
        let error = pinned(values, &[("proxy", "12"), ("cli", "34")]).unwrap_err().to_string();
        assert!(error.contains("no empty images.cli.digest"), "{error}");
    }

    #[test]
    fn every_image_of_the_chart_can_be_pinned() {
        let values = fs::read_to_string(crate::chart::folder().join("values.yaml")).unwrap();
        let names = super::super::programs::IMAGES.map(super::super::chart_name);
        let done = pinned(&values, &names.each_ref().map(|name| (name.as_str(), "12"))).unwrap();
        assert_eq!(done.matches("digest: \"sha256:12\"").count(), names.len());
        assert!(!done.contains("digest: \"\""), "an image of the chart is not of the release");
    }
}
