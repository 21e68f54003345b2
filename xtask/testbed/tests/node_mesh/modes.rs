//! Pods as their users enrol them: many at once, with a proxy of the node or one of their own, beside pods that are not
//! enrolled; and what nobody may do.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Stdio;
use std::sync::PoisonError;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::Space;
use serde_json::Value;

use crate::mesh::{self, NAMESPACE, kubectl, until};
use crate::operator::{self, EVERYBODYS, Wish};

/// One pod with the node's proxy.
const PLAIN: Wish<'static> = Wish { replicas: 1, enrolled: true, annotations: &[] };

/// How many pods start; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
fn starts() -> usize {
    if std::env::var_os("CTRLMESH_TEST_FULL").is_some() { 100 } else { 10 }
}

#[test]
fn no_pod_is_restarted_and_no_request_passes_the_proxy_however_often_one_starts() -> Result<()> {
    let _others = EVERYBODYS.read().unwrap_or_else(PoisonError::into_inner);
    mesh::shared().case("starts", |space| {
        operator::deploy(space, Wish { replicas: 5, ..PLAIN })?;
        operator::own(space, "mine")?;
        operator::foreign(space, "foreign")?;
        operator::published(space, "mine")?;
        let mut seen = BTreeSet::new();
        loop {
            let pods = operator::pods(space)?;
            operator::none_restarted(&pods)?;
            seen.extend(
                pods.iter().filter_map(|pod| pod["metadata"]["uid"].as_str().map(str::to_owned)),
            );
            if seen.len() >= starts() {
                break;
            }
            space.kubectl(&["rollout", "restart", "deployment/operator"])?;
            space.kubectl(&["rollout", "status", "deployment/operator", "--timeout=300s"])?;
        }
        ensure!(!operator::is_published(space, "foreign")?, "another's website was worked on");
        if space.cluster().node().is_some() {
            let requests = operator::all_came_from(space, &[mesh::address(space.cluster())?])?;
            ensure!(requests >= seen.len(), "{requests} requests of {} pods", seen.len());
        }
        Ok(())
    })
}

#[test]
fn sixty_pods_that_come_at_once_are_all_served_and_all_let_go_of() -> Result<()> {
    // They take the whole machine.
    let _alone = EVERYBODYS.write().unwrap_or_else(PoisonError::into_inner);
    mesh::shared().case("sixty", |space| {
        operator::deploy(space, Wish { replicas: 60, ..PLAIN })?;
        operator::none_restarted(&operator::pods(space)?)?;
        let attached = || -> Result<usize> {
            let metrics = node_metrics(space)?;
            let served =
                |line: &'_ str| Some(line.strip_prefix("ctrlmesh_proxy_pods_served ")?.to_owned());
            let count = metrics.lines().find_map(served);
            Ok(count.with_context(|| metrics.clone())?.parse()?)
        };
        ensure!(attached()? >= 60, "{} are served", attached()?);
        operator::end(space)?;
        until("the proxy to let go of them", || Ok((attached()? < 60).then_some(())))
    })
}

/// What the node's proxy counts.
fn node_metrics(space: Space<'_>) -> Result<String> {
    let url = format!("http://{}:5441/metrics", mesh::address(space.cluster())?);
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: asks}\nspec:\n  terminationGracePeriodSeconds: 1\n  \
        containers: [{name: probe, image: \"ctrlmesh.dev/probe:0.1.0\", args: [serve]}]\n";
    space.apply(pod)?;
    space.wait("pod/asks", "condition=Ready")?;
    space.kubectl(&["exec", "asks", "--", "/probe", "get", &url])
}

#[test]
fn a_pod_that_is_not_enrolled_works_beside_one_that_is_and_sees_everything() -> Result<()> {
    let _alone = EVERYBODYS.write().unwrap_or_else(PoisonError::into_inner);
    mesh::shared().case("beside", |space| {
        operator::deploy(space, PLAIN)?;
        operator::own(space, "mine")?;
        operator::published(space, "mine")?;
        operator::change(space, Wish { enrolled: false, ..PLAIN })?;
        operator::foreign(space, "foreign")?;
        operator::published(space, "foreign")?;
        if space.cluster().node().is_some() {
            let pods = operator::pods(space)?;
            let address = pods[0]["status"]["podIP"].as_str().context("an address")?.to_owned();
            let name = pods[0]["metadata"]["name"].as_str().context("a name")?;
            let requests = mesh::requests(space.cluster(), space.name(), operator::NAME)?;
            let own: Vec<&Value> =
                requests.iter().filter(|one| mesh::pod_of(one) == Some(name)).collect();
            ensure!(
                !own.is_empty() && own.iter().all(|one| one["sourceIPs"][0] == address.as_str())
            );
        }
        // It would go on to work on what other tests make.
        operator::end(space)
    })
}

#[test]
fn two_operators_on_one_node_have_each_their_own_policy() -> Result<()> {
    let _others = EVERYBODYS.read().unwrap_or_else(PoisonError::into_inner);
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

fn works_with(name: &str, annotations: &[(&str, &str)], inside: bool) -> Result<()> {
    let _others = EVERYBODYS.read().unwrap_or_else(PoisonError::into_inner);
    mesh::shared().case(name, |space| {
        let restricted = "pod-security.kubernetes.io/enforce=restricted";
        space.kubectl(&["label", "namespace", space.name(), restricted])?;
        operator::deploy(space, Wish { annotations, ..PLAIN })?;
        operator::own(space, "mine")?;
        operator::foreign(space, "foreign")?;
        operator::published(space, "mine")?;
        ensure!(!operator::is_published(space, "foreign")?, "another's website was worked on");
        let pods = operator::pods(space)?;
        operator::none_restarted(&pods)?;
        let init = pods[0]["spec"]["initContainers"].as_array().map_or(0, Vec::len);
        ensure!(init == usize::from(inside), "{init} containers before the operator's");
        if space.cluster().node().is_some() {
            operator::all_asked_for_their_share(space)?;
        }
        // The sidecar ends last, and the pod with it.
        space.kubectl(&["delete", "pod", "-l", "app=operator", "--timeout=60s"]).map(drop)
    })
}

#[test]
fn an_operator_works_with_a_proxy_inside_its_pod_that_variables_name() -> Result<()> {
    works_with("env", &[("interception", "env")], true)
}

#[test]
fn an_operator_works_with_a_proxy_inside_its_pod_that_a_kubeconfig_names() -> Result<()> {
    works_with("kubeconfig", &[("interception", "kubeconfig")], true)
}

#[test]
fn an_operator_works_with_a_proxy_inside_its_pod_that_the_kernel_sends_to() -> Result<()> {
    works_with("ebpf-inside", &[("sidecar", "true")], true)
}

#[test]
fn a_client_that_dials_the_services_name_is_served_by_the_proxy_inside() -> Result<()> {
    mesh::shared().case("by-name", |space| {
        operator::deploy(space, Wish { replicas: 0, ..PLAIN })?;
        let pod = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: asks\n  labels: {app: operator, ctrlmesh.kusionstack.io/enable-proxy: \"true\"}\n  \
            annotations: {ctrlmesh.kusionstack.io/interception: env}\nspec:\n  serviceAccountName: operator\n  terminationGracePeriodSeconds: 1\n  \
            containers: [{name: probe, image: \"ctrlmesh.dev/probe:0.1.0\", args: [serve]}]\n";
        space.apply(pod)?;
        space.wait("pod/asks", "condition=Ready")?;
        operator::own(space, "mine")?;
        operator::foreign(space, "foreign")?;
        let secrets = "/var/run/secrets/kubernetes.io/serviceaccount";
        let url = format!("https://kubernetes.default.svc/apis/web.example.com/v1alpha1/namespaces/{}/websites", space.name());
        let (ca, token) = (format!("{secrets}/ca.crt"), format!("{secrets}/token"));
        let get = ["exec", "asks", "--container", "probe", "--", "/probe", "get", &url, &ca, &token];
        let said = space.kubectl(&get)?;
        ensure!(said.contains("\"mine\"") && !said.contains("\"foreign\""), "{said}");
        Ok(())
    })
}

#[test]
fn one_can_look_into_an_enrolled_pod_and_reach_its_ports() -> Result<()> {
    mesh::shared().case("into", |space| {
        operator::deploy(space, Wish { replicas: 0, ..PLAIN })?;
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

/// What neither manager nor node proxies may do.
const DENIED: [&str; 20] = [
    "get secrets --all-namespaces",
    "list secrets --all-namespaces",
    "get secret/other -n ctrlmesh-system",
    "list secrets -n ctrlmesh-system",
    "delete secret/ctrlmesh-ca -n ctrlmesh-system",
    "get configmaps --all-namespaces",
    "patch configmap/other -n default",
    "create pods --all-namespaces",
    "delete pods --all-namespaces",
    "create pods/exec --all-namespaces",
    "patch nodes",
    "get nodes",
    "delete namespaces",
    "create serviceaccounts/token --all-namespaces",
    "impersonate users",
    "escalate clusterroles",
    "create clusterrolebindings",
    "patch deployments --all-namespaces",
    "update validatingwebhookconfiguration/other",
    "delete customresourcedefinitions",
];

/// What node proxies may not do, though the manager may.
const DENIED_ON_NODES: [&str; 7] = [
    "get pods --all-namespaces",
    "get shardingconfigs --all-namespaces",
    "create tokenreviews",
    "get secret/ctrlmesh-ca -n ctrlmesh-system",
    "patch daemonset/ctrlmesh-node -n ctrlmesh-system",
    "list daemonsets -n ctrlmesh-system",
    "get namespace/default",
];

/// What the manager may do.
const NEEDED: [&str; 4] = [
    "create tokenreviews",
    "get secret/ctrlmesh-ca -n ctrlmesh-system",
    "watch pods --all-namespaces",
    "patch configmap/ctrlmesh-root-ca -n default",
];

#[test]
fn our_accounts_may_do_what_they_need_and_what_they_do_not_need_they_may_not() -> Result<()> {
    let cluster = mesh::shared();
    let may = |account: &str, question: &str| -> Result<bool> {
        let user = format!("--as=system:serviceaccount:{NAMESPACE}:{account}");
        let mut ask = cluster.kubectl();
        let output = ask.args(["auth", "can-i", &user]).args(question.split(' ')).output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        // Whatever else it says, such as an error, is neither.
        ensure!(["yes", "no"].contains(&said.trim()), "{question}: {output:?}");
        Ok(said.trim() == "yes")
    };
    for denied in DENIED {
        for account in ["ctrlmesh-manager", "ctrlmesh-node"] {
            ensure!(!may(account, denied)?, "{account} may {denied}");
        }
    }
    for denied in DENIED_ON_NODES {
        ensure!(!may("ctrlmesh-node", denied)?, "a node's proxy may {denied}");
    }
    for needed in NEEDED {
        ensure!(may("ctrlmesh-manager", needed)?, "the manager may not {needed}");
    }
    ensure!(may("ctrlmesh-node", "get daemonset/ctrlmesh-node -n ctrlmesh-system")?);
    // It never had to be refused anything.
    let selector = "--selector=app.kubernetes.io/name=ctrlmesh-manager";
    let logs = kubectl(cluster, &["--namespace", NAMESPACE, "logs", selector, "--tail=-1"])?;
    let refused = logs.lines().find(|line| line.contains("is forbidden"));
    ensure!(refused.is_none(), "{refused:?}");
    Ok(())
}

#[test]
fn no_webhook_is_asked_about_what_the_cluster_itself_needs() -> Result<()> {
    let cluster = mesh::shared();
    for kind in ["validatingwebhookconfiguration", "mutatingwebhookconfiguration"] {
        let configuration = mesh::json(cluster, &["get", kind, "ctrlmesh"])?;
        for webhook in configuration["webhooks"].as_array().context("webhooks")? {
            let needed = &webhook["namespaceSelector"]["matchExpressions"][0];
            ensure!(
                needed["operator"] == "NotIn" && needed["key"] == "kubernetes.io/metadata.name"
            );
            for namespace in ["kube-system", NAMESPACE] {
                let values = needed["values"].as_array().context("namespaces")?;
                ensure!(values.iter().any(|one| one == namespace), "{webhook}");
            }
        }
    }
    until("the webhooks to believe the manager", || {
        let configuration =
            mesh::json(cluster, &["get", "mutatingwebhookconfiguration", "ctrlmesh"])?;
        Ok(configuration["webhooks"][0]["clientConfig"]["caBundle"].as_str().map(drop))
    })
}
