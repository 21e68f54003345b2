//! Follows the operators' pods: binds them to nodes, and ends their processes, as scheduler and kubelet would.
//!
//! What a scheduler costs is not what is measured. A pod's processes end here before kwok is told, so that nobody can
//! know of the end before the record has it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_common::names::label;
use ctrlmesh_runtime::jitter::random;
use ctrlmesh_testbed::retry;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time;

use crate::operators::{self, Operators};
use crate::send;

/// The annotation that says which rolling restart made a pod.
pub(crate) const ROUND: &str = "bench.example.com/round";

/// How long a pod's processes go on at most after its deletion.
const GRACE: Duration = Duration::from_millis(500);

/// How many requests are under way at once.
const AT_ONCE: usize = 16;

/// Follows all pods until it is dropped.
pub(crate) struct Kubelets {
    _task: JoinSet<()>,
}

struct Follower {
    client: Client,
    operators: Arc<Operators>,
    nodes: Vec<String>,
    seen: HashMap<String, Seen>,
    /// UIDs, while all pods are listed anew.
    listed: Option<Vec<String>>,
    turns: Arc<Semaphore>,
    under_way: JoinSet<()>,
}

/// What was done with a pod already.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    operator: usize,
    is_bound: bool,
    ends: bool,
}

impl Kubelets {
    pub(crate) fn start(client: Client, operators: Arc<Operators>, nodes: Vec<String>) -> Self {
        let follower = Follower {
            client,
            operators,
            nodes,
            seen: HashMap::new(),
            listed: None,
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            under_way: JoinSet::new(),
        };
        let mut task = JoinSet::new();
        task.spawn(follower.run());
        Self { _task: task }
    }
}

impl Follower {
    async fn run(mut self) {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let config = watcher::Config::default().labels(&format!("{}=true", label::ENABLE_PROXY));
        let mut events = std::pin::pin!(watcher(pods, config).default_backoff());
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => self.take(event),
                Err(error) => eprintln!("watch pods: {error}"),
            }
            while let Some(done) = self.under_way.try_join_next() {
                done.unwrap();
            }
        }
    }

    fn take(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.listed = Some(Vec::new()),
            Event::InitApply(pod) => {
                self.listed.iter_mut().for_each(|listed| listed.extend(pod.uid()));
                self.see(&pod);
            }
            Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                let gone: Vec<String> = self.seen.keys().filter(|uid| !listed.contains(uid)).cloned().collect();
                for uid in &gone {
                    self.lose(uid);
                }
            }
            Event::Apply(pod) => self.see(&pod),
            Event::Delete(pod) => self.lose(&pod.uid().unwrap()),
        }
    }

    fn see(&mut self, pod: &Pod) {
        let (name, uid) = (pod.name_any(), pod.uid().unwrap());
        let Some((operator, replica)) = operators::numbers(&name) else { return };
        let seen = self.seen.entry(uid.clone()).or_insert_with(|| {
            let round = pod.annotations().get(ROUND).and_then(|round| round.parse().ok()).unwrap_or_default();
            self.operators.with(operator, |holders| holders.begin(&uid, &name, round));
            Seen { operator, ..Seen::default() }
        });
        self.operators.with(operator, |holders| holders.set_ready(&uid, is_ready(pod)));
        let has_node = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        let path = path(pod);
        if !has_node && !seen.is_bound {
            seen.is_bound = true;
            let node = self.nodes[(operator * self.operators.replicas + replica) % self.nodes.len()].clone();
            let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "uid": uid},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node}});
            let (client, turns) = (self.client.clone(), self.turns.clone());
            self.under_way.spawn(async move {
                let _turn = turns.acquire().await.unwrap();
                tell(&client, "POST", &format!("{path}/binding"), &binding).await;
            });
        } else if has_node && pod.metadata.deletion_timestamp.is_some() && !seen.ends {
            seen.ends = true;
            self.end(operator, uid, path);
        }
    }

    /// Ends the processes of a pod that is being deleted, and says so.
    fn end(&mut self, operator: usize, uid: String, path: String) {
        let (client, operators, turns) = (self.client.clone(), self.operators.clone(), self.turns.clone());
        self.under_way.spawn(async move {
            time::sleep(random(GRACE)).await;
            operators.with(operator, |holders| holders.end(&uid));
            let state = json!({"terminated": {"exitCode": 0, "finishedAt": now()}});
            let container = container(&uid, 0, false, &state);
            let conditions = json!([{"type": "Ready", "status": "False", "lastTransitionTime": now()}]);
            let status = json!({"phase": "Succeeded", "conditions": conditions, "containerStatuses": [container]});
            // Of this pod, and of no other that has its name by then.
            let change = json!({"metadata": {"uid": uid}, "status": status});
            let _turn = turns.acquire().await.unwrap();
            tell(&client, "PATCH", &format!("{path}/status"), &change).await;
        });
    }

    fn lose(&mut self, uid: &str) {
        // One that was never bound, or that was removed at once.
        if let Some(seen) = self.seen.remove(uid) {
            self.operators.with(seen.operator, |holders| holders.end(uid));
        }
    }
}

/// The path of a pod.
pub(crate) fn path(pod: &Pod) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// The state of the container that was started so often before.
pub(crate) fn container(uid: &str, restarts: usize, runs: bool, state: &Value) -> Value {
    json!({"name": "operator", "image": "none", "imageID": "none", "containerID": format!("kwok://{uid}-{restarts}"),
        "ready": runs, "started": runs, "restartCount": restarts, "state": state})
}

pub(crate) fn now() -> String {
    jiff::Timestamp::from_second(jiff::Timestamp::now().as_second()).unwrap().to_string()
}

fn is_ready(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Says something of a pod, which may be gone by then. What fails is tried again.
async fn tell(client: &Client, method: &str, path: &str, body: &Value) {
    let told = retry(|| async {
        match send(client, method, path, body).await {
            Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(()),
            result => result.map(drop),
        }
    });
    if let Err(error) = told.await {
        eprintln!("{method} {path}: {error}");
    }
}
