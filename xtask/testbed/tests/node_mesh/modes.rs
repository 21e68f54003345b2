//! Pods as their users enrol them: many at once, with a proxy of the node or one of their own, beside pods that are not
//! enrolled; and what nobody may do.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _, stderr};
use std::net::TcpStream;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_runtime::sync::{read, write};
use ctrlmesh_testbed::audit_log::AuditEvent;
use ctrlmesh_testbed::{Space, is_full, skipped};
use serde_json::{Value, json};
use xtask::images::Image;

use crate::mesh::delays::Delays;
use crate::mesh::knocks::{count, knocked, knocks};
use crate::mesh::operator::{self, EVERYBODYS, OperatorSpec, PLAIN};
use crate::mesh::past::Past;
use crate::mesh::{self, in_ours, until};

/// Starts pods again and again, five at once, and looks at each of them, until there were as many as are asked for: 100
/// of them, or a tenth.
fn start_many(space: Space<'_>, mut look: impl FnMut(&[Value]) -> Result<()>) -> Result<usize> {
    let mut seen = BTreeSet::new();
    loop {
        let pods = operator::pods(space)?;
        operator::none_restarted(&pods)?;
        look(&pods)?;
        let uids = pods.iter().filter_map(|pod| pod["metadata"]["uid"].as_str());
        seen.extend(uids.map(str::to_owned));
        if seen.len() >= if is_full() { 100 } else { 10 } {
            return Ok(seen.len());
        }
        space.kubectl(&["rollout", "restart", "deployment/operator"])?;
        space.kubectl(&["rollout", "status", "deployment/operator", "--timeout=300s"])?;
    }
}

#[test]
fn pods_start_again_and_again_without_restart_or_bypass() -> Result<()> {
    let _others = read(&EVERYBODYS);
    mesh::shared().case("starts", |space| {
        let mut past = Past::from_now(space)?;
        operator::deploy(space, OperatorSpec { replicas: 5, ..PLAIN })?;
        operator::own(space, "mine")?;
        operator::foreign(space, "foreign")?;
        operator::published(space, "mine")?;
        let started = start_many(space, |pods| past.nobody(pods))?;
        ensure!(!operator::is_published(space, "foreign")?, "another's website was worked on");
        if space.cluster().node().is_some() {
            let requests = operator::all_came_from(space, &[mesh::address(space.cluster())?])?;
            ensure!(requests >= started, "{requests} requests of {started} pods");
            Delays::of(space)?.say("enrolled")?;
        }
        operator::end(space)
    })
}

#[test]
fn pods_that_are_not_enrolled_start_as_often_to_compare_with() -> Result<()> {
    if !is_full() {
        let name = "pods_that_are_not_enrolled_start_as_often_to_compare_with";
        skipped(name, "gives figures only: only with --full")?;
        return Ok(());
    }
    let _alone = write(&EVERYBODYS);
    mesh::shared().case("starts-plainly", |space| {
        operator::deploy(space, OperatorSpec { replicas: 5, enrolled: false, ..PLAIN })?;
        start_many(space, |_| Ok(()))?;
        if space.cluster().node().is_some() {
            Delays::of(space)?.say("not enrolled")?;
        }
        operator::end(space)
    })
}

#[test]
fn sixty_pods_at_once_are_all_served_and_released() -> Result<()> {
    // They take the whole machine.
    let _alone = write(&EVERYBODYS);
    mesh::shared().case("sixty", |space| {
        operator::deploy(space, OperatorSpec { replicas: 60, ..PLAIN })?;
        // Some may restart: sixty that begin on few processors may not renew their locks within 10 s.
        let pods = operator::pods(space)?;
        ensure!(pods.len() == 60, "{} pods", pods.len());
        let proxies = by_proxy(space, &pods)?;
        until("all to be attached and served", || {
            Ok((attached_and_served(space, &proxies)? == (60, 60)).then_some(()))
        })?;
        operator::end(space)?;
        until("the proxies to let go of them all", || {
            Ok((attached_and_served(space, &proxies)? == (0, 0)).then_some(()))
        })
    })
}

#[test]
fn pods_that_are_deleted_while_they_are_attached_are_let_go_of() -> Result<()> {
    // Beside the sixty of another test, none would have begun before it is deleted.
    let _alone = write(&EVERYBODYS);
    mesh::shared().case("short-lived", |space| {
        operator::deploy(space, OperatorSpec { replicas: 0, ..PLAIN })?;
        let labels = json!({"app": operator::NAME, "ctrlmesh.kusionstack.io/enable-proxy": "true"});
        let pod = |number| {
            json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("short-lived-{number}"), "labels": labels},
            "spec": {"serviceAccountName": operator::NAME, "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "probe", "image": Image::Probe.name(), "args": ["serve"]}]}})
        };
        let items: Vec<Value> = (0..20).map(pod).collect();
        space.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
        let pods = until("the pods to have a node", || {
            let pods = operator::pods(space)?;
            Ok(pods.iter().all(|pod| pod["spec"]["nodeName"].is_string()).then_some(pods))
        })?;
        ensure!(pods.len() == 20, "{} pods", pods.len());
        let proxies = by_proxy(space, &pods)?;
        // One batch after the other: each is at another step by then.
        let names: Vec<&str> = pods.iter().filter_map(|pod| pod["metadata"]["name"].as_str()).collect();
        until("some to be attached", || Ok((attached_and_served(space, &proxies)?.0 > 0).then_some(())))?;
        for batch in names.chunks(5) {
            space.kubectl(&[&["delete", "pod", "--wait=false"], batch].concat())?;
        }
        writeln!(stderr(), "attached, served: {:?}", attached_and_served(space, &proxies)?)?;
        space.kubectl(&["wait", "pod", "-l", "app=operator", "--for=delete", "--timeout=300s"])?;
        until("the proxies to let go of them all", || {
            Ok((attached_and_served(space, &proxies)? == (0, 0)).then_some(()))
        })?;
        operator::change(space, PLAIN)?;
        operator::own(space, "mine")?;
        operator::published(space, "mine")?;
        operator::none_restarted(&operator::pods(space)?)
    })
}

/// Pods, by name and UID, by the proxy of the node that they are on.
type ByProxy = BTreeMap<String, Vec<(String, String)>>;

fn by_proxy(space: Space<'_>, pods: &[Value]) -> Result<ByProxy> {
    let mut nodes = ByProxy::new();
    for pod in pods {
        let text = |value: &Value| value.as_str().map(str::to_owned).context("a name");
        let (name, uid) = (text(&pod["metadata"]["name"])?, text(&pod["metadata"]["uid"])?);
        nodes.entry(text(&pod["spec"]["nodeName"])?).or_default().push((name, uid));
    }
    nodes.into_iter().map(|(node, pods)| Ok((proxy_of(space, &node)?, pods))).collect()
}

/// Of how many of these pods the kernel of their node has attachments, and how many the proxy there says that it
/// serves.
fn attached_and_served(space: Space<'_>, proxies: &ByProxy) -> Result<(usize, usize)> {
    let (mut attached, mut served) = (0, 0);
    for (proxy, pods) in proxies {
        // As a cgroup is called under either driver.
        let status = said_by(space, proxy, &["intercept", "status"])?.replace('-', "_");
        attached += pods.iter().filter(|(_, uid)| status.contains(&uid.replace('-', "_"))).count();
        let metrics = said_by(space, proxy, &["probe", "/metrics"])?;
        ensure!(metrics.contains("ctrlmesh_proxy_pods_served"), "{metrics}");
        let epoch = |name| format!("ctrlmesh_proxy_policy_epoch{{pod=\"{}/{name}\"", space.name());
        served += pods.iter().filter(|(name, _)| metrics.contains(&epoch(name))).count();
    }
    Ok((attached, served))
}

/// The proxy of a node, as kubectl names it.
fn proxy_of(space: Space<'_>, node: &str) -> Result<String> {
    let there = format!("--field-selector=spec.nodeName={node},status.phase=Running");
    let named = "--selector=app.kubernetes.io/name=ctrlmesh-node";
    let proxies = in_ours(space.cluster(), &["get", "pods", named, &there, "--output=name"])?;
    let proxy = proxies.lines().next().with_context(|| format!("no proxy runs on {node}"))?;
    Ok(proxy.to_owned())
}

/// What the program of a node's proxy says, in its container.
fn said_by(space: Space<'_>, proxy: &str, arguments: &[&str]) -> Result<String> {
    in_ours(space.cluster(), &[&["exec", proxy, "--", "/ctrlmesh-proxy"], arguments].concat())
}

#[test]
fn a_pod_that_is_not_enrolled_sees_everything() -> Result<()> {
    let _alone = write(&EVERYBODYS);
    mesh::shared().case("beside", |space| {
        operator::deploy(space, PLAIN)?;
        operator::own(space, "mine")?;
        operator::published(space, "mine")?;
        if space.cluster().node().is_some() {
            untouched(space)?;
        }
        operator::change(space, OperatorSpec { enrolled: false, ..PLAIN })?;
        operator::foreign(space, "foreign")?;
        operator::published(space, "foreign")?;
        if space.cluster().node().is_some() {
            let pods = operator::pods(space)?;
            let address = pods[0]["status"]["podIP"].as_str().context("an address")?.to_owned();
            let name = pods[0]["metadata"]["name"].as_str().context("a name")?;
            let requests = mesh::requests(space.cluster(), space.name(), operator::NAME)?;
            let own: Vec<&AuditEvent> = requests.iter().filter(|one| mesh::pod_of(one) == Some(name)).collect();
            ensure!(!own.is_empty() && own.iter().all(|one| one.sources.first() == Some(&address)));
        }
        // It would go on to work on what other tests make.
        operator::end(space)
    })
}

/// Refuses connections of a pod that is not enrolled that the kernel programs, or whoever listens for them, had a part
/// in.
fn untouched(space: Space<'_>) -> Result<()> {
    knocks(space, None)?;
    let node = space.kubectl(&["get", "pod", "knocks", "--output=jsonpath={.spec.nodeName}"])?;
    let proxy = proxy_of(space, &node)?;
    let outcomes = || -> Result<u64> {
        let status = said_by(space, &proxy, &["intercept", "status", "--output=json"])?;
        let status: Value = serde_json::from_str(&status)?;
        let counters = status["counters"].as_object().context("counters")?;
        Ok(counters.values().filter_map(Value::as_u64).sum())
    };
    let (before, first) = (outcomes()?, knocked(space)?);
    ensure!(before > 0, "the enrolled pod beside it is not counted");
    let after = until("300 connections more", || {
        let now = knocked(space)?;
        Ok((count(&now, "made") >= count(&first, "made") + 300).then_some(now))
    })?;
    // The enrolled one makes a few of its own meanwhile.
    let counted = outcomes()? - before;
    ensure!(counted < 100, "{counted} connections counted");
    ensure!(count(&after, "failed") == 0, "{after}");
    space.kubectl(&["delete", "pod", "knocks"]).map(drop)
}

#[test]
fn two_operators_on_one_node_have_each_their_own_policy() -> Result<()> {
    let _others = read(&EVERYBODYS);
    let cluster = mesh::shared();
    cluster.case("one", |one| {
        operator::deploy(one, PLAIN)?;
        cluster.case("other", |other| {
            operator::deploy(other, PLAIN)?;
            for space in [one, other] {
                operator::own(space, "mine")?;
                operator::published(space, "mine")?;
            }
            if cluster.node().is_some() {
                operator::all_asked_for_their_share(one)?;
                operator::all_asked_for_their_share(other)?;
            }
            Ok(())
        })
    })
}

#[test]
fn a_client_that_dials_the_service_name_reaches_the_sidecar() -> Result<()> {
    mesh::shared().case("by-name", |space| {
        operator::deploy(space, OperatorSpec { replicas: 0, ..PLAIN })?;
        operator::own(space, "mine")?;
        operator::foreign(space, "foreign")?;
        let secrets = "/var/run/secrets/kubernetes.io/serviceaccount";
        let url = format!(
            "https://kubernetes.default.svc/apis/web.example.com/v1alpha1/namespaces/{}/websites",
            space.name()
        );
        let get = ["get", &url, &format!("{secrets}/ca.crt"), &format!("{secrets}/token")];
        let container =
            |name: &str, arguments: &[&str]| json!({"name": name, "image": Image::Probe.name(), "args": arguments});
        // What its own init container asks is narrowed, too: the proxy is there before it.
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {
                "name": "asks", "labels": {"app": "operator", "ctrlmesh.kusionstack.io/enable-proxy": "true"},
                "annotations": {"ctrlmesh.kusionstack.io/interception": "env"}},
            "spec": {"serviceAccountName": "operator", "terminationGracePeriodSeconds": 1,
                "initContainers": [container("first", &get)], "containers": [container("probe", &["serve"])]}});
        space.apply(&pod.to_string())?;
        space.wait("pod/asks", "condition=Ready")?;
        let first = space.kubectl(&["logs", "asks", "--container", "first"])?;
        ensure!(first.contains("\"mine\"") && !first.contains("\"foreign\""), "{first}");
        let exec = ["exec", "asks", "--container", "probe", "--", "/probe"];
        let said = space.kubectl(&[&exec[..], &get[..]].concat())?;
        ensure!(said.contains("\"mine\"") && !said.contains("\"foreign\""), "{said}");
        Ok(())
    })
}

#[test]
fn one_can_look_into_an_enrolled_pod_and_reach_its_ports() -> Result<()> {
    mesh::shared().case("into", |space| {
        operator::deploy(space, OperatorSpec { replicas: 0, ..PLAIN })?;
        let pod = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels: {app: operator, ctrlmesh.kusionstack.io/enable-proxy: \"true\"}\n\
            spec:\n  terminationGracePeriodSeconds: 1\n  containers: [{name: probe, image: \"ctrlmesh.dev/probe:0.1.0\", args: [serve]}]\n";
        space.apply(pod)?;
        space.wait("pod/web", "condition=Ready")?;
        let said = space.kubectl(&["exec", "web", "--", "/probe", "get", "http://127.0.0.1:8080/x"])?;
        ensure!(said == "web\n", "{said}");
        let mut follow = space.command(&["logs", "--follow", "web"]).stdout(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(follow.stdout.take().context("output")?).lines();
        let found = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("GET /x")));
        follow.kill()?;
        follow.wait()?;
        ensure!(found.is_some(), "the log is not followed");
        forwarded(space)
    })
}

/// Reaches the pod's port through `kubectl port-forward`.
fn forwarded(space: Space<'_>) -> Result<()> {
    let mut command = space.command(&["port-forward", "web", ":8080"]);
    let mut forward = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let mut output = BufReader::new(forward.stdout.take().context("output")?);
    let mut line = String::new();
    output.read_line(&mut line)?;
    let ask = || -> Result<String> {
        let address = line.strip_prefix("Forwarding from ").context("no address")?;
        let mut stream = TcpStream::connect(address.split(' ').next().context("no address")?)?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = ask();
    forward.kill()?;
    forward.wait()?;
    let answer = answer?;
    ensure!(answer.ends_with("web\n"), "{answer}");
    Ok(())
}

#[test]
fn a_pod_in_its_nodes_network_is_refused_and_told_why() -> Result<()> {
    mesh::shared().case("host-network", |space| {
        let pod = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: host\n  labels: {ctrlmesh.kusionstack.io/enable-proxy: \"true\"}\n\
            spec:\n  hostNetwork: true\n  containers: [{name: probe, image: \"ctrlmesh.dev/probe:0.1.0\", args: [serve]}]\n";
        let refused = space.apply(pod).unwrap_err().to_string();
        ensure!(refused.contains("spec.hostNetwork") && refused.contains("enable-proxy"), "{refused}");
        Ok(())
    })
}
