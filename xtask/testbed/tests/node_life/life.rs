//! What lives, dies: node proxies that are killed, replaced and removed, managers, kubelet, containerd and the
//! whole node. What is enrolled stays enrolled, and nothing passes the proxy.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::{Cluster, Node, Program, Space};
use serde_json::{Value, json};
use xtask::images::Image;

use crate::mesh::operator::{self, INSIDE, OperatorSpec, PLAIN, Watches, goes_on};
use crate::mesh::past::Past;
use crate::mesh::{self, NAMESPACE, in_ours, kill_in, kubectl, until, within};

/// Where connections are taken in a pod's network namespace.
const REDIRECTED: u16 = 15_001;

/// No request came from elsewhere than the node's proxy, and none of them asked for more than the operator's share.
fn nothing_passed(space: Space<'_>) -> Result<()> {
    operator::all_asked_for_their_share(space)?;
    operator::all_came_from(space, &[mesh::address(space.cluster())?]).map(drop)
}

/// Whether somebody listens where we take connections in the network namespace of the operator's pod.
fn listens(space: Space<'_>, node: &Node) -> Result<bool> {
    let pods = operator::pods(space)?;
    let within = within(pods[0]["metadata"]["uid"].as_str().context("a UID")?);
    let each = r#"for one in /proc/[0-9]*; do
        grep -q "$0" "$one/cgroup" && cat "$one/net/tcp" "$one/net/tcp6" && break; done"#;
    let output = node.command("sh")?.args(["-c", each, &within]).output()?;
    let sockets = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(sockets.contains("local_address"), "no process of the pod is there");
    // The local address and, after the remote one, the state: LISTEN (`proc_pid_net(5)`).
    let ours = format!(":{REDIRECTED:04X}");
    let mut fields = sockets.lines().map(|line| line.split_whitespace().skip(1).collect());
    Ok(fields.any(|of: Vec<&str>| matches!(of[..], [at, _, "0A", ..] if at.ends_with(&ours))))
}

/// Kills every process of a program of ours with SIGKILL: nobody is asked, and nothing is handed over.
pub(crate) fn kill(node: &Node, program: &str) -> Result<()> {
    kill_in(node, "", program)
}

/// How often each container of a pod was restarted, once all of them run.
fn restarts(pod: &Value) -> Option<BTreeMap<String, u64>> {
    let kinds = ["initContainerStatuses", "containerStatuses"];
    let all = kinds.iter().filter_map(|kind| pod["status"][kind].as_array()).flatten();
    all.map(|one| {
        let running = one["ready"] == true;
        running.then_some((one["name"].as_str()?.to_owned(), one["restartCount"].as_u64()?))
    })
    .collect()
}

/// Kills the program of a container of the operator's pod: that goes on, and no other container of it is restarted, but
/// for an operator that ends by itself because it could not renew its lock for ten seconds, while the proxy was away.
fn container_dies(space: Space<'_>, container: &str) -> Result<()> {
    let program = if container == "manager" { "example-operator" } else { container };
    // It may work before the kubelet says that it is ready.
    let (pods, mut expected) = until("all containers to be ready", || {
        let pods = operator::pods(space)?;
        Ok(restarts(&pods[0]).map(|expected| (pods, expected)))
    })?;
    let uid = pods[0]["metadata"]["uid"].as_str().context("a UID")?;
    *expected.get_mut(container).context("a container")? += 1;
    kill_in(space.cluster().node().context("a node")?, uid, program)?;
    goes_on(space, &format!("after-a-dead-{program}"))?;
    let now = until("the container to run again", || {
        let pods = operator::pods(space)?;
        ensure!(pods.len() == 1 && pods[0]["metadata"]["uid"] == uid, "another pod: {pods:?}");
        Ok(restarts(&pods[0]).filter(|now| now[container] >= expected[container]))
    })?;
    let as_expected = |(name, restarts): (&String, &u64)| {
        let may_end = container != "manager" && name == "manager";
        *restarts == expected[name] || may_end && *restarts == expected[name] + 1
    };
    ensure!(now.iter().all(as_expected), "{now:?}, and not {expected:?}");
    Ok(())
}

#[test]
fn pods_survive_kills_of_every_program_and_new_node_proxies() -> Result<()> {
    let cluster = mesh::alone()?;
    let node = cluster.node().context("a node")?;
    cluster.case("killed", |space| {
        operator::deploy(space, PLAIN)?;
        goes_on(space, "first")?;
        // Not before: on a busy node a container may begin before its pod is attached (docs/known-gaps.md).
        let mut past = Past::from_now(space)?;
        for name in ["ctrlmesh-node", "ctrlmesh-manager"] {
            let selector = format!("--selector=app.kubernetes.io/name={name}");
            in_ours(&cluster, &["delete", "pod", &selector, "--grace-period=0", "--force"])?;
            goes_on(space, &format!("after-{name}"))?;
        }
        mesh::ready(&cluster)?;
        for program in ["ctrlmesh-proxy", "ctrlmesh-manager"] {
            kill(node, program)?;
            goes_on(space, &format!("after-a-dead-{program}"))?;
        }
        mesh::ready(&cluster)?;
        the_webhooks_come_to_believe_the_manager_again(&cluster)?;
        // What comes next makes its pods anew.
        let pods = operator::pods(space)?;
        operator::none_restarted(&pods)?;
        past.nobody(&pods)?;
        the_manager_is_found_at_another_address(space)?;
        for program in [Program::Kubelet, Program::Containerd] {
            node.kill(program)?;
            goes_on(space, &format!("after-{program:?}").to_lowercase())?;
            // One that is there does not need them; one that begins does.
            operator::renewed(space)?;
            goes_on(space, &format!("begun-after-{program:?}").to_lowercase())?;
        }
        operator::none_restarted(&operator::pods(space)?)?;
        // Another version of it: the pod goes on, and so do its links and what it watches.
        let watches = Watches::from_now(space)?;
        mesh::change_proxies(&cluster, &json!({"metadata": {"annotations": {"version": "next"}}}))?;
        goes_on(space, "during-the-update")?;
        mesh::ready(&cluster)?;
        watches.resumed()?;
        let watches = Watches::from_now(space)?;
        in_ours(&cluster, &["rollout", "undo", "daemonset/ctrlmesh-node"])?;
        mesh::ready(&cluster)?;
        watches.resumed()?;
        goes_on(space, "after-the-rollback")?;
        operator::none_restarted(&operator::pods(space)?)?;
        nothing_passed(space)
    })?;
    mesh::ready(&cluster)?;
    containers_of_enrolled_pods_restart(&cluster)?;
    cluster.case("locked-out", nobody_else_waits_for_the_manager)
}

/// The operator's, and that of the proxy inside its pod, whose own connections the kernel has to let pass again.
fn containers_of_enrolled_pods_restart(cluster: &Cluster) -> Result<()> {
    cluster.case("restarted", |space| {
        operator::deploy(space, PLAIN)?;
        goes_on(space, "first")?;
        container_dies(space, "manager")?;
        nothing_passed(space)
    })?;
    cluster.case("restarted-inside", |space| {
        operator::deploy(space, INSIDE)?;
        goes_on(space, "first")?;
        for container in ["manager", "ctrlmesh-proxy"] {
            container_dies(space, container)?;
            // What the proxy asks comes from the pod's address, as what passes it would.
            operator::all_asked_for_their_share(space)?;
        }
        Ok(())
    })
}

/// Its Service is made anew, and leads from elsewhere than node proxies were told when they began: a new pod gets its
/// share all the same.
fn the_manager_is_found_at_another_address(space: Space<'_>) -> Result<()> {
    let cluster = space.cluster();
    let address = "jsonpath={.spec.clusterIP}";
    let before = in_ours(cluster, &["get", "service/ctrlmesh-manager", "--output", address])?;
    in_ours(cluster, &["delete", "service/ctrlmesh-manager"])?;
    // Nobody listens there, and the Service cannot get it again.
    in_ours(cluster, &["create", "service", "clusterip", "in-the-way", "--tcp=1:1", "--clusterip", &before])?;
    let service = mesh::checkout("deploy/manager/service.yaml").display().to_string();
    in_ours(cluster, &["apply", "--filename", &service])?;
    in_ours(cluster, &["rollout", "restart", "deployment/ctrlmesh-manager"])?;
    mesh::ready(cluster)?;
    space.kubectl(&["delete", "pod", "--selector=app=operator"])?;
    goes_on(space, "after-another-address")?;
    in_ours(cluster, &["delete", "service/in-the-way"]).map(drop)
}

/// Though there are others with our label, which the manager may not change.
fn the_webhooks_come_to_believe_the_manager_again(cluster: &Cluster) -> Result<()> {
    let foreign = "apiVersion: admissionregistration.k8s.io/v1\nkind: ValidatingWebhookConfiguration\n\
        metadata: {name: a-foreign, labels: {app.kubernetes.io/part-of: ctrlmesh}}\nwebhooks:\n\
        - {name: a.example.com, clientConfig: {url: \"https://127.0.0.1:1/\"}, sideEffects: None, failurePolicy: Ignore,\n  \
        admissionReviewVersions: [v1], rules: [{apiGroups: [a.example.com], apiVersions: [v1], resources: [none], operations: [CREATE]}]}\n";
    cluster.ask(&["apply", "--filename", "-"], foreign)?;
    let bundle = "jsonpath={.webhooks[0].clientConfig.caBundle}";
    let forget = r#"[{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]"#;
    let kinds = ["validatingwebhookconfiguration", "mutatingwebhookconfiguration"];
    for kind in kinds {
        kubectl(cluster, &["patch", kind, "ctrlmesh", "--type=json", "--patch", forget])?;
    }
    for kind in kinds {
        until("the webhooks to believe the manager", || {
            let known = kubectl(cluster, &["get", kind, "ctrlmesh", "--output", bundle])?;
            Ok((!known.is_empty()).then_some(()))
        })?;
    }
    kubectl(cluster, &["delete", kinds[0], "a-foreign"]).map(drop)
}

/// While no manager is there, enrolled pods are refused, but not those that the cluster and the manager itself need.
fn nobody_else_waits_for_the_manager(space: Space<'_>) -> Result<()> {
    let cluster = space.cluster();
    let labels = json!({"ctrlmesh.kusionstack.io/enable-proxy": "true"});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "needed", "labels": labels}, "spec": {
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "probe", "image": Image::Probe.name(), "args": ["serve"]}]}});
    let create = |namespace: &str| {
        let create = ["--namespace", namespace, "create", "--filename", "-"];
        cluster.ask(&create, &pod.to_string())
    };
    in_ours(cluster, &["scale", "deployment/ctrlmesh-manager", "--replicas=0"])?;
    let managers = "--selector=app.kubernetes.io/name=ctrlmesh-manager";
    in_ours(cluster, &["wait", "pod", managers, "--for=delete", "--timeout=120s"])?;
    for namespace in ["kube-system", NAMESPACE] {
        create(namespace)?;
        kubectl(cluster, &["--namespace", namespace, "delete", "pod", "needed"])?;
    }
    let refused = create(space.name()).err().context("a pod that nobody enrolled")?.to_string();
    ensure!(refused.contains("failed calling webhook"), "{refused}");
    in_ours(cluster, &["scale", "deployment/ctrlmesh-manager", "--replicas=2"])?;
    mesh::ready(cluster)?;
    until("pods to be enrolled again", || Ok(create(space.name()).ok().map(drop)))
}

#[test]
fn pods_come_back_enrolled_after_a_power_cut() -> Result<()> {
    let mut cluster = mesh::alone()?;
    let result = cut_and_look(&mut cluster);
    cluster.explained(&format!("power-cut-{}", std::process::id()), result)
}

fn cut_and_look(cluster: &mut Cluster) -> Result<()> {
    let name = "power-cut";
    operator::deploy(cluster.make(name)?, PLAIN)?;
    goes_on(cluster.space(name), "before")?;
    cluster.node_mut().context("a node")?.reboot()?;
    goes_on(cluster.space(name), "after")?;
    mesh::ready(cluster)?;
    nothing_passed(cluster.space(name))
}

#[test]
fn after_removal_operators_work_directly_and_nothing_is_left() -> Result<()> {
    let cluster = mesh::alone()?;
    cluster.case("removed", |by_node| {
        cluster.case("removed-inside", |inside| {
            operator::deploy(by_node, PLAIN)?;
            operator::deploy(inside, INSIDE)?;
            for space in [by_node, inside] {
                goes_on(space, "first")?;
                operator::foreign(space, "foreign")?;
            }
            nothing_passed(by_node)?;
            remove(by_node)?;
            what_is_connected_inside_stays(inside)?;
            works_directly(by_node, PLAIN)?;
            works_directly(inside, INSIDE)
        })
    })
}

/// Removes ctrlmesh, and waits until nothing of it is left.
fn remove(space: Space<'_>) -> Result<()> {
    let cluster = space.cluster();
    let node = cluster.node().context("a node")?;
    ensure!(!mesh::pins(cluster)?.is_empty(), "nothing is pinned while a pod is served");
    ensure!(listens(space, node)?, "nobody listens while a pod is served");
    let deploy = mesh::checkout("deploy").display().to_string();
    // About ten seconds, but where the API server's finalizer of definitions meets a conflict, it looks again only
    // when its informer resyncs: five minutes (`crd_finalizer.go`, `sync`; `apiserver.go`, kubernetes#138085).
    kubectl(cluster, &["delete", "--kustomize", &deploy, "--timeout=400s"])?;
    until("the pins to go", || Ok(mesh::pins(cluster)?.is_empty().then_some(())))?;
    until("the listeners to go", || Ok((!listens(space, node)?).then_some(())))?;
    // Also those that the manager has made.
    let asked = "mutatingadmissionpolicies,mutatingadmissionpolicybindings,mutatingwebhookconfigurations,\
        validatingwebhookconfigurations";
    until("nobody to be asked or to label any more", || {
        let left = kubectl(cluster, &["get", asked, "--output=name"])?;
        Ok((!left.contains("ctrlmesh")).then_some(()))
    })
}

/// What an operator has connected to the proxy inside its pod stays, and shows it no more than before: its share, or
/// nothing, where the manager heard first that its ShardingConfig goes. What it dials from then on reaches the API
/// server itself, which the pod does not believe.
fn what_is_connected_inside_stays(space: Space<'_>) -> Result<()> {
    let asked = || -> Result<usize> { Ok(mesh::requests(space.cluster(), space.name(), operator::NAME)?.len()) };
    let (before, mut past) = (asked()?, Past::from_now(space)?);
    // It renews its lock every two seconds.
    until("the operator to go on", || Ok((asked()? >= before + 3).then_some(())))?;
    let pods = operator::pods(space)?;
    operator::none_restarted(&pods)?;
    past.nobody(&pods)?;
    ensure!(!operator::is_published(space, "foreign")?, "another's website was worked on");
    let uid = pods[0]["metadata"]["uid"].as_str().context("a UID")?;
    kill_in(space.cluster().node().context("a node")?, uid, "ctrlmesh-proxy")?;
    past.everybody(&pods)
}

/// Its next pods believe the API server again, and nobody is asked about them.
fn works_directly(space: Space<'_>, wanted: OperatorSpec<'_>) -> Result<()> {
    operator::change(space, OperatorSpec { replicas: 0, ..wanted })?;
    operator::change(space, wanted)?;
    for website in ["foreign", "later"] {
        operator::foreign(space, website)?;
        operator::published(space, website)?;
    }
    operator::none_restarted(&operator::pods(space)?)
}
