//! What an enrolled pod sends to the API server past its proxy, by ways that the kernel cannot see where it connects.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_runtime::sync::read;
use ctrlmesh_testbed::Space;
use serde_json::{Value, json};

use crate::from_inside::{endpoint, with_kubectl};
use crate::mesh::client::{self, CLIENT};
use crate::mesh::operator::{self, EVERYBODYS, OperatorSpec, PLAIN};
use crate::mesh::past::dropped;
use crate::mesh::{self, until};

/// A Service that somebody made lead to the API server.
const ELSEWHERE: &str = "elsewhere";

/// What a container says of a request without TLS to a server: one that is reached wants TLS.
fn asked(space: Space<'_>, pod: &[&str], server: &str) -> Result<String> {
    let get = ["--", "/probe", "get", &format!("http://{server}/")];
    let output = space.command(&[&["exec"], pod, &get].concat()).output()?;
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

fn is_reached(said: &str) -> bool {
    said.contains("400 Bad Request")
}

/// Makes the Service; returns its address and port.
fn lead_elsewhere(space: Space<'_>, (host, port): &(String, u64)) -> Result<String> {
    let ports = json!([{"name": "https", "port": 443, "targetPort": port}]);
    let endpoints = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": ELSEWHERE, "labels": {"kubernetes.io/service-name": ELSEWHERE}},
        "endpoints": [{"addresses": [host]}], "ports": [{"name": "https", "port": port}],
    });
    let service =
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": ELSEWHERE}, "spec": {"ports": ports}});
    space.apply(&json!({"apiVersion": "v1", "kind": "List", "items": [service, endpoints]}).to_string())?;
    let address = space.kubectl(&["get", "service", ELSEWHERE, "--output=jsonpath={.spec.clusterIP}"])?;
    Ok(format!("{address}:443"))
}

fn is_told(space: Space<'_>) -> Result<bool> {
    let events = space.kubectl(&["get", "events", "--output=json"])?;
    let events: Value = serde_json::from_str(&events)?;
    let mut events = events["items"].as_array().context("events")?.iter();
    Ok(events.any(|event| event["reason"] == "BypassDropped" && event["involvedObject"]["name"] == CLIENT))
}

#[test]
fn what_a_pod_sends_to_the_api_server_past_its_proxy_is_dropped() -> Result<()> {
    let _others = read(&EVERYBODYS);
    let cluster = mesh::shared();
    with_kubectl(cluster)?;
    cluster.case("bypass", |space| {
        operator::deploy(space, OperatorSpec { replicas: 0, ..PLAIN })?;
        client::deploy(space)?;
        let server = endpoint(cluster)?;
        let elsewhere = lead_elsewhere(space, &server)?;
        let (web, enrolled) = (["web"], [CLIENT, "--container=probe"]);
        until("the Service to lead to the API server", || {
            Ok(asked(space, &web, &elsewhere).is_ok_and(|said| is_reached(&said)).then_some(()))
        })?;
        let by_service = asked(space, &enrolled, &elsewhere)?;
        ensure!(by_service.contains("exceeded"), "by a Service: {by_service}");
        until("the node to count it", || Ok(dropped(space)?.contains_key(CLIENT).then_some(())))?;
        until("an event that names the pod", || Ok(is_told(space)?.then_some(())))?;
        if cluster.node().is_some() {
            // The bridge's: another address of the machine on which the API server is.
            let pod = space.kubectl(&["get", "pod", CLIENT, "--output=jsonpath={.status.podIP}"])?;
            let bridge = pod.rsplit_once('.').context("an IPv4 address")?.0.to_owned() + ".1";
            let bridge = format!("{bridge}:{}", server.1);
            let said = asked(space, &web, &bridge)?;
            ensure!(is_reached(&said), "the other pod, by {bridge}: {said}");
            let said = asked(space, &enrolled, &bridge)?;
            ensure!(said.contains("exceeded"), "by {bridge}: {said}");
        }
        ensure!(!dropped(space)?.contains_key("web"), "a pod that is not enrolled goes where it will");
        // What it asks of its proxy is answered all the same.
        let get = ["exec", CLIENT, "--container", "kubectl", "--", "/kubectl", "get", "pod", "web"];
        space.kubectl(&get).map(drop)
    })
}
