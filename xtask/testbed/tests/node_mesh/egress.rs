//! What an enrolled pod sends to other servers than the API server, where a CircuitBreaker looks at it.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::Space;
use serde_json::json;

use ctrlmesh_runtime::sync::read;

use crate::from_inside::with_kubectl;
use crate::mesh::client::{self, CLIENT};
use crate::mesh::operator::{self, EVERYBODYS, OperatorSpec, PLAIN};
use crate::mesh::{self, until};

/// The port of the other pod's server.
const PORT: u16 = 8080;

/// Asks as a process of the enrolled pod.
fn ask(space: Space<'_>, url: &str) -> Result<String> {
    space.kubectl(&["exec", CLIENT, "--container", "probe", "--", "/probe", "get", url])
}

/// Why it is not answered.
fn refused(space: Space<'_>, url: &str) -> Result<String> {
    Ok(ask(space, url).err().with_context(|| format!("{url} is answered"))?.to_string())
}

/// Lets the pod ask for one path of the server at `host`, and for nothing else at any port of HTTP and TLS.
fn whitelist(space: Space<'_>, host: &str) -> Result<()> {
    let inside = format!("http://{host}:{PORT}/inside/*");
    let rule = json!({"name": "inside", "interceptType": "Whitelist", "contentType": "Normal",
        "contents": [inside, "https://elsewhere.example.com", "http://elsewhere.example.com"], "methods": ["GET"]});
    let breaker = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "CircuitBreaker",
        "metadata": {"name": "out"},
        "spec": {"selector": {"matchLabels": {"app": "operator"}}, "trafficInterceptRules": [rule]}});
    space.apply(&breaker.to_string())?;
    space.kubectl(&["wait", "circuitbreaker/out", "--for=condition=Programmed", "--timeout=60s"]).map(drop)
}

#[test]
fn a_pod_talks_to_whom_its_rules_let_it_and_to_the_api_server() -> Result<()> {
    let _others = read(&EVERYBODYS);
    let cluster = mesh::shared();
    with_kubectl(cluster)?;
    cluster.case("egress", |space| {
        operator::deploy(space, OperatorSpec { replicas: 0, ..PLAIN })?;
        client::deploy(space)?;
        let address = |pod: &str| space.kubectl(&["get", "pod", pod, "--output=jsonpath={.status.podIP}"]);
        let (web, own) = (address("web")?, address(CLIENT)?);
        let [inside, outside] = ["inside/a", "outside"].map(|path| format!("http://{web}:{PORT}/{path}"));
        ensure!(ask(space, &outside)? == "web\n");
        whitelist(space, &web)?;
        until("the rule to hold", || Ok(ask(space, &outside).is_err().then_some(())))?;
        ensure!(ask(space, &inside)? == "web\n");
        let said = refused(space, &outside)?;
        ensure!(said.contains("403 Forbidden"), "{said}");
        // It comes from the pod itself, as without us.
        let log = space.kubectl(&["logs", "web"])?;
        ensure!(log.contains(&format!("GET /inside/a from {own}:")), "{log}");
        // Its own kubectl still asks the API server, at the port that the rule names.
        let pods = ["exec", CLIENT, "--container", "kubectl", "--", "/kubectl", "get", "pods", "--output=name"];
        ensure!(space.kubectl(&pods)?.contains("pod/web"));
        space.kubectl(&["delete", "circuitbreaker", "out"])?;
        until("the rule to be gone", || Ok(ask(space, &outside).ok().map(drop)))
    })
}
