//! A release comes, is changed, goes back and goes; no program of ours runs.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::{ControlPlane, Options, until};
use serde_json::{Value, json};
use xtask::{chart, tools};

use crate::helm::{self, Helm, NAMESPACE, RELEASE, all_values, ask};

/// What a manager writes into the webhook configurations; any base64.
const BUNDLE: &str = "Y2VydGlmaWNhdGU=";

const WEBHOOKS: [&str; 2] = ["validatingwebhookconfiguration", "mutatingwebhookconfiguration"];

/// A release on a control plane of its own, whose controllers run.
struct Bed {
    plane: ControlPlane,
    helm: Helm,
}

impl Bed {
    fn start(release: &'static str) -> Result<Self> {
        let plane = ControlPlane::start(&Options { controller_manager: true, ..Options::default() })?;
        helm::with_prometheus_kinds(&plane)?;
        let helm = Helm::of(release, &plane);
        Ok(Self { plane, helm })
    }

    fn helm(&self, arguments: &[&str]) -> Result<String> {
        self.helm.run(&[arguments, &["--namespace", NAMESPACE]].concat())
    }

    fn get(&self, arguments: &[&str]) -> Result<Value> {
        helm::json(&self.plane, &[&["--namespace", NAMESPACE, "get"], arguments].concat())
    }

    fn install(&self) -> Result<String> {
        self.helm(&["install", RELEASE, &chart::folder().display().to_string(), "--create-namespace"])
    }

    /// What a manager writes.
    fn write_bundles(&self) -> Result<()> {
        for kind in WEBHOOKS {
            let hooks = self.get(&[kind, "ctrlmesh"])?["webhooks"].as_array().context("webhooks")?.len();
            let add =
                |hook| json!({"op": "add", "path": format!("/webhooks/{hook}/clientConfig/caBundle"), "value": BUNDLE});
            let patch = Value::Array((0..hooks).map(add).collect()).to_string();
            ask(&self.plane, &["patch", kind, "ctrlmesh", "--type=json", "--patch", &patch], "")?;
        }
        Ok(())
    }

    /// Refuses a webhook that has not what a manager wrote.
    fn bundles_stayed(&self) -> Result<()> {
        for kind in WEBHOOKS {
            let configuration = self.get(&[kind, "ctrlmesh"])?;
            for hook in configuration["webhooks"].as_array().context("webhooks")? {
                ensure!(hook["clientConfig"]["caBundle"] == BUNDLE, "{kind}: {hook}");
            }
        }
        Ok(())
    }

    /// Waits until the controller has given the aggregated role the rights on this resource.
    fn may_label(&self, resource: &str) -> Result<()> {
        until(&format!("the right to label {resource}"), || {
            let role = self.get(&["clusterrole", "ctrlmesh-manager-labels"])?;
            let mut rules = role["rules"].as_array().into_iter().flatten();
            Ok(rules.any(|rule| rule["resources"] == json!([resource])).then_some(()))
        })
    }

    fn replicas(&self) -> Result<Value> {
        Ok(self.get(&["deployment", "ctrlmesh-manager"])?["spec"]["replicas"].clone())
    }

    /// All objects of ours, of every kind that can be listed, by kind and name.
    fn ours(&self) -> Result<Vec<String>> {
        let kinds = ask(&self.plane, &["api-resources", "--verbs=list", "--output=name"], "")?;
        let kinds: Vec<&str> = kinds.lines().collect();
        let labelled = "--selector=app.kubernetes.io/part-of=ctrlmesh";
        let get = ["get", &kinds.join(","), "--all-namespaces", labelled, "--output=name"];
        Ok(ask(&self.plane, &get, "")?.lines().map(str::to_owned).collect())
    }
}

/// The name and UID of each definition of ours.
fn definitions(bed: &Bed) -> Result<Vec<(Value, Value)>> {
    let all = bed.get(&["crds"])?;
    let all = all["items"].as_array().context("definitions")?.iter().map(|one| &one["metadata"]);
    let ours = all.filter(|one| one["name"].as_str().is_some_and(|name| name.ends_with("ctrlmesh.kusionstack.io")));
    Ok(ours.map(|one| (one["name"].clone(), one["uid"].clone())).collect())
}

fn comes_changes_and_goes(release: &'static str) -> Result<()> {
    let bed = Bed::start(release)?;
    let notes = bed.install()?;
    ensure!(notes.contains("helm test ctrlmesh") && notes.contains("networkPolicy.apiServers"), "{notes}");
    let before = definitions(&bed)?;
    ensure!(before.len() == 4 && bed.replicas()? == 2, "{before:?}");
    bed.write_bundles()?;

    let folder = chart::folder().display().to_string();
    let values = all_values().display().to_string();
    // Helm made the namespace. With `keep`, the definitions stay in the end.
    let but = "namespace.create=false,crds.keep=true";
    bed.helm(&["upgrade", RELEASE, &folder, "--values", &values, "--set", but])?;
    ensure!(bed.replicas()? == 3, "{}", bed.replicas()?);
    bed.bundles_stayed()?;
    bed.may_label("configmaps")?;
    // Once more, now that a controller has written what the chart has, too.
    bed.helm(&["upgrade", RELEASE, &folder, "--values", &values, "--set", but])?;
    bed.bundles_stayed()?;
    bed.may_label("configmaps")?;

    bed.helm(&["rollback", RELEASE, "1"])?;
    ensure!(bed.replicas()? == 2, "{}", bed.replicas()?);
    bed.bundles_stayed()?;
    let extra = bed.get(&["clusterroles", "--selector=ctrlmesh.kusionstack.io/aggregate-to-labels=true"])?;
    ensure!(extra["items"] == json!([]), "{extra}");

    bed.helm(&["uninstall", RELEASE])?;
    nothing_is_left(&bed)?;
    ensure!(definitions(&bed)? == before, "{:?}", definitions(&bed)?);

    // What stayed is taken over.
    bed.install()?;
    ensure!(definitions(&bed)? == before, "{:?}", definitions(&bed)?);
    Ok(())
}

/// Waits until nothing of the release is there: neither an object of ours, nor one of Helm's.
fn nothing_is_left(bed: &Bed) -> Result<()> {
    until("nothing to be left", || {
        let ours = bed.ours()?;
        ensure!(ours.iter().all(|one| !one.starts_with("customresourcedefinition")), "labelled definitions: {ours:?}");
        let helms = bed.get(&["secrets", "--selector=owner=helm"])?;
        Ok((ours.is_empty() && helms["items"] == json!([])).then_some(()))
    })
}

#[test]
fn a_release_of_helm_3_leaves_only_the_definitions() {
    comes_changes_and_goes(tools::HELM_3).unwrap();
}

#[test]
fn a_release_of_helm_4_leaves_only_the_definitions() {
    comes_changes_and_goes(tools::HELM_4).unwrap();
}

#[test]
fn what_kubectl_installed_is_taken_over_on_request() {
    let take_over = |release| -> Result<()> {
        let bed = Bed::start(release)?;
        let deploy = chart::folder().join("..").display().to_string();
        ask(&bed.plane, &["apply", "--kustomize", &deploy], "")?;
        let folder = chart::folder().display().to_string();
        let install = ["install", RELEASE, &folder, "--take-ownership"];
        // What kubectl has applied is its own in the eyes of server-side apply.
        let force: &[&str] = if release == tools::HELM_4 { &["--force-conflicts"] } else { &[] };
        bed.helm(&[&install[..], force].concat())?;
        bed.helm(&["uninstall", RELEASE])?;
        until("only the namespace to be left", || Ok((bed.ours()? == [format!("namespace/{NAMESPACE}")]).then_some(())))
    };
    for release in tools::HELMS {
        take_over(release).unwrap();
    }
}
