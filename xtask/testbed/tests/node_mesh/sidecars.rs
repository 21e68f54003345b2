//! Operators with a proxy of their own, in each mode.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::sync::mpsc;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_runtime::sync::read;
use ctrlmesh_testbed::Space;
use serde_json::Value;

use crate::mesh::operator::{self, EVERYBODYS, OperatorSpec, PLAIN};
use crate::mesh::{self, until};

fn works_with(name: &str, annotations: &[(&str, &str)]) -> Result<()> {
    let _others = read(&EVERYBODYS);
    mesh::shared().case(name, |space| {
        let restricted = "pod-security.kubernetes.io/enforce=restricted";
        space.kubectl(&["label", "namespace", space.name(), restricted])?;
        operator::deploy(space, OperatorSpec { annotations, ..PLAIN })?;
        operator::own(space, "mine")?;
        operator::foreign(space, "foreign")?;
        operator::published(space, "mine")?;
        ensure!(!operator::is_published(space, "foreign")?, "another's website was worked on");
        let pods = operator::pods(space)?;
        operator::none_restarted(&pods)?;
        let init = pods[0]["spec"]["initContainers"].as_array().map_or(0, Vec::len);
        ensure!(init == 1, "{init} containers before the operator's");
        if space.cluster().node().is_some() {
            operator::all_asked_for_their_share(space)?;
        }
        the_sidecar_shows_its_requests(space, &pods[0])?;
        no_second_proxy_serves(space, &pods[0])?;
        the_sidecar_ends_last(space, &pods[0])
    })
}

/// Follows the requests of a pod with a proxy inside, as `ctrlmesh trace` does.
fn the_sidecar_shows_its_requests(space: Space<'_>, pod: &Value) -> Result<()> {
    let pod = pod["metadata"]["name"].as_str().context("a name")?;
    let exec = ["exec", "--stdin", pod, "--container", "ctrlmesh-proxy", "--", "/ctrlmesh-proxy", "trace"];
    let mut trace = space.command(&exec).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let lines = BufReader::new(trace.stdout.take().context("output")?).lines();
    let (shown, is_shown) = mpsc::channel();
    std::thread::spawn(move || {
        let is_wanted = |line: &String| line.contains("/websites");
        lines.map_while(Result::ok).filter(is_wanted).for_each(|line| drop(shown.send(line)));
    });
    let mut number = 0;
    let asked = until("a request to be shown", || {
        number += 1;
        operator::own(space, &format!("shown-{number}"))?;
        Ok(is_shown.try_recv().ok())
    });
    // The program in the container ends with its input.
    drop(trace.stdin.take());
    let ended = until("the program to end", || Ok(trace.try_wait()?));
    if ended.is_err() {
        trace.kill()?;
    }
    let ended = ended?;
    asked?;
    ensure!(ended.success(), "{ended}");
    Ok(())
}

/// Starts another proxy in the container of a sidecar, which has the key that operators believe.
fn no_second_proxy_serves(space: Space<'_>, pod: &Value) -> Result<()> {
    let pod = pod["metadata"]["name"].as_str().context("a name")?;
    let exec = ["exec", pod, "--container", "ctrlmesh-proxy", "--", "/ctrlmesh-proxy", "sidecar"];
    let key = ["--tls-cert=/var/lib/ctrlmesh/a", "--tls-key=/var/lib/ctrlmesh/a", "--listen=127.0.0.1:9999"];
    let output = space.command(&[&exec[..], &key].concat()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && said.contains("--first-process-only"), "{}: {said}", output.status);
    Ok(())
}

/// Deletes a pod with a proxy inside: that ends after the operator, and because it was told to.
fn the_sidecar_ends_last(space: Space<'_>, pod: &Value) -> Result<()> {
    let pod = format!("pod/{}", pod["metadata"]["name"].as_str().context("a name")?);
    let held_by = |finalizers: &str| {
        let patch = format!(r#"{{"metadata": {{"finalizers": {finalizers}}}}}"#);
        space.kubectl(&["patch", &pod, "--type=merge", "--patch", &patch])
    };
    // Else the pod is gone before anybody can see how its containers ended.
    held_by(r#"["example.com/looked-at"]"#)?;
    space.kubectl(&["delete", &pod, "--wait=false"])?;
    let [proxy, operator] = until("the containers to end", || {
        let said: Value = serde_json::from_str(&space.kubectl(&["get", &pod, "-o", "json"])?)?;
        let ended = ["initContainerStatuses", "containerStatuses"]
            .map(|kind| said["status"][kind][0]["state"]["terminated"].clone());
        Ok(ended.iter().all(Value::is_object).then_some(ended))
    })?;
    held_by("null")?;
    space.wait(&pod, "delete")?;
    let at = |ended: &Value| ended["finishedAt"].as_str().map(str::to_owned).context("a time");
    ensure!(at(&proxy)? >= at(&operator)?, "the proxy ended first: {proxy}, {operator}");
    ensure!(proxy["exitCode"] == 0, "the proxy had to be killed: {proxy}");
    Ok(())
}

#[test]
fn an_operator_works_with_a_sidecar_by_variables() -> Result<()> {
    works_with("env", &[("interception", "env")])
}

#[test]
fn an_operator_works_with_a_sidecar_by_kubeconfig() -> Result<()> {
    works_with("kubeconfig", &[("interception", "kubeconfig")])
}

#[test]
fn an_operator_works_with_a_sidecar_by_ebpf() -> Result<()> {
    works_with("ebpf-inside", &[("sidecar", "true")])
}
