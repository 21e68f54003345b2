//! Runs that `ctrlmesh run` refuses, and its advice.

use std::fs;
use std::net::TcpListener;

use crate::harness::run::{Bed, output, stderr};
use serde_json::json;

/// The command is not run, and the message says why.
async fn refused(bed: &Bed, flags: &[&str], why: &str) {
    let output = output(bed.run(flags, &["true"])).await;
    let text = stderr(&output);
    assert!(text.contains(why) && output.status.code() == Some(125), "{flags:?}: {text}");
    bed.nothing_is_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn arguments_that_make_no_sense_are_refused_with_what_to_do() {
    let bed = Bed::new().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    refused(&bed, &["--port", &port], "leave --port out").await;
    refused(&bed, &["--kubeconfig", "/nowhere"], "read the kubeconfig `/nowhere`").await;
    refused(&bed, &["--context", "prod"], "it has dev, nobody").await;
    refused(&bed, &["--limit", "pods", "--selector", "a in"], "parse the selector").await;
    refused(&bed, &["--limit", "pods", "--selector", "a=x,a=y"], "contradict each other").await;
}

/// A limit that no object can match.
const CONTRADICTION: &str = "spec: {selector: {matchLabels: {app: x}}, limits: [{relateResources: [{apiGroups: [''], resources: [pods]}], \
                             selector: {matchLabels: {a: x}, matchExpressions: [{key: a, operator: DoesNotExist}]}}]}";

#[tokio::test(flavor = "multi_thread")]
async fn shards_that_select_nothing_are_refused_with_what_to_do() {
    let bed = Bed::new().await;
    let shards = bed.pki.path("shards");
    let flags = ["--sharding-config", shards.to_str().unwrap()];
    refused(&bed, &flags, "No such file").await;
    let head = |name: &str| {
        format!("apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}}}\n")
    };
    let two = format!("{}spec: {{}}\n---\n{}spec: {{}}", head("a"), head("b"));
    for (text, why) in [
        (":".to_owned(), "read the ShardingConfigs: document 1"),
        (String::new(), "no ShardingConfig that limits anything"),
        (head("r") + "spec: {root: {prefix: x}}", "of a root"),
        (head("e") + "spec: {limits: []}", "selects nothing"),
        (head("e") + "spec: {limits: [{selector: {}}]}", "would see all objects"),
        (head("e") + "spec: {limits: [{selector: {matchLables: {team: a}}}]}", "matchLables: no such field"),
        (
            "apiVersion: v1\nkind: List\nitems:\n- ".to_owned()
                + &(head("e") + "spec: {limits: [{selector: {}}]}").replace('\n', "\n  "),
            "would see all objects",
        ),
        (head("c") + CONTRADICTION, "contradict each other"),
        (two, "--shard must name one of those in the file (a, b)"),
    ] {
        fs::write(&shards, text).unwrap();
        refused(&bed, &flags, why).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_kubeconfigs_are_refused_with_what_to_do() {
    let bed = Bed::new().await;
    for (cluster, why) in [
        (json!({"insecure-skip-tls-verify": true}), "--certificate-authority FILE"),
        (json!({"certificate-authority": "mesh.crt"}), "UnknownIssuer"),
        (json!({"certificate-authority": "nowhere"}), "nowhere"),
        (json!({"certificate-authority-data": "?"}), "certificate-authority-data"),
        (json!({"server": "http://127.0.0.1:8080"}), "without TLS"),
        (
            json!({"server": "https://127.0.0.1:1", "certificate-authority": "real.crt"}),
            "does `kubectl version` reach it",
        ),
        (json!({"proxy-url": "https://p", "certificate-authority": "real.crt"}), "proxy-url"),
    ] {
        bed.kubeconfig(cluster, json!({}));
        refused(&bed, &[], why).await;
    }
    fs::write(bed.file(), "clusters: []").unwrap();
    refused(&bed, &[], "no current-context").await;
    fs::write(bed.file(), "clusters: [").unwrap();
    refused(&bed, &[], "parse the kubeconfig").await;
    fs::remove_file(bed.file()).unwrap();
    let mut run = bed.run(&[], &["true"]);
    run.env_remove("KUBERNETES_SERVICE_HOST");
    assert!(stderr(&output(run).await).contains("which cluster"));
}
