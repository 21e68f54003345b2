//! What Helm makes of the chart without a cluster.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use xtask::chart;
use xtask::tools::HELMS;

use crate::helm::{Helm, NAMESPACE, RELEASE, all_values};

/// The documents of a text without empty lines at their ends, in any order: versions of Helm differ in both.
fn documents(text: &str) -> BTreeSet<String> {
    text.split("---\n").map(|one| one.trim().to_owned()).collect()
}

#[test]
fn lint_finds_nothing_with_default_and_with_all_values() {
    let folder = chart::folder().display().to_string();
    let values = all_values().display().to_string();
    for release in HELMS {
        for more in [&[][..], &["--values", &values]] {
            let lint = ["lint", "--strict", &folder, "--namespace", NAMESPACE];
            Helm::alone(release).run(&[&lint[..], more].concat()).unwrap();
        }
    }
}

#[test]
fn the_manifests_in_deploy_are_the_rendered_chart() {
    for release in HELMS {
        let manifests = chart::manifests(&Helm::alone(release).program()).unwrap();
        assert!(manifests.len() > 10, "{}", manifests.len());
        for manifest in manifests {
            let there = fs::read_to_string(&manifest.path).unwrap_or_default();
            let path = manifest.path.display();
            let is_current = documents(&there) == documents(&manifest.text);
            assert!(is_current, "{path} is not what helm {release} renders: run `cargo xtask chart`");
        }
    }
}

#[test]
fn another_namespace_is_refused_with_a_reason() {
    let folder = chart::folder().display().to_string();
    for release in HELMS {
        let said = Helm::alone(release).refusal(&["template", RELEASE, &folder, "--namespace", "other"]).unwrap();
        assert!(said.contains("in namespace ctrlmesh-system only, and not in other"), "{said}");
    }
}

#[test]
fn wrong_values_are_refused_by_the_name_of_their_field() {
    let wrong = [
        ("manager.replica=3", "replica"),
        ("manager.replicas=0", "/manager/replicas"),
        ("manager.replicas=two", "/manager/replicas"),
        ("images.proxy.digest=sha256:12", "/images/proxy/digest"),
        ("images.pullPolicy=Sometimes", "/images/pullPolicy"),
        ("manager.podLabels.app\\.kubernetes\\.io/name=x", "/manager/podLabels"),
        ("webhooks.inject.failurePolicy=Open", "/webhooks/inject/failurePolicy"),
        ("webhooks.timeoutSeconds=31", "/webhooks/timeoutSeconds"),
        ("networkPolicy.apiServers={api.example.com}", "/networkPolicy/apiServers/0"),
        ("extraKinds[0].apiGroup=apps", "/extraKinds/0"),
        ("node.extraArgs={verbose}", "/node/extraArgs/0"),
        ("crds.keep=maybe", "/crds/keep"),
        ("test.namespace=kube-system", "/test/namespace"),
    ];
    let folder = chart::folder().display().to_string();
    for release in HELMS {
        let helm = Helm::alone(release);
        for (value, field) in wrong {
            let arguments = ["template", RELEASE, &folder, "--namespace", NAMESPACE, "--set", value];
            let said = helm.refusal(&arguments).unwrap();
            assert!(said.contains("schema") && said.contains(field), "{value}: {said}");
        }
    }
}

/// The path of each value that is no mapping, and the value.
fn leaves(value: &Value, path: &str, into: &mut Vec<(String, Value)>) {
    match value.as_object() {
        Some(fields) if !fields.is_empty() => {
            for (name, field) in fields {
                leaves(field, &format!("{path}.{name}"), into);
            }
        }
        _ => into.push((path.to_owned(), value.clone())),
    }
}

fn by_path<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').skip(1).try_fold(value, |value, name| value.get(name))
}

#[test]
fn the_file_with_all_values_sets_every_value() -> Result<()> {
    let read = |text: String| -> Result<Value> { Ok(serde_saphyr::from_str(&text)?) };
    let defaults = read(fs::read_to_string(chart::folder().join("values.yaml"))?)?;
    let all = read(fs::read_to_string(all_values())?)?;
    // Keys that have a dot in them, and what must stay as it is for the rest to be seen.
    let kept = ["kubernetes.io/os", ".networkPolicy.enabled", ".crds.install", "grafana_dashboard"];
    let mut found = Vec::new();
    leaves(&defaults, "", &mut found);
    for (path, default) in found {
        if kept.iter().any(|kept| path.contains(kept)) || default.is_array() && by_path(&all, &path).is_none() {
            ensure!(kept.iter().any(|kept| path.contains(kept)), "{path} is not set");
            continue;
        }
        let value = by_path(&all, &path).with_context(|| format!("{path} is not set"))?;
        ensure!(*value != default, "{path} has its default");
    }
    Ok(())
}
