//! What an enrolled pod sends to other servers than the API server, where a CircuitBreaker looks at it.

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::Space;
use serde_json::{Value, json};

use ctrlmesh_runtime::sync::read;

use crate::from_inside::with_kubectl;
use crate::mesh::client::{self, CLIENT};
use crate::mesh::operator::{self, EVERYBODYS, OperatorSpec, PLAIN};
use crate::mesh::{self, until};

/// The port of the other pod's server.
const PORT: u16 = 8080;

/// The other pod's server, by the name of its Service.
const BY_NAME: &str = "http://web:8080/outside";

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

/// Asks through the pod's forward proxy.
fn through(space: Space<'_>, url: &str, more: &[&str]) -> Result<String> {
    let proxy = ["exec", CLIENT, "--container", "probe", "--", "/probe", "through", "http://127.0.0.1:15002", url];
    space.kubectl(&[&proxy, more].concat())
}

fn talks_to_whom_it_may(space: Space<'_>, annotations: &Value) -> Result<()> {
    operator::deploy(space, OperatorSpec { replicas: 0, ..PLAIN })?;
    client::deploy_annotated(space, annotations)?;
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
    let messages = ["get", "events", "--field-selector=reason=EgressRefused", "--output=jsonpath={.items[*].message}"];
    let told = format!("trafficInterceptRule \"inside\" refuses what is sent by pod {CLIENT} ({web}:{PORT})");
    until("the event", || Ok(space.kubectl(&messages)?.contains(&told).then_some(())))?;
    forwards_to_whom_it_may(space, &inside, &outside)?;
    until("the rule to be gone", || Ok(ask(space, &outside).ok().map(drop)))
}

/// The pod gets a forward proxy while it runs, and the rule goes.
fn forwards_to_whom_it_may(space: Space<'_>, inside: &str, outside: &str) -> Result<()> {
    ensure!(through(space, inside, &[]).is_err());
    space.kubectl(&["annotate", "pod", CLIENT, "ctrlmesh.kusionstack.io/forward-proxy=true"])?;
    until("the forward proxy", || Ok(through(space, inside, &[]).ok().map(drop)))?;
    let said = through(space, outside, &[]).err().context("answered")?.to_string();
    ensure!(said.contains("403 Forbidden"), "{said}");
    // The pod trusts the mesh's certificates for the API server, and no others: its proxy answers.
    let account = "/var/run/secrets/kubernetes.io/serviceaccount";
    let credentials = ["ca.crt", "token"].map(|file| format!("{account}/{file}"));
    let pods = format!("https://kubernetes.default.svc/api/v1/namespaces/{}/pods", space.name());
    let listed = through(space, &pods, &credentials.each_ref().map(String::as_str))?;
    ensure!(listed.contains("PodList"), "{listed}");
    // The same server has another name for the rule.
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": PORT}]}});
    space.apply(&service.to_string())?;
    let said = through(space, BY_NAME, &[]).err().context("answered")?.to_string();
    ensure!(said.contains("403 Forbidden"), "{said}");
    space.kubectl(&["delete", "circuitbreaker", "out"])?;
    until("the name to be found", || Ok(through(space, BY_NAME, &[]).ok().filter(|said| said == "web\n").map(drop)))?;
    space.kubectl(&["annotate", "pod", CLIENT, "ctrlmesh.kusionstack.io/forward-proxy-"])?;
    until("the forward proxy to be gone", || Ok(through(space, inside, &[]).is_err().then_some(())))
}

#[test]
fn a_pod_talks_to_whom_its_rules_let_it_and_to_the_api_server() -> Result<()> {
    let _others = read(&EVERYBODYS);
    let cluster = mesh::shared();
    with_kubectl(cluster)?;
    cluster.case("egress", |space| talks_to_whom_it_may(space, &json!({})))
}

#[test]
fn so_does_one_with_its_proxy_inside() -> Result<()> {
    let _others = read(&EVERYBODYS);
    let cluster = mesh::shared();
    with_kubectl(cluster)?;
    let sidecar = json!({"ctrlmesh.kusionstack.io/sidecar": "true"});
    cluster.case("egress-sidecar", |space| talks_to_whom_it_may(space, &sidecar))
}
