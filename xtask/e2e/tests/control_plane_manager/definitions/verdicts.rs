//! `ctrlmesh validate` and a real API server agree on manifests.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_manager::rules::validate;
use kube::Client;
use serde_json::Value;

use super::{ACCEPTED, MANAGER_STATE, REFUSED, installed};

const SHARD: &str =
    "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: METADATA\nspec: SPEC\n";
const SPEC: &str = "{selector: {matchLabels: {a: b}}, limits: [{selector: {matchLabels: {a: b}}}]}";

/// Metadata of a shard that is right otherwise.
const METADATA: [&str; 42] = [
    "{name: a}",
    "{name: a, namespace: default}",
    "{name: a, namespace: ''}",
    "{name: a, namespace: a.b}",
    "{generateName: a-}",
    "{generateName: A-}",
    "{generateName: a.}",
    "{generateName: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-}",
    "{name: a, generateName: B_}",
    "{name: A}",
    "{name: a_b}",
    "{name: -a}",
    "{name: a..b}",
    "{name: a.b}",
    "{name: 5}",
    "{name: ''}",
    "{}",
    "null",
    "[]",
    "{name: a, labels: {a: 1}}",
    "{name: a, labels: {a: null}}",
    "{name: a, labels: {a: ''}}",
    "{name: a, labels: {A/b: c}}",
    "{name: a, labels: {-a: b}}",
    "{name: a, labels: {a: -b}}",
    "{name: a, labels: null}",
    "{name: a, labels: []}",
    "{name: a, annotations: {A/b: c}}",
    "{name: a, annotations: {a: 'x y'}}",
    "{name: a, annotations: {a/b/c: d}}",
    "{name: a, annotations: {a: true}}",
    "{name: a, lables: {}}",
    "{name: a, uid: 5}",
    "{name: a, generation: x}",
    "{name: a, finalizers: [a/b]}",
    "{name: a, finalizers: [null]}",
    "{name: a, finalizers: [a b]}",
    "{name: a, finalizers: [orphan, foregroundDeletion]}",
    "{name: a, creationTimestamp: yesterday}",
    "{name: a, creationTimestamp: '2026-01-02T03:04:05Z'}",
    "{name: a, deletionGracePeriodSeconds: 1.0}",
    "{name: a, resourceVersion: '5'}",
];

/// Owners of a shard that is right otherwise.
const OWNERS: [&str; 13] = [
    "[{apiVersion: v1, kind: Pod, name: p, uid: u}]",
    "[{apiVersion: v1, kind: Pod, name: p, uid: u, controller: true, blockOwnerDeletion: false}]",
    "[{apiVersion: v1, kind: Pod, name: p, uid: u, nmae: x}]",
    "[{apiVersion: v1, kind: Pod, name: p}]",
    "[{apiVersion: v1, kind: Pod, name: p, uid: ''}]",
    "[{apiVersion: v1, kind: Pod, name: p, uid: null}]",
    "[{kind: Pod, name: p, uid: u}]",
    "[{apiVersion: a/b/c, kind: Pod, name: p, uid: u}]",
    "[{apiVersion: v1, kind: Event, name: p, uid: u}]",
    "[{apiVersion: v1, kind: Pod, name: p, uid: u, controller: true}, {apiVersion: v1, kind: Pod, name: q, uid: v, controller: true}]",
    "[{apiVersion: v1, kind: Pod, name: p, uid: u, controller: 'yes'}]",
    "[null]",
    "{}",
];

/// What shards are to be.
const SPECS: [&str; 20] = [
    "null",
    "[]",
    "{}",
    "{selector: {}, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {matchLabels: {a: null}}, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {matchLabels: {a: null, b: c}}, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {matchLabels: {a: 1}}, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {matchLabels: {a: b}}, limits: [null]}",
    "{selector: {matchLabels: {a: b}}, limits: [{selector: null}]}",
    "{selector: {matchLabels: {a: b}}, limits: null}",
    "{selector: {matchLabels: {a: b}}, webhook: {certDir: /c, port: 9443.0}, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {matchLabels: {a: b}}, webhook: {certDir: /c, port: 9443.5}, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {matchLabels: {a: b}}, webhook: {certDir: /c, port: '9443'}, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {matchLabels: {a: b}}, webhook: {certDir: /c, port: 1e3}, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {matchLabels: {a: b}}, limits: [{selector: {matchLabels: {a: b}}, relateResources: [null]}]}",
    "{selector: {matchLabels: {a: b}}, limits: [{selector: {matchLabels: {a: b}}, relateResources: []}]}",
    "{selector: {matchLabels: {a: b}}, controller: null, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {matchLabels: {a: b}}, contoller: {}, limits: [{selector: {matchLabels: {a: b}}}]}",
    "{selector: {}, root: {prefix: a, targetStatefulSet: a, auto: {shardingSize: 2, everyShardReplicas: 1}}}",
    "{selector: {matchExpressions: [{key: a, operator: In}]}, limits: [{selector: {matchLabels: {a: b}}}]}",
];

/// Durations of a breaker's bucket and of a fault's delay.
const DURATIONS: [&str; 16] = [
    "10s",
    "0.5ns",
    "1.5ns",
    "0.9ns",
    "0s",
    "1h30m",
    "500ms",
    "-1s",
    "1d",
    "soon",
    "1",
    "''",
    ".5s",
    "1.s",
    "9223372036854775807ns",
    "9223372036854775808ns",
];

fn shard(metadata: &str, spec: &str) -> String {
    SHARD.replace("METADATA", metadata).replace("SPEC", spec)
}

/// What is put to both, beside the two files.
fn generated() -> Vec<String> {
    let mut all: Vec<String> = METADATA.iter().map(|metadata| shard(metadata, SPEC)).collect();
    let owned = |owners: &&str| shard(&format!("{{name: a, ownerReferences: {owners}}}"), SPEC);
    all.extend(OWNERS.iter().map(owned));
    all.extend(SPECS.iter().map(|spec| shard("{name: a}", spec)));
    let other = |kind: &str, spec: &str| shard("{name: a}", spec).replace("ShardingConfig", kind);
    for duration in DURATIONS {
        let limitings = format!(
            "{{name: a, bucket: {{burst: 1, limit: 1, interval: {duration}}}, triggerPolicy: Normal, recoverPolicy: {{type: Manual}}, restRules: [{{url: http://a, method: GET}}]}}"
        );
        all.push(other(
            "CircuitBreaker",
            &format!("{{selector: {{matchLabels: {{a: b}}}}, rateLimitings: [{limitings}]}}"),
        ));
        let fault = format!(
            "{{delay: {{fixedDelay: {duration}, percent: '1'}}, match: {{resources: [{{apiGroups: [''], resources: [pods], verbs: [get], namespaces: [a]}}]}}}}"
        );
        all.push(other("FaultInjection", &format!("{{selector: {{matchLabels: {{a: b}}}}, httpFault: [{fault}]}}")));
    }
    let kridge = |kind: &str| other(kind, SPEC).replace("ctrlmesh.kusionstack.io", "kridge.kusionstack.io");
    all.extend(["ShardingConfig", "CircuitBreaker", "FaultInjection", "ManagerState"].map(kridge));
    all.extend([other("Shardingconfig", SPEC), shard("{name: a}", SPEC).replace("v1alpha1", "v1")]);
    let state = |metadata: &str| shard(metadata, "{}").replace("ShardingConfig", "ManagerState");
    all.extend(["{name: ctrlmesh-manager}", "{name: other}", "{generateName: a}"].map(state));
    all
}

/// What the API server says to the manifest, sent as `kubectl create --validate=strict` does; none where it takes it.
async fn refusal(client: &Client, manifest: &Value) -> Result<Option<String>> {
    let version = manifest["apiVersion"].as_str().context("apiVersion")?;
    let kind = manifest["kind"].as_str().context("kind")?;
    let namespace = manifest["metadata"]["namespace"].as_str().filter(|given| !given.is_empty());
    let place = match kind {
        "ManagerState" => String::new(),
        _ => format!("namespaces/{}/", namespace.unwrap_or("default")),
    };
    let plural = kind.to_lowercase() + "s";
    let path = format!("/apis/{version}/{place}{plural}?dryRun=All&fieldValidation=Strict");
    let request =
        http::Request::post(path).header("content-type", "application/json").body(serde_json::to_vec(manifest)?)?;
    match client.request::<Value>(request).await {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) => Ok(Some(format!("{} {}", status.code, status.message))),
        Err(error) => Err(error.into()),
    }
}

/// What `validate -f` says against the manifest, by itself.
fn said(manifest: &Value) -> Vec<String> {
    let file = ("file".to_owned(), vec![manifest.clone()]);
    let reports = validate::manifests(&[file]).into_iter().filter_map(|verdict| verdict.report);
    reports.flat_map(|report| report.errors).map(|problem| problem.to_string()).collect()
}

#[tokio::test]
async fn what_is_ok_is_taken_and_what_is_not_is_refused() -> Result<()> {
    let _alone = MANAGER_STATE.lock().await;
    let client = installed().await?;
    let (mut wrong, mut taken, mut refused) = (Vec::new(), 0, 0);
    let in_files = [ACCEPTED, REFUSED].into_iter().flat_map(|text| text.split("\n---\n"));
    for text in in_files.map(str::to_owned).chain(generated()) {
        let manifest: Value = serde_saphyr::from_str(&text).with_context(|| text.clone())?;
        let (theirs, ours) = (refusal(&client, &manifest).await?, said(&manifest));
        *if theirs.is_none() { &mut taken } else { &mut refused } += 1;
        // What no schema can see is for the admission webhook.
        let webhook =
            text.lines().rfind(|line| line.starts_with("# ")).is_some_and(|line| line.starts_with("# admission"));
        if theirs.is_none() != ours.is_empty() && !webhook {
            wrong.push(format!("{text}  server: {theirs:?}\n  ours:   {ours:?}\n"));
        }
        let named =
            |one: &String| one.split_once(": ").is_some_and(|(field, _)| !field.is_empty() && !field.contains(' '));
        if !ours.iter().all(named) {
            wrong.push(format!("{text}  no field is named: {ours:?}\n"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(taken > 25 && refused > 100, "too little: {taken} taken, {refused} refused");
    Ok(())
}
