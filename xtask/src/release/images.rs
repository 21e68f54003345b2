//! Writes the archive of an image for several platforms, which is pushed as it is: its digest is known before.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::images::{Image, LARGEST_BYTES};
use crate::oci::{self, About, Layout};
use crate::platform::Platform;
use crate::source::Source;

/// An archive of an image, and the digests in it: 64 hexadecimal digits each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageArchive {
    pub image: Image,
    /// Of the image: what `NAME@sha256:` is followed by.
    pub digest: String,
    /// Of its manifest for each platform.
    pub manifests: Vec<(Platform, String)>,
}

/// Writes an image whose files are in a folder for each platform; `scratch` is a folder to work in.
///
/// # Errors
/// Where a file cannot be written, or the image is larger than it may be.
pub fn write(
    image: Image,
    files: &[(Platform, &Path)],
    source: &Source,
    scratch: &Path,
    archive: &Path,
) -> Result<ImageArchive> {
    let layout = Layout::in_folder(scratch)?;
    let mut stored = Vec::new();
    for (platform, files) in files {
        let about = About {
            name: &image.name(),
            description: image.description(),
            entrypoint: &format!("/{}", image.program()),
            environment: image.environment(),
            local: false,
            platform: *platform,
            source: Some(source),
        };
        stored.push(layout.add_image(&about, files)?);
    }
    let index = layout.add_index(&stored)?;
    layout.finish(&oci::described_index(&index), &image.name(), archive)?;
    let (bytes, most) = (fs::metadata(archive)?.len(), LARGEST_BYTES * stored.len() as u64);
    ensure!(bytes <= most, "{bytes} bytes of {} are more than {most}", image.name());
    let manifests = stored.into_iter().map(|one| (one.platform, one.manifest.digest)).collect();
    Ok(ImageArchive { image, digest: index.digest, manifests })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use serde_json::Value;

    use super::*;

    /// Writes an image of a program for each platform in a new folder; gives what is said of it, and the archive.
    fn written(programs: [&str; 2], source: &Source) -> (tempfile::TempDir, ImageArchive, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let files = Platform::ALL.map(|platform| folder.path().join(platform.name()));
        for (files, program) in files.iter().zip(programs) {
            fs::create_dir_all(files).unwrap();
            fs::write(files.join("ctrlmesh-proxy"), program).unwrap();
        }
        let files: Vec<(Platform, &Path)> = Platform::ALL.into_iter().zip(files.iter().map(AsRef::as_ref)).collect();
        let archive = folder.path().join("archive.tar");
        let image = write(Image::Proxy, &files, source, folder.path(), &archive).unwrap();
        let bytes = fs::read(archive).unwrap();
        (folder, image, bytes)
    }

    /// The file that a descriptor leads to, whose digest and size are as the descriptor says.
    fn followed(layout: &Path, descriptor: &Value) -> Vec<u8> {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let file = layout.join("blobs/sha256").join(digest);
        let bytes = fs::read(&file).unwrap();
        assert_eq!(oci::sha256(&file).unwrap(), digest);
        assert_eq!(descriptor["size"].as_u64().unwrap(), bytes.len() as u64);
        bytes
    }

    #[test]
    fn from_the_index_a_way_leads_to_each_platforms_files() {
        let source = Source::new("c0ffee", 1_700_000_000).unwrap();
        let (folder, image, _) = written(["amd", "arm"], &source);
        let layout = folder.path().join("unpacked");
        fs::create_dir(&layout).unwrap();
        let unpack = |archive: &Path, into: &Path| {
            let tar = Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(into).status();
            assert!(tar.unwrap().success());
        };
        unpack(&folder.path().join("archive.tar"), &layout);
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let root = json(&fs::read(layout.join("index.json")).unwrap());
        assert_eq!(root["manifests"][0]["digest"], format!("sha256:{}", image.digest));
        let index = json(&followed(&layout, &root["manifests"][0]));
        for (at, (platform, program)) in Platform::ALL.into_iter().zip(["amd", "arm"]).enumerate() {
            let manifest = &index["manifests"][at];
            assert_eq!(manifest["platform"]["architecture"], platform.name());
            assert_eq!(manifest["digest"], format!("sha256:{}", image.manifests[at].1));
            let manifest = json(&followed(&layout, manifest));
            let config = json(&followed(&layout, &manifest["config"]));
            assert_eq!(config["architecture"], platform.name());
            assert_eq!(config["created"], "2023-11-14T22:13:20Z");
            assert_eq!(config["config"]["Labels"]["org.opencontainers.image.revision"], "c0ffee");
            let layer = folder.path().join("layer");
            fs::write(&layer, followed(&layout, &manifest["layers"][0])).unwrap();
            let into = folder.path().join(format!("of-{}", platform.name()));
            fs::create_dir(&into).unwrap();
            unpack(&layer, &into);
            assert_eq!(fs::read_to_string(into.join("ctrlmesh-proxy")).unwrap(), program);
        }
    }

    #[test]
    fn another_folder_gives_the_same_bytes_but_not_another_commit() {
        let source = Source::new("c0ffee", 1).unwrap();
        let (_one, image, bytes) = written(["amd", "arm"], &source);
        let (_two, same, again) = written(["amd", "arm"], &source);
        assert!(image == same && bytes == again);
        let (_three, other, _) = written(["amd", "arm"], &Source::new("decaf", 1).unwrap());
        assert_ne!(image.digest, other.digest);
    }
}
