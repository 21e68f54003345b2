//! Runs the demo and the tests in a cluster that belongs to the user.
//!
//! A cluster that already has what they make is refused before anything is changed. At their end everything that they
//! made is removed.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::kubectl;
use crate::run::root;

/// Our own namespace in the cluster.
pub const SYSTEM: &str = "ctrlmesh-system";

/// The namespace of the example operator, and its Deployment.
pub const OPERATOR: &str = "example-operator";

/// The label of what is made beside the manifests: it goes with value `true` on namespaces, and on what outlives them.
pub const MADE: &str = "ctrlmesh.dev/made";

/// The `ClusterRole`s that say which kinds are labelled, of the demo and of `deploy/example-sharded`.
pub const LABELS_ROLE: &str = "ctrlmesh-demo-labels";
const SHARDED_ROLE: &str = "ctrlmesh-labels-websites";

/// What is installed, and so taken away again.
const FOLDERS: [&str; 2] = ["deploy/example-operator/config/default", "deploy"];

/// The kind that the example operator works on.
const WEBSITES: &str = "websites.web.example.com";

/// Our own kind that says how an operator is divided.
const CONFIGS: &str = "shardingconfigs.ctrlmesh.kusionstack.io";

/// How long a manager may take to let a root go: for 12 s, a pod that vanished counts as one that may write.
const HANDED_BACK_WITHIN: &str = "--timeout=60s";

/// The keys of the labels that the manager writes on what is everybody's.
pub const KEYS: [&str; 3] =
    ["ctrlmesh.kusionstack.io/sharding-hash", "ctrlmesh.kusionstack.io/namespace", "ctrlmesh.kusionstack.io/control"];

/// Refuses a cluster in which there is anything already that is made, and taken away at the end: ctrlmesh, the example
/// operator, or one of `namespaces`.
///
/// # Errors
/// What is there, or that the cluster does not say.
pub fn ensure_unused(kubeconfig: &Path, namespaces: &[String]) -> Result<()> {
    let mut found = Vec::new();
    for words in queries(namespaces) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let get = ["get", "--ignore-not-found", "--output=name"];
        let said = ask(kubeconfig, &[&get[..], &words].concat(), "")?;
        found.extend(said.split_whitespace().map(str::to_owned));
    }
    found.dedup();
    ensure!(
        found.is_empty(),
        "the cluster has {} already, which would be taken away at the end; name one without. Only if an earlier demo or test \
         left it there, which was killed: `cargo xtask remove --kubeconfig {}` takes away all that there is of ctrlmesh",
        found.join(", "),
        kubeconfig.display()
    );
    Ok(())
}

/// What kubectl is asked for to learn whether there is anything that [`remove`] would take away.
fn queries(namespaces: &[String]) -> Vec<Vec<String>> {
    let named =
        |kind: &str, names: &[&str]| [kind].iter().chain(names).map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let folder = |folder: &str| root().join(folder).display().to_string();
    let mut queries: Vec<_> = FOLDERS.iter().map(|one| named("--kustomize", &[&folder(one)])).collect();
    queries.extend([
        [named("namespaces", &[SYSTEM, OPERATOR]), namespaces.to_vec()].concat(),
        named("namespaces", &["--selector", &selector()]),
        named("clusterroles", &[LABELS_ROLE, SHARDED_ROLE]),
        named("mutatingwebhookconfigurations", &["ctrlmesh-labels"]),
    ]);
    // The labels stay when ctrlmesh is taken out of a cluster by hand, and are somebody's.
    for kind in [&["namespaces"][..], &["configmaps", "--all-namespaces"]] {
        for key in KEYS {
            queries.push(named(kind[0], &[&kind[1..], &["--selector", key]].concat()));
        }
    }
    queries
}

/// Takes everything out of a cluster that the demo or the tests put there: what they made first, so that nobody is
/// needed any more who would have to let it go. Where there is nothing of it, nothing is changed. Policy
/// `ctrlmesh-fence` stays: without it, the API servers would enforce no fence that is made later.
///
/// # Errors
/// Where something cannot be deleted; the rest is all the same.
pub fn remove(kubeconfig: &Path) -> Result<()> {
    let mut failed = Vec::new();
    let mut ask = |words: &[&str]| {
        // One that cannot be deleted does not keep the others there.
        failed.extend(ask(kubeconfig, words, "").err().map(|error| format!("{error:#}")));
    };
    // A definition can take the API server five minutes (its finalizer waits for a resync after a conflict).
    let delete = ["delete", "--ignore-not-found", "--timeout=400s", "--request-timeout=0"];
    let mut delete = |what: &[&str]| ask(&[&delete[..], what].concat());
    let made = selector();
    // Until their pods are gone, too: they would put back what we take away.
    delete(&["deployment", OPERATOR, "--namespace", OPERATOR, "--cascade=foreground"]);
    delete(&["deployment", "--all-namespaces", "--selector", &made, "--cascade=foreground"]);
    let remove_roots = remove_roots(kubeconfig);
    let remove_finalizers = remove_finalizers(kubeconfig);
    delete(&["namespace", "--selector", &made]);
    delete(&["clusterrolebinding", "--selector", &made]);
    delete(&["clusterrole", LABELS_ROLE, SHARDED_ROLE]);
    for folder in FOLDERS {
        delete(&["--kustomize", &root().join(folder).display().to_string()]);
    }
    // What the manager made and wrote, which nobody takes away with it.
    let policies = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies";
    if self::ask(kubeconfig, &["get", "--raw", policies], "").is_ok() {
        for kind in ["mutatingadmissionpolicybinding", "mutatingadmissionpolicy"] {
            delete(&[kind, "ctrlmesh-labels"]);
        }
    }
    delete(&["mutatingwebhookconfiguration", "ctrlmesh-labels"]);
    let keys = KEYS.map(|key| format!("{key}-"));
    for kind in [&["namespaces", "--all"][..], &["configmaps", "--all", "--all-namespaces"]] {
        let keys = keys.iter().map(String::as_str);
        let words: Vec<&str> = ["label"].into_iter().chain(kind.iter().copied()).chain(keys).collect();
        ask(&words);
    }
    let both = [remove_roots, remove_finalizers];
    failed.extend(both.into_iter().filter_map(Result::err).map(|error| format!("{error:#}")));
    ensure!(
        failed.is_empty(),
        "not everything could be taken out of the cluster: {}\nTry again: cargo xtask remove --kubeconfig {}",
        failed.join("; "),
        kubeconfig.display()
    );
    Ok(())
}

/// Deletes what says how operators are divided. The manager keeps a fenced root until its shards own nothing, which
/// takes seconds, since their pods are gone. Where no manager is left that would let it go, its finalizers are taken
/// away, and before that the webhook that nobody answers.
fn remove_roots(kubeconfig: &Path) -> Result<()> {
    // Where there is no such kind, there is nothing to delete.
    if ask(kubeconfig, &["get", CONFIGS, "--all-namespaces"], "").is_err() {
        return Ok(());
    }
    let delete = ["delete", CONFIGS, "--all", "--all-namespaces", HANDED_BACK_WITHIN, "--request-timeout=0"];
    if ask(kubeconfig, &delete, "").is_ok() {
        return Ok(());
    }
    ask(kubeconfig, &["delete", "validatingwebhookconfiguration", "ctrlmesh", "--ignore-not-found"], "")?;
    let lines = r#"jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{"\n"}{end}"#;
    for line in ask(kubeconfig, &["get", CONFIGS, "--all-namespaces", "--output", lines], "")?.lines() {
        let (namespace, name) = line.split_once(' ').context("a namespace and a name")?;
        let none = r#"{"metadata": {"finalizers": null}}"#;
        ask(kubeconfig, &["patch", CONFIGS, name, "--namespace", namespace, "--type=merge", "--patch", none], "")?;
    }
    Ok(())
}

/// Takes the finalizers from our work: whoever would take them away is gone, or was never there.
fn remove_finalizers(kubeconfig: &Path) -> Result<()> {
    let get = ["get", "namespaces", "--output=name", "--selector", &selector()];
    let spaces = ask(kubeconfig, &get, "")?;
    let lines = r#"jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{"\n"}{end}"#;
    let get = ["get", WEBSITES, "--all-namespaces", "--output", lines];
    // Where there is no such kind, there is nothing to let go.
    let Ok(sites) = ask(kubeconfig, &get, "") else { return Ok(()) };
    let documents = documents(&spaces, &sites);
    if documents.is_empty() {
        return Ok(());
    }
    let patch = ["patch", "--filename", "-", "--type=merge", "--patch"];
    let none = r#"{"metadata": {"finalizers": null}}"#;
    ask(kubeconfig, &[&patch[..], &[none]].concat(), &documents).map(drop)
}

/// Names, as documents in YAML, of the sites (`NAMESPACE NAME` a line) those that are in one of these namespaces
/// (`namespace/NAME` a line).
fn documents(spaces: &str, sites: &str) -> String {
    let spaces: BTreeSet<&str> = spaces.lines().filter_map(|line| line.strip_prefix("namespace/")).collect();
    let sites = sites.lines().filter_map(|line| line.split_once(' '));
    let ours = sites.filter(|(space, _)| spaces.contains(space));
    let document = |(space, name)| {
        format!(
            "---\napiVersion: web.example.com/v1alpha1\nkind: Website\nmetadata: {{namespace: {space}, name: {name}}}\n"
        )
    };
    ours.map(document).collect()
}

fn selector() -> String {
    format!("{MADE}=true")
}

/// What kubectl answers; an interruption from the terminal does not reach it.
fn ask(kubeconfig: &Path, words: &[&str], input: &str) -> Result<String> {
    kubectl::answer(kubectl::command(kubeconfig).args(words).process_group(0), input)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_in_namespaces_that_we_made_is_let_go() {
        let documents = documents("namespace/shop-00\nnamespace/a-1\n", "shop-00 x\nshop y\na-1 z\n");
        assert_eq!(documents.matches("---\n").count(), 2);
        assert!(documents.contains("{namespace: shop-00, name: x}"), "{documents}");
        assert!(!documents.contains("name: y"), "{documents}");
    }
}
