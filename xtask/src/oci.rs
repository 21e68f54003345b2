//! Writes images: a program and its files, as one archive that containerd, podman, skopeo and `docker load` all read.
//!
//! The archive is an OCI layout, with the list that `docker load` wants beside it where it has one image. The same
//! files give the same bytes: names are sorted, and there is no owner and no name of a machine in it, nor a time but
//! that of the source.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::platform::Platform;
use crate::source::Source;

/// Who runs the program: nobody that any machine knows.
const USER: &str = "65532:65532";

/// The media types of the OCI image format.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const PACKED_LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// What an image says of itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About<'a> {
    /// Its whole name, with a tag.
    pub(crate) name: &'a str,
    /// One sentence.
    pub(crate) description: &'a str,
    /// The program that it runs, a path in the image.
    pub(crate) entrypoint: &'a str,
    /// The program's variables, each `NAME=value`.
    pub(crate) environment: &'a [&'a str],
    /// Whether it is for this machine only: its layer is then stored as it is, which is large, and nobody packs and
    /// unpacks it.
    pub(crate) local: bool,
    /// What its files were built for.
    pub(crate) platform: Platform,
    /// What they were built from, where that is a commit.
    pub(crate) source: Option<&'a Source>,
}

/// A file by its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blob {
    /// SHA-256, in hexadecimal digits.
    pub(crate) digest: String,
    pub(crate) bytes: u64,
}

/// An image of one platform, in a layout.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) platform: Platform,
    config: Blob,
    layer: Blob,
    pub(crate) manifest: Blob,
}

/// A layout in the making: a folder of blobs.
#[derive(Debug)]
pub(crate) struct Layout {
    folder: PathBuf,
    scratch: PathBuf,
}

/// Writes the archive of an image whose files are those under `files`; `scratch` is a folder to work in.
///
/// # Errors
/// Where a file cannot be written, or tar, gzip or sha256sum fails.
pub(crate) fn write(about: &About<'_>, files: &Path, scratch: &Path, archive: &Path) -> Result<()> {
    let layout = Layout::in_folder(scratch)?;
    let Stored { config, layer, manifest, .. } = layout.add_image(about, files)?;
    fs::write(layout.folder.join("manifest.json"), docker(about.name, &config, &layer))?;
    layout.finish(&described(MANIFEST, &manifest), about.name, archive)
}

impl Layout {
    /// An empty one, in a folder to work in.
    ///
    /// # Errors
    /// Where the folder cannot be written.
    pub(crate) fn in_folder(scratch: &Path) -> Result<Self> {
        let folder = scratch.join("layout");
        fs::create_dir_all(folder.join("blobs/sha256"))?;
        Ok(Self { folder, scratch: scratch.to_owned() })
    }

    /// Adds an image of one platform.
    ///
    /// # Errors
    /// Where a file cannot be written, or tar, gzip or sha256sum fails.
    pub(crate) fn add_image(&self, about: &About<'_>, files: &Path) -> Result<Stored> {
        let layer = self.scratch.join("layer.tar");
        tar(files, &layer, 0)?;
        let unpacked = sha256(&layer)?;
        let config = self.add_text(&config(about, &unpacked))?;
        let (kind, layer) = if about.local {
            (LAYER, self.add_as(&layer, unpacked)?)
        } else {
            let packed = self.scratch.join("layer.gz");
            gzip(&layer, &packed)?;
            (PACKED_LAYER, self.add(&packed)?)
        };
        let manifest = self.add_text(&manifest(&config, kind, &layer))?;
        Ok(Stored { platform: about.platform, config, layer, manifest })
    }

    /// Adds the list of images of one name for several platforms; its digest is that of the name.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(crate) fn add_index(&self, images: &[Stored]) -> Result<Blob> {
        let image = |image: &Stored| {
            let (manifest, platform) = (described(MANIFEST, &image.manifest), image.platform.name());
            format!(r#"{{{manifest},"platform":{{"architecture":"{platform}","os":"linux"}}}}"#)
        };
        let images: Vec<String> = images.iter().map(image).collect();
        self.add_text(&format!(r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{}]}}"#, images.join(",")))
    }

    /// Adds a text.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(crate) fn add_text(&self, text: &str) -> Result<Blob> {
        let file = self.scratch.join("text");
        fs::write(&file, text)?;
        self.add(&file)
    }

    /// Moves a file to where its content says.
    ///
    /// # Errors
    /// Where it cannot be read or moved.
    pub(crate) fn add(&self, file: &Path) -> Result<Blob> {
        self.add_as(file, sha256(file)?)
    }

    /// The same for a file whose digest is known.
    fn add_as(&self, file: &Path, digest: String) -> Result<Blob> {
        let bytes = fs::metadata(file)?.len();
        fs::rename(file, self.folder.join("blobs/sha256").join(&digest))?;
        Ok(Blob { digest, bytes })
    }

    /// Writes the archive; `root` describes what it has under this name.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(crate) fn finish(&self, root: &str, name: &str, archive: &Path) -> Result<()> {
        fs::write(self.folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
        fs::write(self.folder.join("index.json"), index(name, root))?;
        tar(&self.folder, archive, 0)
    }
}

/// What describes an image of several platforms.
pub(crate) fn described_index(index: &Blob) -> String {
    described(INDEX, index)
}

fn config(about: &About<'_>, layer: &str) -> String {
    let About { name, description, entrypoint, environment, platform, source, .. } = about;
    let environment: Vec<_> = environment.iter().map(|variable| format!("\"{variable}\"")).collect();
    let environment = environment.join(",");
    let (title, version) = name.rsplit_once(':').unwrap_or((name, ""));
    let title = title.rsplit('/').next().unwrap_or(title);
    let architecture = platform.name();
    let created = source.map(|source| format!(r#""created":"{}","#, source.time)).unwrap_or_default();
    let revision = source.map(|source| format!(r#""org.opencontainers.image.revision":"{}","#, source.commit));
    let revision = revision.unwrap_or_default();
    format!(
        r#"{{{created}"architecture":"{architecture}","os":"linux","config":{{"User":"{USER}","Env":[{environment}],"Entrypoint":["{entrypoint}"],"WorkingDir":"/","Labels":{{"org.opencontainers.image.description":"{description}","org.opencontainers.image.licenses":"Apache-2.0",{revision}"org.opencontainers.image.title":"{title}","org.opencontainers.image.version":"{version}"}}}},"rootfs":{{"type":"layers","diff_ids":["sha256:{layer}"]}},"history":[{{{created}"created_by":"cargo xtask images"}}]}}"#
    )
}

fn manifest(config: &Blob, kind: &str, layer: &Blob) -> String {
    let config = described(CONFIG, config);
    let layer = described(kind, layer);
    format!(r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{{{config}}},"layers":[{{{layer}}}]}}"#)
}

fn index(name: &str, root: &str) -> String {
    let tag = name.rsplit(':').next().unwrap_or_default();
    format!(
        r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{{{root},"annotations":{{"io.containerd.image.name":"{name}","org.opencontainers.image.ref.name":"{tag}"}}}}]}}"#
    )
}

/// What `docker load` reads.
fn docker(name: &str, config: &Blob, layer: &Blob) -> String {
    let (config, layer) = (&config.digest, &layer.digest);
    format!(r#"[{{"Config":"blobs/sha256/{config}","RepoTags":["{name}"],"Layers":["blobs/sha256/{layer}"]}}]"#)
}

pub(crate) fn described(media_type: &str, blob: &Blob) -> String {
    let Blob { digest, bytes } = blob;
    format!(r#""mediaType":"{media_type}","digest":"sha256:{digest}","size":{bytes}"#)
}

/// Packs a folder so that only names, modes and contents count; all of it is said to be of this time, in seconds since
/// 1970.
///
/// # Errors
/// Where tar fails.
pub(crate) fn tar(folder: &Path, archive: &Path, time: u64) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--create", "--format=ustar", "--sort=name"])
        .arg(format!("--mtime=@{time}"))
        .args(["--owner=0", "--group=0", "--numeric-owner", "--mode=u=rwX,go=rX"])
        .arg("--directory")
        .arg(folder)
        .arg("--file")
        .arg(archive);
    let mut names: Vec<_> = fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
    names.sort();
    let status = tar.arg("--").args(names).status().context("start tar")?;
    ensure!(status.success(), "tar: {status}");
    Ok(())
}

/// Compresses a file; neither its name nor a time gets into the other.
///
/// # Errors
/// Where gzip fails.
pub(crate) fn gzip(file: &Path, packed: &Path) -> Result<()> {
    pipe(Command::new("gzip").args(["-9", "-n", "-c"]).arg(file), packed)
}

/// The SHA-256 of a file, in hexadecimal digits.
///
/// # Errors
/// Where it cannot be read.
pub(crate) fn sha256(file: &Path) -> Result<String> {
    let output = Command::new("sha256sum")
        .stdin(File::open(file)?)
        .stderr(Stdio::inherit())
        .output()
        .context("start sha256sum")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let digest = text.split(' ').next().unwrap_or_default();
    ensure!(output.status.success() && digest.len() == 64, "sha256sum: {}", output.status);
    Ok(digest.to_owned())
}

/// Runs `command`, its output going to a file.
fn pipe(command: &mut Command, file: &Path) -> Result<()> {
    let name = command.get_program().to_owned();
    let status = command.stdout(File::create(file)?).status().context("start a program")?;
    ensure!(status.success(), "{}: {status}", OsStr::new(&name).display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about<'a>(name: &'a str, entrypoint: &'a str, environment: &'a [&'a str], local: bool) -> About<'a> {
        let (platform, source) = (Platform::of_machine().unwrap(), None);
        About { name, description: "d", entrypoint, environment, local, platform, source }
    }

    /// Writes an image of one program in a folder of its own, and gives the archive.
    fn image(name: &str, program: &str, local: bool) -> Vec<u8> {
        let folder = std::env::temp_dir().join(format!("ctrlmesh-oci-{}-{name}", std::process::id()));
        fs::create_dir_all(folder.join("files/bin")).unwrap();
        fs::write(folder.join("files/bin/program"), program).unwrap();
        fs::write(folder.join("files/another"), "file").unwrap();
        let name = "example.org/a/program:1.2";
        let about = about(name, "/bin/program", &[], local);
        write(&about, &folder.join("files"), &folder, &folder.join("archive")).unwrap();
        let bytes = fs::read(folder.join("archive")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        bytes
    }

    #[test]
    fn the_same_files_give_the_same_bytes_and_others_do_not() {
        let one = image("one", "binary", false);
        assert!(one == image("another", "binary", false), "the time or the folder is in the archive");
        assert!(one != image("different", "bynary", false));
    }

    #[test]
    fn an_image_says_what_it_is_and_runs_as_nobody() {
        let (name, environment) = ("example.org/a/program:1.2", &["A=1", "B=2"][..]);
        let about = about(name, "/program", environment, false);
        let config = config(&about, "0");
        let labels = [("description", "d"), ("licenses", "Apache-2.0"), ("title", "program"), ("version", "1.2")];
        let labels = labels.map(|(name, value)| format!(r#""org.opencontainers.image.{name}":"{value}""#));
        let runs = r#""User":"65532:65532","Env":["A=1","B=2"],"Entrypoint":["/program"]"#.to_owned();
        for said in labels.into_iter().chain([runs]) {
            assert!(config.contains(&said), "{said}: {config}");
        }
    }

    #[test]
    fn what_is_read_by_its_digest_has_that_digest() {
        for (local, kind) in [(true, LAYER), (false, PACKED_LAYER)] {
            let folder = std::env::temp_dir().join(format!("ctrlmesh-oci-{}-{local}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            let archive = image(&format!("digests-{local}"), "binary", local);
            fs::write(folder.join("archive"), archive).unwrap();
            let tar = Command::new("tar").args(["-xf", "archive"]).current_dir(&folder).status();
            assert!(tar.unwrap().success());
            let mut texts = Vec::new();
            for blob in fs::read_dir(folder.join("blobs/sha256")).unwrap() {
                let path = blob.unwrap().path();
                assert_eq!(path.file_name().unwrap().to_str().unwrap(), sha256(&path).unwrap());
                texts.extend(fs::read_to_string(&path));
            }
            // A layer that is packed is no text.
            assert_eq!(texts.len(), if local { 3 } else { 2 }, "configuration, manifest and layer");
            let said = format!(r#""layers":[{{"mediaType":"{kind}","digest""#);
            assert!(texts.iter().any(|text| text.contains(&said)), "{texts:?}");
            let index = fs::read_to_string(folder.join("index.json")).unwrap();
            assert!(index.contains(r#""io.containerd.image.name":"example.org/a/program:1.2""#));
            fs::remove_dir_all(&folder).unwrap();
        }
    }
}
