//! The lines that `ctrlmesh run --explain` writes.

use crate::harness::run::{Bed, LIMIT, output, stderr, stdout};
use crate::harness::upstream::{Upstream, whole};
use http::StatusCode;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn what_is_rewritten_is_explained_as_it_happens() {
    let bed = Bed::new().await;
    let flags = ["--explain", "--lock", "lead", "--shard", "a"];
    let flags = [&LIMIT[..], &flags].concat();
    let targets = ["/api/v1/pods", "/apis/coordination.k8s.io/v1/namespaces/ops/leases/lead---b"];
    let text = stderr(&output(bed.client(&flags, &targets)).await);
    for line in [
        &format!("ctrlmesh: server https://{} became https://127.0.0.1:", bed.upstream.address),
        "ctrlmesh: limit on pods of [\"*\"]: slot in (0,1)",
        "ctrlmesh: lock ops/lead is lead---a on the server",
        "ctrlmesh: list /api/v1/pods became /api/v1/pods?labelSelector=slot in (0,1)",
        "/leases/lead---b refused: the name \"lead---b\" is kept",
        "ctrlmesh: 2 requests, 1 injected, 1 refused",
    ] {
        assert!(text.contains(line), "no {line:?} in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_the_lock_only_what_is_renamed_is_explained() {
    let mut bed = Bed::new().await;
    let server = bed.pki.server(&["http/1.1"]);
    bed.upstream = Upstream::http(server, |_| async { whole(StatusCode::OK, "{}") }).await;
    bed.kubeconfig(json!({"certificate-authority": "real.crt"}), json!({"token": "secret"}));
    let leases = "/apis/coordination.k8s.io/v1/namespaces/ops/leases";
    let named = |name: &str| format!(r#"{leases} {{"metadata": {{"name": "{name}"}}}}"#);
    let lock = format!("{leases}/lead");
    let targets = [&lock, &named("lead"), leases, "/api/v1/configmaps", &named("other")];
    let flags = ["--explain", "--lock", "lead", "--shard", "a"];
    let output = output(bed.client(&flags, &targets)).await;
    assert_eq!(stdout(&output).matches("200 {}").count(), targets.len(), "{}", stdout(&output));
    let text = stderr(&output);
    let explained: Vec<_> = text.lines().filter(|line| line.contains(" /api")).collect();
    let expected = [
        format!("ctrlmesh: get {lock} became {lock}---a"),
        format!("ctrlmesh: create {leases}: lead in its body became lead---a"),
    ];
    assert_eq!(explained, expected, "{text}");
}
