//! Errors of `ctrlmesh` as users read them.

use std::process::{Command, Output};

use http::StatusCode;
use serde_json::json;

use crate::harness::run::{Bed, output, stderr};

/// The same with a backtrace wished for, as developers have it in their shells.
async fn with_backtraces(bed: &Bed, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
    command.args(arguments).env("KUBECONFIG", bed.file()).env("RUST_BACKTRACE", "1");
    output(command).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_is_one_line_without_a_backtrace() {
    let refused = json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403,
        "message": "not for you"});
    let bed = Bed::answering(move |_seen| (StatusCode::FORBIDDEN, refused.clone())).await;
    for (arguments, says) in [
        (&["status"][..], "Error: read shardingconfigs of namespace \"ops\""),
        (&["owner", "pod", "a"], "not for you"),
        (&["events"], "Error: read the events.events.k8s.io of namespace \"ops\""),
        (&["status", "--kubeconfig", "/nowhere"], "Error: read the kubeconfig `/nowhere`: "),
        (&["validate", "-f", "/nowhere"], "/nowhere"),
    ] {
        let failed = with_backtraces(&bed, arguments).await;
        let error = stderr(&failed);
        assert_eq!((failed.status.code(), error.lines().count()), (Some(1), 1), "{arguments:?}: {error}");
        assert!(error.starts_with("Error: ") && error.contains(says), "{arguments:?}: {error}");
        assert!(!error.contains("backtrace") && !error.contains("Status {"), "{arguments:?}: {error}");
    }
}
