//! A replica that loses objects is restarted, where its policy says so.

use std::fs;
use std::process::Command;

use serde_json::json;

use crate::bed::Process;
use crate::harness::until;
use crate::operators::{Node, POD, served};

/// Writes the policy of a pod that is restarted when it loses objects.
fn write(node: &Node, pod: &str, selector: &str) {
    let resources = json!([{"apiGroups": [""], "resources": ["pods"]}]);
    let limits = json!([{"relateResources": resources, "selector": selector}]);
    node.write(&format!("{pod}.policy"), &json!({"restartOnLoss": true, "limits": limits}).to_string());
}

fn shows(teams: &str) -> serde_json::Value {
    json!({"status": 200, "body": format!("{POD}?labelSelector={teams}")})
}

/// A process of its own container in the pod, called `name`.
async fn container(node: &Node, pod: &str, name: &str) -> Process {
    let program = node.pki.path(name);
    fs::copy("/usr/bin/sleep", &program).unwrap();
    let cgroup = node.bed.cgroup(pod).join(name);
    fs::create_dir_all(&cgroup).unwrap();
    let mut command: Command = node.bed.inside(&cgroup, pod, program.to_str().unwrap());
    let process = Process(command.arg("1000").spawn().unwrap());
    let comm = format!("/proc/{}/comm", process.0.id());
    until("the program to begin", || async { fs::read_to_string(&comm).unwrap().trim_end() == name }).await;
    process
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_loses_objects_is_restarted_and_sees_none_go() {
    let node = Node::new().await;
    node.list(&[node.pod("a")]);
    write(&node, "a", "team in (a,b)");
    let proxy = node.proxy();
    served(&proxy, 1.0).await;
    let mut operator = node.operator("a");
    assert_eq!(operator.anew(), shows("team%20in%20%28a%2Cb%29"));
    let mut sandbox = container(&node, "a", "pause").await;
    let mut helper = container(&node, "a", "helper").await;

    // What it gains, it sees.
    write(&node, "a", "team in (a,b,c)");
    until("the new policy, on the connection that stands", || {
        let changed = operator.ask(POD) == shows("team%20in%20%28a%2Cb%2Cc%29");
        async move { changed }
    })
    .await;
    assert!(!operator.has_ended());
    assert!(proxy.metric("ctrlmesh_proxy_pods_restarted_total").await.abs() < f64::EPSILON);

    write(&node, "a", "team in (a)");
    until("the operator to end", || {
        let ended = operator.has_ended();
        async move { ended }
    })
    .await;
    assert!(helper.0.wait().unwrap().code().is_none(), "every container is restarted");
    let mut next = node.operator("a");
    until("the policy to be in force", || {
        let seen = next.anew_unless_ended();
        // Until the policy is in force, whatever runs is ended; the kubelet would start it again.
        if seen.is_none() {
            next = node.operator("a");
        }
        let changed = seen == Some(shows("team%20in%20%28a%29"));
        async move { changed }
    })
    .await;
    assert!(sandbox.0.try_wait().unwrap().is_none(), "the pod's sandbox lives on");
    assert!((proxy.metric("ctrlmesh_proxy_pods_restarted_total").await - 1.0).abs() < f64::EPSILON);
}
