//! Member clusters behind paths of the host are divided: each has one pod that writes there, while they move.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_runtime::sync::lock;
use ctrlmesh_testbed::shares::are_even;
use ctrlmesh_testbed::witness::{OperatorUnderTest, Verdict, Witness};
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use kube::Client;
use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use crate::bed::{ACCOUNT, Bed, OPERATOR, ROOT, object, slots_of};
use crate::member_server::{self, ask};
use crate::moves::{CANARY, UNOWNED, slice, sliced, times};
use crate::pods;

/// Where the operator of many clusters is.
const FLEET: &str = "operators/fleet";

/// The API group that the members are served in, and that of the objects that stand for them.
const GROUP: &str = "members.test";
const CLUSTERS: &str = "/apis/fleet.test/v1/clusters";

/// How many names of members there are, and how many clusters these are.
const MEMBERS: usize = 12;
const SERVERS: usize = 3;

/// How often members move; `CTRLMESH_TEST_FULL=1` asks for ten times as many.
const MOVES: usize = 5;

/// Of how many members it is asked who may write.
const EXPLAINED: usize = 4;

/// What is worked on in a member, and what the operator makes of it.
const SOURCE: &str = "source-a";
const PAGE: &str = "page-a";

/// The member clusters, and their server before the host.
struct Fleet {
    planes: Vec<ControlPlane>,
    clients: BTreeMap<String, Client>,
    server: member_server::Members,
}

fn names() -> impl Iterator<Item = String> {
    (0..MEMBERS).map(|number| format!("member-{number}"))
}

/// Held while Go builds: both tests have the one program.
static BUILDING: Mutex<()> = Mutex::new(());

/// Builds the operator, and fetches what it needs: in a network of its own a bed reaches no registry.
fn build() -> Result<PathBuf> {
    let _one = lock(&BUILDING);
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fleet-operator");
    let mut go = Command::new("go");
    go.args(["build", "-trimpath", "-buildvcs=false", "-o"]).arg(&program).arg(".").env("CGO_ENABLED", "0");
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join(FLEET);
    ensure!(go.current_dir(module).status().context("start go")?.success(), "go build");
    Ok(program)
}

impl Fleet {
    /// Starts the members, with something to work on in each, and has the host know them.
    async fn start(bed: &Bed) -> Result<Self> {
        let options = || Options { audit: true, audit_bodies: vec!["configmaps".to_owned()], ..Options::default() };
        let planes: Vec<_> = (0..SERVERS).map(|_| ControlPlane::start(&options())).collect::<Result<_>>()?;
        let mut clients = BTreeMap::new();
        for (number, name) in names().enumerate() {
            let client = planes[number % SERVERS].client().await?;
            member_server::admit(&client, &name, ACCOUNT, OPERATOR).await?;
            let source = json!({"metadata": {"name": SOURCE}, "data": {"text": "0"}});
            ask(&client, "POST", &maps(&name), &source).await?;
            clients.insert(name, client);
        }
        let server = member_server::Members::serve(&bed.client, OPERATOR, GROUP.to_owned(), clients.clone()).await?;
        define(bed).await?;
        for name in names() {
            let cluster = object("fleet.test/v1", "Cluster", &name);
            retry(|| bed.apply(CLUSTERS, &cluster)).await?;
        }
        Ok(Self { planes, clients, server })
    }

    /// Changes what is worked on in each member.
    async fn change(&self, text: &str) -> Result<()> {
        for (name, client) in &self.clients {
            let path = format!("{}/{SOURCE}", maps(name));
            ask(client, "PATCH", &path, &json!({"data": {"text": text}})).await?;
        }
        Ok(())
    }

    /// Waits until each member has a page with this text.
    async fn until_all_have(&self, bed: &Bed, text: &str) -> Result<()> {
        bed.until("each member to be worked on", async || {
            for (name, client) in &self.clients {
                let page = ask(client, "GET", &format!("{}/{PAGE}", maps(name)), &Value::Null).await?;
                ensure!(page["data"]["text"] == text, "{name}: {page}");
            }
            Ok(())
        })
        .await
    }

    /// Waits until the page of each of these members was written so many times more.
    async fn until_written(&self, bed: &Bed, members: &BTreeSet<String>, times: usize) -> Result<()> {
        let mut seen: BTreeMap<&String, BTreeSet<String>> = BTreeMap::new();
        bed.until("pages to be written", async || {
            for name in members {
                let page = ask(&self.clients[name], "GET", &format!("{}/{PAGE}", maps(name)), &Value::Null).await?;
                let at = page["data"]["at"].as_str().unwrap_or_default().to_owned();
                seen.entry(name).or_default().insert(at);
            }
            let late: Vec<_> = seen.iter().filter(|(_, seen)| seen.len() <= times).collect();
            ensure!(late.is_empty(), "{late:?}");
            Ok(())
        })
        .await
    }

    /// Requires that `explain` says of members which pods may write there: that which the table names.
    async fn explained(&self, bed: &Bed, table: &Ownership, pods: u16) -> Result<()> {
        for name in names().take(EXPLAINED) {
            let owner = table.slots.get(&NamespaceHash::default().slot(&name));
            for pod in (0..pods).map(|number| format!("op-{number}")) {
                let said = explanation(bed, &pod, (&name, &self.server.path(&name))).await?;
                let is_owner = table.shard_of(&pod) == owner.map(String::as_str);
                let expected = if is_owner { "Passes" } else { "Refused" };
                ensure!(said["outcome"] == expected, "{name} {pod}: {said}, by {table:?}");
                ensure!(said["classified"]["cluster"] == name.as_str(), "{name} {pod}: {said}");
            }
        }
        Ok(())
    }

    /// Ends all pods, and gives what the logs of the members say of their writers.
    fn verdict(&self, bed: &mut Bed) -> Result<Verdict> {
        bed.pods.clear();
        let mut witness = Witness::of(OperatorUnderTest {
            namespace: OPERATOR.to_owned(),
            account: ACCOUNT.to_owned(),
            root: ROOT.to_owned(),
            resources: ["configmaps".to_owned()].into(),
            hash: NamespaceHash::default(),
        });
        bed.plane.audit_logs().try_for_each(|log| witness.read(log))?;
        self.planes.iter().try_for_each(|plane| witness.read_member(&plane.audit_log()))?;
        let verdict = witness.verdict();
        eprintln!("{verdict}");
        Ok(verdict)
    }

    /// That each member had one writer at a time, and that it was not always the same.
    fn check_writes(&self, bed: &mut Bed) -> Result<()> {
        let verdict = self.verdict(bed)?;
        verdict.ensure_clean(UNOWNED)?;
        ensure!(verdict.turns.len() >= MEMBERS / 3, "too few members had several writers: {verdict}");
        bed.has_passed = true;
        Ok(())
    }
}

/// What `ctrlmesh explain` says of a pod's write in a member.
async fn explanation(bed: &Bed, pod: &str, (member, path): (&str, &str)) -> Result<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_e2e-ctrlmesh"));
    command.args(["explain", "configmaps", PAGE, "--verb", "update", "--output", "json", "--namespace", member]);
    command.args(["--as-pod", pod, "--as-namespace", OPERATOR, "--member-path", path]);
    command.arg("--kubeconfig").arg(bed.plane.kubeconfig());
    // The members' server answers on this thread.
    let output = spawn_blocking(move || command.output()).await??;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The kind of the objects that stand for members, which are labelled.
async fn define(bed: &Bed) -> Result<()> {
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "clusters.fleet.test"},
        "spec": {
            "group": "fleet.test", "scope": "Cluster",
            "names": {"plural": "clusters", "singular": "cluster", "kind": "Cluster"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}],
        },
    });
    bed.apply("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &definition).await?;
    let mut kinds = object("v1", "ConfigMap", "ctrlmesh-sharding-resource");
    kinds["data"] = json!({"resource-config": "groupVersionKinds: {fleet.test/v1: [Cluster]}"});
    bed.apply(format!("/api/v1/namespaces/{}/configmaps", crate::bed::SYSTEM), &kinds).await.map(drop)
}

fn maps(member: &str) -> String {
    format!("/api/v1/namespaces/{member}/configmaps")
}

/// The rule, for the members behind these paths.
fn of_clusters(mut rule: Value, template: &str) -> Value {
    rule["unit"] = json!("Cluster");
    rule["clusters"] = json!([{"path": template}]);
    rule["resourceSelector"] = json!([{"relateResources": [{"apiGroups": ["fleet.test"], "resources": ["clusters"]}]}]);
    rule
}

/// The members in these slots.
fn members_of(table: &Ownership, owner: &str) -> BTreeSet<String> {
    let slots = slots_of(table, owner);
    names().filter(|name| slots.contains(&NamespaceHash::default().slot(name))).collect()
}

/// What the operator is told.
fn flags(template: &str) -> [&str; 4] {
    ["--members", template, "--leader-election-namespace", OPERATOR]
}

async fn started(test: &str) -> Result<Option<(Bed, Fleet)>> {
    let program = build()?;
    let Some(bed) = Bed::start(test).await? else { return Ok(None) };
    fs::copy(program, bed.path("operator"))?;
    let fleet = Fleet::start(&bed).await?;
    Ok(Some((bed, fleet)))
}

#[tokio::test]
async fn members_move_with_one_writer_and_none_is_missed() -> Result<()> {
    let Some((mut bed, fleet)) = started("members_move_with_one_writer_and_none_is_missed").await? else {
        return Ok(());
    };
    let template = fleet.server.template();
    let flags = flags(&template);
    pods::workload(&bed, 3, true).await?;
    bed.root(&of_clusters(sliced("Proxy", &slice(0)?), &template)).await?;
    for number in 0..3 {
        bed.start_pod(number, true, &flags).await?;
    }
    bed.settled(|_| true).await?;
    fleet.until_all_have(&bed, "0").await?;
    for round in 1..=times(MOVES) {
        let slots = slice(round * 5)?;
        bed.root(&of_clusters(sliced("Proxy", &slots), &template)).await?;
        let table = bed.settled(|table| slots_of(table, CANARY) == slots).await?;
        if round == 1 {
            fleet.explained(&bed, &table, 3).await?;
        }
        fleet.change(&round.to_string()).await?;
        fleet.until_written(&bed, &members_of(&table, CANARY), 4).await?;
    }
    fleet.until_all_have(&bed, &times(MOVES).to_string()).await?;
    fleet.check_writes(&mut bed)
}

/// What the division is for, and that the witness sees it.
#[tokio::test]
async fn members_that_are_not_divided_have_several_writers() -> Result<()> {
    let Some((mut bed, fleet)) = started("members_that_are_not_divided_have_several_writers").await? else {
        return Ok(());
    };
    let template = fleet.server.template();
    let flags = flags(&template);
    let mut rule = of_clusters(sliced("Proxy", &slice(0)?), &template);
    rule["unit"] = json!("Namespace");
    // Not those that stand for members: every replica learns of all.
    rule["resourceSelector"] = json!([{"relateResources": [{"apiGroups": ["apps"], "resources": ["deployments"]}]}]);
    pods::workload(&bed, 3, true).await?;
    bed.root(&rule).await?;
    for number in 0..3 {
        bed.start_pod(number, true, &flags).await?;
    }
    bed.settled(|_| true).await?;
    fleet.until_all_have(&bed, "0").await?;
    fleet.until_written(&bed, &names().collect(), 8).await?;
    let verdict = fleet.verdict(&mut bed)?;
    ensure!(!verdict.foreign.is_empty(), "{verdict}");
    bed.has_passed = true;
    Ok(())
}

#[tokio::test]
async fn members_follow_the_pods_of_an_elastic_root() -> Result<()> {
    let Some((mut bed, fleet)) = started("members_follow_the_pods_of_an_elastic_root").await? else { return Ok(()) };
    let template = fleet.server.template();
    let flags = flags(&template);
    let rule = json!({"fence": "Proxy", "auto": {"shardingSize": 5, "elastic": {"settle": "0s"}}});
    pods::workload(&bed, 3, true).await?;
    bed.root(&of_clusters(rule, &template)).await?;
    let mut count = 0;
    for (round, replicas) in [3, 5, 2].into_iter().enumerate() {
        pods::workload(&bed, usize::from(replicas), true).await?;
        for number in count..replicas {
            bed.start_pod(number, true, &flags).await?;
        }
        for number in (replicas..count).rev() {
            bed.end_pod(number, Duration::from_secs(30)).await?;
        }
        count = replicas;
        bed.settled(|table| are_even(table, usize::from(replicas))).await?;
        fleet.change(&format!("of {round}")).await?;
        fleet.until_all_have(&bed, &format!("of {round}")).await?;
    }
    // One dies, and what it had is worked on.
    bed.pods.get("op-0").context("the first pod")?.operator.kill();
    bed.say_ready(0, false).await?;
    bed.settled(|table| are_even(table, 1)).await?;
    fleet.change("at last").await?;
    fleet.until_all_have(&bed, "at last").await?;
    fleet.check_writes(&mut bed)
}
