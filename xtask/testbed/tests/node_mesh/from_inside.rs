//! What people and programs do with pods from within a pod that is enrolled: exec, logs, port-forward, as kubectl does
//! it.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_runtime::sync::read;
use ctrlmesh_testbed::{Cluster, Space};
use xtask::images::{self, Image};

use crate::mesh::client::{self, CLIENT};
use crate::mesh::operator::{self, EVERYBODYS, NAME, OperatorSpec, PLAIN};
use crate::mesh::{self, until};

/// What kubectl in the pod says.
fn inside(space: Space<'_>, arguments: &[&str]) -> Result<String> {
    let exec = ["exec", CLIENT, "--container", "kubectl", "--", "/kubectl"];
    space.kubectl(&[&exec[..], arguments].concat())
}

/// Has the node know the image with kubectl.
pub(crate) fn with_kubectl(cluster: &Cluster) -> Result<()> {
    let Some(node) = cluster.node() else { return Ok(()) };
    for archive in images::build(&[Image::Kubectl], true)? {
        node.load(&archive)?;
    }
    Ok(())
}

/// Where the API server itself listens, past its Service.
pub(crate) fn endpoint(cluster: &Cluster) -> Result<(String, u64)> {
    let slices = ["--namespace=default", "get", "endpointslices"];
    let slices = mesh::json(cluster, &[&slices[..], &["--selector=kubernetes.io/service-name=kubernetes"]].concat())?;
    let slice = &slices["items"][0];
    let address = slice["endpoints"][0]["addresses"][0].as_str().context("an endpoint")?;
    Ok((address.to_owned(), slice["ports"][0]["port"].as_u64().context("its port")?))
}

#[test]
fn dialling_an_api_server_endpoint_shows_no_more() -> Result<()> {
    let _others = read(&EVERYBODYS);
    let cluster = mesh::shared();
    with_kubectl(cluster)?;
    let (host, port) = endpoint(cluster)?;
    cluster.case("endpoint", |space| {
        operator::deploy(space, OperatorSpec { replicas: 0, ..PLAIN })?;
        operator::own(space, "mine")?;
        operator::foreign(space, "foreign")?;
        // Who fails open believes the API server, too: whatever passes shows everything.
        for annotations in [&[][..], &[("fail-open", "true")]] {
            let wanted = OperatorSpec { annotations, ..PLAIN };
            client::dials(space, wanted, &host, port)?;
            let get = ["get", "websites", "--output=name"];
            until("its share to be all that is seen", || {
                let said = inside(space, &get).ok();
                Ok(said.filter(|said| said == "website.web.example.com/mine\n"))
            })?;
            space.kubectl(&["delete", "pod", CLIENT, "--timeout=120s"])?;
        }
        Ok(())
    })
}

#[test]
fn exec_logs_and_port_forward_work_from_an_enrolled_pod() -> Result<()> {
    let _others = read(&EVERYBODYS);
    let cluster = mesh::shared();
    with_kubectl(cluster)?;
    cluster.case("from-inside", |space| {
        operator::deploy(space, OperatorSpec { replicas: 0, ..PLAIN })?;
        client::deploy(space)?;
        let get = ["exec", "web", "--", "/probe", "get", "http://127.0.0.1:8080/said"];
        let said = until("the proxy to serve", || Ok(inside(space, &get).ok()))?;
        ensure!(said == "web\n", "{said}");
        let logs = inside(space, &["logs", "web"])?;
        ensure!(logs.contains("GET /said from 127.0.0.1"), "{logs}");
        follows(space)?;
        forwards(space)?;
        if cluster.node().is_some() {
            operator::all_came_from(space, &[mesh::address(cluster)?])?;
            let requests = mesh::requests(cluster, space.name(), NAME)?;
            for looked in ["exec", "log", "portforward"] {
                let its =
                    requests.iter().filter(|one| one.object.subresource == looked && mesh::pod_of(one) == Some(CLIENT));
                ensure!(its.count() > 0, "no {looked} from within");
            }
        }
        Ok(())
    })
}

/// A log is followed: what is said after it was opened is seen.
fn follows(space: Space<'_>) -> Result<()> {
    let exec = ["exec", CLIENT, "--container", "kubectl", "--", "/kubectl"];
    let follow = ["logs", "--follow", "--tail=0", "web"];
    let mut command = space.command(&[&exec[..], &follow].concat());
    let mut follow = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let lines = BufReader::new(follow.stdout.take().context("output")?).lines();
    let seen = std::thread::spawn(move || lines.map_while(Result::ok).any(|line| line.contains("GET /followed")));
    until("the line", || {
        let get = ["exec", "web", "--", "/probe", "get", "http://127.0.0.1:8080/followed"];
        space.kubectl(&get)?;
        Ok(seen.is_finished().then_some(()))
    })
    .and_then(|()| {
        follow.kill()?;
        follow.wait()?;
        ensure!(seen.join().unwrap_or_default(), "the log is not followed");
        Ok(())
    })
}

/// A port of the one pod is one of the other's.
fn forwards(space: Space<'_>) -> Result<()> {
    let exec = ["exec", CLIENT, "--container", "kubectl", "--", "/kubectl"];
    let mut command = space.command(&[&exec[..], &["port-forward", "web", "8090:8080"]].concat());
    let mut forward = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let get = ["exec", CLIENT, "--container", "probe", "--", "/probe", "get", "http://127.0.0.1:8090/"];
    let said = until("the port", || Ok(space.kubectl(&get).ok()));
    forward.kill()?;
    forward.wait()?;
    let said = said?;
    ensure!(said == "web\n", "{said}");
    Ok(())
}
