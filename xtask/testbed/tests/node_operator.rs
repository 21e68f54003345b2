//! An ordinary operator on a real node without ctrlmesh: the reference for the same operator with it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{LazyLock, Mutex};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_testbed::audit_log::AuditEvent;
use ctrlmesh_testbed::{Cluster, KUBECONFIG, Space, skipped, until};
use serde_json::Value;
use xtask::images::{self, Image};

/// Where it is deployed to.
const NAMESPACE: &str = "example-operator";

/// Held by tests that change, or look at, which pods the operator has.
static PODS: Mutex<()> = Mutex::new(());

/// What its requests are made as.
const USER: &str = "system:serviceaccount:example-operator:example-operator";

/// The cluster, with the operator deployed as its README says.
fn cluster() -> &'static Cluster {
    static DEPLOYED: LazyLock<Result<()>> = LazyLock::new(|| deploy(Cluster::shared()));
    DEPLOYED.as_ref().unwrap_or_else(|error| panic!("{error:?}"));
    Cluster::shared()
}

fn deploy(cluster: &Cluster) -> Result<()> {
    if let Some(node) = cluster.node() {
        for archive in images::build(&[Image::ExampleOperator], true)? {
            node.load(&archive)?;
        }
    }
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/example-operator/config");
    let mut apply = cluster.kubectl();
    apply.args(["apply", "--kustomize"]).arg(config.join("default"));
    ensure!(apply.status()?.success(), "apply the operator's manifests");
    let mut wait = cluster.kubectl();
    wait.args(["--namespace", NAMESPACE, "rollout", "status", "deployment/example-operator"]);
    ensure!(wait.arg("--timeout=300s").status()?.success(), "the operator does not become ready");
    Ok(())
}

/// kubectl in the operator's own namespace.
fn own(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    let output = cluster.kubectl().args(["--namespace", NAMESPACE]).args(arguments).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn website(name: &str, pages: u32) -> String {
    format!(
        "apiVersion: web.example.com/v1alpha1\nkind: Website\nmetadata: {{name: {name}}}\n\
         spec: {{title: Hello, pages: {pages}}}\n"
    )
}

/// The names of the pages of all websites in the namespace.
fn pages(space: Space<'_>) -> Result<BTreeSet<String>> {
    let names = space.kubectl(&["get", "configmaps", "-l", "web.example.com/site", "-o", "name"])?;
    Ok(names.lines().map(|name| name.trim_start_matches("configmap/").to_owned()).collect())
}

fn names(site: &str, count: u32) -> BTreeSet<String> {
    (0..count).map(|number| format!("{site}-page-{number}")).collect()
}

#[test]
fn the_operator_makes_reports_and_cleans_up_its_objects() -> Result<()> {
    cluster().case("reconciles", |space| {
        for count in [3, 5, 1] {
            space.apply(&website("hello", count))?;
            space.wait("website/hello", &format!("jsonpath={{.status.pages}}={count}"))?;
            space.wait("website/hello", "condition=Published")?;
            until("its pages", || Ok((pages(space)? == names("hello", count)).then_some(())))?;
        }
        let page = space.kubectl(&["get", "configmap", "hello-page-0", "-o", "json"])?;
        let page: Value = serde_json::from_str(&page)?;
        ensure!(page["data"]["index.html"] == "<h1>Hello</h1><p>page 0</p>\n", "{page}");
        ensure!(page["metadata"]["ownerReferences"][0]["name"] == "hello", "{page}");
        // What is taken from it comes back.
        space.kubectl(&["delete", "configmap", "hello-page-0"])?;
        until("the page", || Ok((pages(space)? == names("hello", 1)).then_some(())))?;
        space.kubectl(&["delete", "website", "hello", "--timeout=300s"])?;
        ensure!(pages(space)?.is_empty(), "the finalizer let it go with its pages");
        let events = until("events", || {
            let events = space.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"])?;
            Ok((events.contains("Published") && events.contains("Unpublished")).then_some(events))
        });
        events.map(drop)
    })
}

#[test]
fn one_replica_works_and_when_it_ends_another_takes_over() -> Result<()> {
    let cluster = cluster();
    let _alone = lock(&PODS);
    cluster.case("leader", |space| {
        own(cluster, &["scale", "deployment/example-operator", "--replicas=2"])?;
        own(cluster, &["rollout", "status", "deployment/example-operator", "--timeout=300s"])?;
        let holder = || -> Result<Option<String>> {
            let path = "jsonpath={.spec.holderIdentity}";
            let get = ["get", "lease", "websites.web.example.com", "--ignore-not-found", "-o", path];
            let holder = own(cluster, &get)?;
            Ok(holder.split('_').next().filter(|pod| !pod.is_empty()).map(str::to_owned))
        };
        let first = until("a leader", holder)?;
        own(cluster, &["delete", "pod", &first])?;
        let second = until("another leader", || Ok(holder()?.filter(|now| *now != first)))?;
        ensure!(second.starts_with("example-operator-"), "{second}");
        space.apply(&website("later", 2))?;
        space.wait("website/later", "condition=Published")?;
        ensure!(pages(space)? == names("later", 2));
        own(cluster, &["scale", "deployment/example-operator", "--replicas=1"])?;
        Ok(())
    })
}

#[test]
fn the_audit_log_has_all_requests_with_their_addresses() -> Result<()> {
    let cluster = cluster();
    let Some(node) = cluster.node() else {
        skipped(
            "the_audit_log_has_all_requests_with_their_addresses",
            &format!("needs a node of our own, and {KUBECONFIG} names a cluster"),
        )?;
        return Ok(());
    };
    let _alone = lock(&PODS);
    cluster.case("audit", |space| {
        space.apply(&website("seen", 1))?;
        space.wait("website/seen", "condition=Published")?;
        let addresses = own(cluster, &["get", "pods", "-o", "jsonpath={.items[*].status.podIP}"])?;
        let log = node.control_plane().audit_log();
        let creation = until("the creation of the page", || {
            let mut events = AuditEvent::read(&log, "seen-page-0")?.into_iter();
            Ok(events.find(|event| event.verb == "create" && event.user.username == USER))
        })?;
        let agent = &creation.user_agent;
        ensure!(agent.starts_with("example-operator/"), "{agent}");
        let source = creation.sources.first().context("a source")?;
        ensure!(addresses.split(' ').any(|address| address == source), "{source} of {addresses}");
        Ok(())
    })
}
