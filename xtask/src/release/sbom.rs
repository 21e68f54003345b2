//! Writes what an image is made of, as a bill of materials in the format of `CycloneDX`. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::crates::{Crate, Crates, Id};
use super::libraries::Package;
use crate::platform::Platform;
use crate::source::Source;

/// What is in an image of a platform.
#[derive(Debug)]
pub(crate) struct Contents<'a> {
    /// The image's whole name, with a tag.
    pub(crate) name: &'a str,
    pub(crate) platform: Platform,
    /// Of the image's manifest for this platform.
    pub(crate) manifest: &'a str,
    /// Of the program's file.
    pub(crate) program: &'a str,
    pub(crate) crates: &'a Crates,
    /// Of the kernel programs, where they are in the program.
    pub(crate) kernel: Option<&'a Crates>,
    pub(crate) packages: &'a [Package],
    /// The version of the compiler, whose standard library is in the program.
    pub(crate) rust: &'a str,
    pub(crate) source: &'a Source,
}

/// The bill of materials.
pub(crate) fn document(contents: &Contents<'_>) -> Value {
    let Contents { name, platform, manifest, source, .. } = contents;
    let (name, version) = name.rsplit_once(':').unwrap_or((name, ""));
    let short = name.rsplit('/').next().unwrap_or(name);
    let purl = format!("pkg:oci/{short}@sha256%3A{manifest}?arch={}&tag={version}", platform.name());
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": format!("urn:uuid:{}", identifier(manifest)),
        "version": 1,
        "metadata": {
            "timestamp": source.time,
            "tools": {"components": [{"type": "application", "name": "cargo xtask release", "version": version}]},
            "component": {
                "type": "container",
                "bom-ref": purl,
                "name": name,
                "version": version,
                "purl": purl,
                "hashes": hashes(manifest),
                "licenses": [{"expression": "Apache-2.0"}],
            },
            "properties": [{"name": "ctrlmesh:commit", "value": source.commit}],
        },
        "components": components(contents),
        "dependencies": dependencies(contents, &purl),
    })
}

fn components(contents: &Contents<'_>) -> Vec<Value> {
    let mut components = BTreeMap::new();
    for crates in [Some(contents.crates), contents.kernel].into_iter().flatten() {
        components.extend(crates.all.iter().map(|(id, one)| (reference(id), component(id, one))));
        set(&mut components, &crates.root, "type", json!("application"));
    }
    set(&mut components, &contents.crates.root, "hashes", hashes(contents.program));
    components.extend(contents.packages.iter().filter_map(|package| {
        let licence = package.licence?;
        let component = json!({
            "type": "library",
            "bom-ref": package.purl(),
            "name": package.name,
            "version": package.version,
            "purl": package.purl(),
            "hashes": hashes(&package.sha256),
            "licenses": [{"expression": licence}],
        });
        Some((package.purl(), component))
    }));
    let library = standard_library(contents.rust);
    components.insert(
        library.clone(),
        json!({
            "type": "library",
            "bom-ref": library,
            "name": "rust-std",
            "version": contents.rust,
            "purl": library,
            "licenses": [{"expression": "MIT OR Apache-2.0"}],
        }),
    );
    components.into_values().collect()
}

fn set(components: &mut BTreeMap<String, Value>, id: &Id, field: &str, value: Value) {
    if let Some(component) = components.get_mut(&reference(id)) {
        component[field] = value;
    }
}

fn component(id: &Id, one: &Crate) -> Value {
    let ((name, version), reference) = (id, reference(id));
    let mut component = json!({
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "purl": reference,
    });
    if !one.licence.is_empty() {
        component["licenses"] = json!([{"expression": one.licence}]);
    }
    if let Some(sha256) = &one.sha256 {
        component["hashes"] = hashes(sha256);
    }
    if !one.repository.is_empty() {
        component["externalReferences"] = json!([{"type": "vcs", "url": one.repository}]);
    }
    component
}

fn dependencies(contents: &Contents<'_>, image: &str) -> Vec<Value> {
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let program = reference(&contents.crates.root);
    let packages = contents.packages.iter().filter(|package| package.licence.is_some()).map(Package::purl);
    all.entry(image.to_owned()).or_default().extend([program.clone()].into_iter().chain(packages));
    for crates in [Some(contents.crates), contents.kernel].into_iter().flatten() {
        for (from, to) in &crates.links {
            all.entry(reference(from)).or_default().extend(to.iter().map(reference));
        }
    }
    let more = all.entry(program).or_default();
    more.insert(standard_library(contents.rust));
    more.extend(contents.kernel.map(|kernel| reference(&kernel.root)));
    all.into_iter().map(|(from, to)| json!({"ref": from, "dependsOn": to})).collect()
}

/// The crate's name among all packages of the world. Ours are not of crates.io, where others may take their names.
fn reference((name, version): &Id) -> String {
    let kind = if name == "ctrlmesh" || name.starts_with("ctrlmesh-") { "generic" } else { "cargo" };
    format!("pkg:{kind}/{name}@{version}")
}

fn standard_library(version: &str) -> String {
    format!("pkg:generic/rust-std@{version}")
}

fn hashes(sha256: &str) -> Value {
    json!([{"alg": "SHA-256", "content": sha256}])
}

/// A UUID (of version 8: by a way of our own) that follows from a digest, so that the same image has the same.
fn identifier(digest: &str) -> String {
    let part = |from: usize, to: usize| digest.get(from..to).unwrap_or_default();
    format!("{}-{}-8{}-a{}-{}", part(0, 8), part(8, 12), part(13, 16), part(17, 20), part(20, 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crates(root: &str, linked: &[(&str, Option<&str>)]) -> Crates {
        let id = |name: &str| (name.to_owned(), "1.0.0".to_owned());
        let one = |name: &str, sha256: Option<&str>| {
            let sha256 = sha256.map(str::to_owned);
            (id(name), Crate { licence: "MIT".to_owned(), repository: String::new(), sha256 })
        };
        let all = linked.iter().map(|(name, sha256)| one(name, *sha256)).chain([one(root, None)]).collect();
        let to: BTreeSet<Id> = linked.iter().map(|(name, _)| id(name)).collect();
        Crates { links: BTreeMap::from([(id(root), to)]), root: id(root), all }
    }

    fn made() -> Value {
        let source = Source::new("c0ffee", 1_700_000_000).unwrap();
        let with_texts = Package {
            name: "base-files".to_owned(),
            version: "12".to_owned(),
            licence: None,
            platform: Platform::Arm64,
            sha256: "90".to_owned(),
        };
        let library = Package {
            name: "libc6".to_owned(),
            version: "2.36-9+deb12u14".to_owned(),
            licence: Some("LGPL-2.1-or-later"),
            platform: Platform::Arm64,
            sha256: "56".to_owned(),
        };
        document(&Contents {
            name: "ctrlmesh.dev/proxy:1.0.0",
            platform: Platform::Arm64,
            manifest: "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            program: "78",
            crates: &crates("ctrlmesh-proxy", &[("rustls", Some("12")), ("ctrlmesh-common", None)]),
            kernel: Some(&crates("ctrlmesh-ebpf", &[("aya-ebpf", Some("34")), ("ctrlmesh-common", None)])),
            packages: &[library, with_texts],
            rust: "1.95.0",
            source: &source,
        })
    }

    #[test]
    fn all_that_is_in_the_image_is_listed_once_with_its_licence() {
        let document = made();
        let components = document["components"].as_array().unwrap();
        let field = |one: &Value, name: &str| one[name].as_str().unwrap().to_owned();
        let names: Vec<String> = components.iter().map(|one| field(one, "name")).collect();
        for name in ["aya-ebpf", "ctrlmesh-common", "ctrlmesh-ebpf", "ctrlmesh-proxy", "libc6", "rust-std", "rustls"] {
            assert_eq!(names.iter().filter(|one| *one == name).count(), 1, "{name}: {names:?}");
        }
        assert!(!names.contains(&"base-files".to_owned()), "images have texts of it alone");
        assert!(components.iter().all(|one| one["licenses"][0]["expression"].is_string() && one["purl"].is_string()));
        let by_name = |name: &str| components.iter().find(|one| one["name"] == name).unwrap();
        let sha256 = |name: &str| by_name(name)["hashes"][0]["content"].as_str().map(str::to_owned);
        let sums = ["rustls", "aya-ebpf", "libc6", "ctrlmesh-proxy", "ctrlmesh-common"].map(sha256);
        assert_eq!(sums, [Some("12"), Some("34"), Some("56"), Some("78"), None].map(|one| one.map(str::to_owned)));
        assert_eq!(by_name("rustls")["purl"], "pkg:cargo/rustls@1.0.0");
        assert_eq!(by_name("ctrlmesh-common")["purl"], "pkg:generic/ctrlmesh-common@1.0.0", "anybody can publish it");
    }

    #[test]
    fn from_the_image_everything_is_reached_by_dependencies() {
        let document = made();
        let mut due = vec![document["metadata"]["component"]["bom-ref"].clone()];
        let mut reached = BTreeSet::new();
        while let Some(reference) = due.pop() {
            reached.insert(reference.as_str().unwrap().to_owned());
            let all = document["dependencies"].as_array().unwrap();
            let of_it = all.iter().filter(|one| one["ref"] == reference);
            due.extend(of_it.flat_map(|one| one["dependsOn"].as_array().unwrap().clone()));
        }
        for component in document["components"].as_array().unwrap() {
            assert!(reached.contains(component["bom-ref"].as_str().unwrap()), "{component}");
        }
    }

    #[test]
    fn the_document_is_of_the_image_by_its_digest() {
        let document = made();
        let component = &document["metadata"]["component"];
        let purl = component["purl"].as_str().unwrap();
        assert!(purl.starts_with("pkg:oci/proxy@sha256%3A0123") && purl.ends_with("?arch=arm64&tag=1.0.0"), "{purl}");
        assert_eq!(document["serialNumber"], "urn:uuid:01234567-89ab-8def-a123-456789abcdef");
        assert_eq!(document["metadata"]["timestamp"], "2023-11-14T22:13:20Z");
    }
}
