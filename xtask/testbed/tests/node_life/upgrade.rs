//! Node proxies are updated and rolled back while operators work and people look into pods: nothing is refused, and
//! nothing passes the proxy.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _, stderr};
use std::process::{Child, Stdio};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::names::{NOT_READY_TAINT, label};
use ctrlmesh_testbed::{Cluster, Space};
use serde_json::{Value, json};
use xtask::images::{self, Image};

use crate::mesh::client::{self, CLIENT};
use crate::mesh::delays::Delays;
use crate::mesh::knocks::{count, knocked, knocks};
use crate::mesh::operator::{self, INSIDE, PLAIN};
use crate::mesh::past::Past;
use crate::mesh::{self, in_ours, kubectl, until};

/// The node's proxies that are there, as kubectl names them, the one that came last at the end.
fn proxies(cluster: &Cluster) -> Result<Vec<String>> {
    let name = |pod: &Value| Some(format!("pod/{}", pod["metadata"]["name"].as_str()?));
    mesh::proxies(cluster)?.iter().map(|pod| name(pod).context("a name")).collect()
}

/// An open session: a command in one pod that runs in another by way of the proxy, until it is ended.
struct Session<'a> {
    space: Space<'a>,
    child: Child,
    /// Whether it said what it is asked last.
    said: JoinHandle<bool>,
}

impl<'a> Session<'a> {
    fn open(space: Space<'a>) -> Result<Self> {
        let exec = ["exec", "--stdin", CLIENT, "--container", "kubectl", "--"];
        let within = ["/kubectl", "exec", "web", "--", "/probe", "serve", ":8099"];
        let mut command = space.command(&[&exec[..], &within].concat());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stderr.take().context("output")?).lines();
        let said = thread::spawn(move || lines.map_while(Result::ok).any(|line| line.contains("GET /at-last")));
        let this = Self { space, child, said };
        until("the session", || Ok(this.ask("first").ok()))?;
        Ok(this)
    }

    /// Asks the command for something, of which it says in the session that it was asked.
    fn ask(&self, what: &str) -> Result<String> {
        let url = format!("http://127.0.0.1:8099/{what}");
        self.space.kubectl(&["exec", "web", "--", "/probe", "get", &url])
    }

    /// Requires that it goes on by way of a proxy that was told to end, while new connections go to the next one.
    fn outlives_the_update(mut self) -> Result<()> {
        let (space, cluster) = (self.space, self.space.cluster());
        let next = until("the proxy before to be told to end", || {
            let pods = mesh::proxies(cluster)?;
            let handing = pods.len() == 2 && mesh::is_ending(&pods[0]) && !mesh::is_ending(&pods[1]);
            Ok(handing.then(|| pods[1]["metadata"]["name"].as_str().map(str::to_owned)).flatten())
        })?;
        until("the next proxy to listen", || {
            let exec = ["exec", &next, "--", "/ctrlmesh-proxy", "probe", "/metrics"];
            let metrics = in_ours(cluster, &exec)?;
            let mut served = metrics.lines().filter_map(|line| line.strip_prefix("ctrlmesh_proxy_pods_served "));
            Ok(served.any(|pods| pods != "0").then_some(()))
        })?;
        let before = count(&knocked(space)?, "made");
        until("connections by way of it", || Ok((count(&knocked(space)?, "made") >= before + 100).then_some(())))?;
        ensure!(self.child.try_wait()?.is_none(), "the session ended with the update");
        self.ask("at-last")?;
        // It says so, or has ended.
        until("the session to speak", || Ok(self.said.is_finished().then_some(())))?;
        self.child.kill()?;
        self.child.wait()?;
        ensure!(self.said.join().unwrap_or_default(), "the session was cut by the update");
        Ok(())
    }
}

/// Operators that work: one of which the node's proxy takes what it dials, and one with a proxy inside, to which the
/// kernel sends by what the node's attached.
struct Operators<'a>([(Space<'a>, Past<'a>); 2]);

impl<'a> Operators<'a> {
    fn deploy(spaces: [Space<'a>; 2]) -> Result<Self> {
        let [by_node, inside] = spaces;
        let mut this = Self([(by_node, Past::from_now(by_node)?), (inside, Past::from_now(inside)?)]);
        for (space, wanted) in [(by_node, PLAIN), (inside, INSIDE)] {
            operator::deploy(space, wanted)?;
            knocks(space, Some(wanted))?;
        }
        this.go_on("first")?;
        Ok(this)
    }

    /// Has a pod of each begin.
    fn renew(&self) -> Result<()> {
        self.0.iter().try_for_each(|(space, _)| operator::renew(*space))
    }

    /// Requires that each of them works, that none was restarted, and that none dialled past its proxy.
    fn go_on(&mut self, name: &str) -> Result<()> {
        for (space, past) in &mut self.0 {
            operator::rolled_out(*space)?;
            operator::goes_on(*space, name)?;
            let pods = operator::pods(*space)?;
            operator::none_restarted(&pods)?;
            past.nobody(&pods)?;
        }
        Ok(())
    }
}

/// What there is before something is done to the node's proxies.
struct Before<'a> {
    spaces: [Space<'a>; 2],
    knocked: [Value; 2],
    proxies: Vec<String>,
}

impl<'a> Before<'a> {
    fn of(spaces: [Space<'a>; 2]) -> Result<Self> {
        let knocked = [knocked(spaces[0])?, knocked(spaces[1])?];
        Ok(Self { spaces, knocked, proxies: proxies(spaces[0].cluster())? })
    }

    fn cluster(&self) -> &'a Cluster {
        self.spaces[0].cluster()
    }

    fn undo(&self) -> Result<()> {
        in_ours(self.cluster(), &["rollout", "undo", "daemonset/ctrlmesh-node"]).map(drop)
    }

    /// Waits until the node has another proxy, and only that; no connection may have failed meanwhile.
    fn replaced(self, what: &str) -> Result<Self> {
        mesh::ready(self.cluster())?;
        until("the proxy before to be gone", || {
            let now = proxies(self.cluster())?;
            Ok((now.len() == 1 && now != self.proxies).then_some(()))
        })?;
        self.none_failed(what)
    }

    /// Refuses any connection that failed since.
    fn none_failed(self, what: &str) -> Result<Self> {
        let now = Self::of(self.spaces)?;
        for (before, after) in self.knocked.iter().zip(&now.knocked) {
            writeln!(stderr(), "{what}: {after}")?;
            ensure!(count(after, "made") > count(before, "made"), "{what}: nobody knocked: {after}");
            ensure!(count(after, "failed") == count(before, "failed"), "{what}: {before}, {after}");
        }
        Ok(now)
    }

    /// Has a version come that does not begin, and takes it back: who served serves on.
    fn broken(self) -> Result<Self> {
        let cluster = self.cluster();
        let broken = json!({"name": "proxy", "command": ["/ctrlmesh-proxy", "nonsense"]});
        mesh::change_proxies(cluster, &json!({"spec": {"containers": [broken]}}))?;
        until("one that does not begin", || {
            let pods = mesh::proxies(cluster)?;
            let restarts = |pod: &Value| count(&pod["status"]["containerStatuses"][0], "restartCount");
            Ok(pods.iter().any(|pod| restarts(pod) > 0).then_some(()))
        })?;
        self.undo()?;
        mesh::ready(cluster)?;
        until("the one that served to be alone", || Ok((proxies(cluster)? == self.proxies).then_some(())))?;
        self.none_failed("one that does not begin")
    }
}

/// The account of the node's proxies was refused nothing, and has done all that it may.
fn did_what_they_may(cluster: &Cluster) -> Result<()> {
    let requests = mesh::requests(cluster, mesh::NAMESPACE, "ctrlmesh-node")?;
    let refused = requests.iter().find(|one| one.is_forbidden());
    ensure!(refused.is_none(), "{refused:?}");
    let asked = requests.iter().filter(|one| !one.object.resource.is_empty());
    let asked: BTreeSet<(&str, &str)> = asked.map(|one| (&*one.verb, &*one.object.resource)).collect();
    let read = ["daemonsets", "namespaces"].into_iter().flat_map(|kind| [("get", kind), ("watch", kind)]);
    let may: BTreeSet<(&str, &str)> = read.chain([("patch", "nodes")]).collect();
    ensure!(asked == may, "{asked:?}");
    Ok(())
}

/// Has the node say that no pod is served there, and keep new pods away, as one that has just been registered.
fn keep_away(cluster: &Cluster) -> Result<()> {
    kubectl(cluster, &["label", "nodes", "--all", "--overwrite", &format!("{}=false", label::EBPF)])?;
    kubectl(cluster, &["taint", "nodes", "--all", &format!("{NOT_READY_TAINT}:NoSchedule")]).map(drop)
}

/// Waits until the node says that pods are served there.
fn announced(cluster: &Cluster) -> Result<()> {
    until("the node to say that it serves pods", || {
        let nodes = mesh::json(cluster, &["get", "nodes"])?;
        let node = &nodes["items"][0];
        let taints = node["spec"]["taints"].as_array().into_iter().flatten();
        let is_kept = taints.filter(|taint| taint["key"] == NOT_READY_TAINT).count() > 0;
        Ok((node["metadata"]["labels"][label::EBPF] == "true" && !is_kept).then_some(()))
    })
}

#[test]
fn updates_and_rollbacks_of_node_proxies_have_no_gap() -> Result<()> {
    let cluster = mesh::alone()?;
    for archive in images::build(&[Image::Kubectl], true)? {
        cluster.node().context("a node")?.load(&archive)?;
    }
    cluster.case("updated", |by_node| cluster.case("updated-inside", |inside| updated([by_node, inside])))
}

fn updated(spaces: [Space<'_>; 2]) -> Result<()> {
    let [by_node, _] = spaces;
    let cluster = by_node.cluster();
    let mut operators = Operators::deploy(spaces)?;
    client::deploy(by_node)?;
    let open = Session::open(by_node)?;
    let mut now = Before::of(spaces)?;
    mesh::change_proxies(cluster, &json!({"metadata": {"annotations": {"version": "next"}}}))?;
    // Pods begin beside each of these.
    operators.renew()?;
    open.outlives_the_update()?;
    operators.go_on("during-the-update")?;
    now = now.replaced("update")?;
    announced(cluster)?;
    keep_away(cluster)?;
    now.undo()?;
    // These pods wait until the next proxy has taken the taint away.
    operators.renew()?;
    operators.go_on("during-the-rollback")?;
    now = now.replaced("rollback")?;
    announced(cluster)?;
    operators.go_on("after-the-rollback")?;
    // One that somebody deletes serves on until the next one does.
    in_ours(cluster, &["delete", "--wait=false", &now.proxies[0]])?;
    operators.renew()?;
    operators.go_on("during-the-deletion")?;
    now = now.replaced("deleted")?;
    did_what_they_may(cluster)?;
    // One that may not see any more whether it is removed is not removed.
    in_ours(cluster, &["delete", "rolebinding/ctrlmesh-node"])?;
    in_ours(cluster, &["delete", &now.proxies[0]])?;
    Delays::of(by_node)?.say("while node proxies are replaced")?;
    now.replaced("without rights")?.broken()?;
    operators.go_on("at-last")?;
    // What a proxy inside asks comes from the pod's address, as what passes it would.
    spaces.into_iter().try_for_each(operator::all_asked_for_their_share)?;
    operator::all_came_from(by_node, &[mesh::address(cluster)?]).map(drop)
}
