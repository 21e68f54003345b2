//! Writes where a release comes from, as an in-toto statement with SLSA's provenance. Pure. Nobody signs it here.

use serde_json::{Value, json};

use super::libraries::Package;
use crate::source::Source;

/// How it is built: the page of ours that this names says what the parameters mean.
const BUILD_TYPE: &str = "https://ctrlmesh.dev/docs/release/cargo-xtask-release/v1";

/// Whose word it is, where nobody else gives theirs: whoever ran the command.
pub(crate) const BUILDER: &str = "https://ctrlmesh.dev/docs/release/builder/by-hand";

/// What a release has, and what it was made with.
#[derive(Debug)]
pub(crate) struct Facts<'a> {
    pub(crate) version: &'a str,
    pub(crate) source: &'a Source,
    /// Who built it, a URI.
    pub(crate) builder: &'a str,
    /// Files and images, with the SHA-256 of each.
    pub(crate) subjects: &'a [(String, String)],
    pub(crate) platforms: &'a [&'static str],
    /// The lock files, with the SHA-256 of each: they have that of each crate.
    pub(crate) locks: &'a [(String, String)],
    pub(crate) packages: &'a [Package],
    /// Compilers and other tools, and what they say of their versions.
    pub(crate) tools: &'a [(&'static str, String)],
}

/// The statement.
pub(crate) fn statement(facts: &Facts<'_>) -> Value {
    let Facts { version, source, builder, subjects, platforms, locks, packages, tools } = facts;
    let digested = |(name, sha256): &(String, String)| json!({"name": name, "digest": {"sha256": sha256}});
    let subjects: Vec<Value> = subjects.iter().map(digested).collect();
    let commit = json!({"name": "ctrlmesh", "digest": {"gitCommit": source.commit}});
    let package = |package: &Package| json!({"uri": package.purl(), "digest": {"sha256": package.sha256}});
    let mut materials = vec![commit];
    materials.extend(locks.iter().map(digested));
    materials.extend(packages.iter().map(package));
    let tools: serde_json::Map<String, Value> =
        tools.iter().map(|(name, said)| ((*name).to_owned(), json!(said))).collect();
    json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"version": version, "commit": source.commit, "platforms": platforms},
                "internalParameters": {"SOURCE_DATE_EPOCH": source.seconds, "tools": tools},
                "resolvedDependencies": materials,
            },
            "runDetails": {"builder": {"id": builder}},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::Platform;

    #[test]
    fn each_artifact_is_a_subject_and_each_material_has_a_digest() {
        let source = Source::new("c0ffee", 7).unwrap();
        let packages = [Package {
            name: "libc6".to_owned(),
            version: "2.36".to_owned(),
            licence: None,
            platform: Platform::Amd64,
            sha256: "34".to_owned(),
        }];
        let statement = statement(&Facts {
            version: "1.0.0",
            source: &source,
            builder: BUILDER,
            subjects: &[("a.tgz".to_owned(), "12".to_owned())],
            platforms: &["amd64"],
            locks: &[("Cargo.lock".to_owned(), "56".to_owned())],
            packages: &packages,
            tools: &[("rustc", "1.95.0".to_owned())],
        });
        assert_eq!(statement["subject"], json!([{"name": "a.tgz", "digest": {"sha256": "12"}}]));
        let build = &statement["predicate"]["buildDefinition"];
        let materials = build["resolvedDependencies"].as_array().unwrap();
        assert_eq!(materials[0]["digest"]["gitCommit"], "c0ffee");
        assert!(materials.iter().all(|one| one["digest"].as_object().is_some_and(|digest| digest.len() == 1)));
        assert_eq!(materials[2]["uri"], "pkg:deb/debian/libc6@2.36?arch=amd64&distro=bookworm");
        assert_eq!(build["internalParameters"]["SOURCE_DATE_EPOCH"], 7);
        let times = ["startedOn", "finishedOn", "invocationId"];
        let text = statement.to_string();
        assert!(times.iter().all(|name| !text.contains(name)), "a second build would differ: {text}");
    }
}
