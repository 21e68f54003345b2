//! The example operator, in a namespace of a test, with a shard for itself.

use std::collections::BTreeSet;
use std::io::{Write as _, stderr};
use std::sync::RwLock;

use anyhow::{Context as _, Result, bail, ensure};
use ctrlmesh_testbed::Space;
use serde_json::{Value, json};
use xtask::images::Image;
use xtask::user_cluster::MADE;

use crate::mesh;
use crate::mesh::client::CLIENT;

/// The operator's workload, account and role.
pub(crate) const NAME: &str = "operator";

/// The name of its lock.
pub(crate) const LOCK: &str = "websites.web.example.com";

/// How its program calls itself in requests.
const PROGRAM: &str = "example-operator/";

/// What is enrolled by a label, and into which way of interception.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperatorSpec<'a> {
    /// How many pods.
    pub(crate) replicas: usize,
    /// Whether they are enrolled.
    pub(crate) enrolled: bool,
    /// Their annotations.
    pub(crate) annotations: &'a [(&'a str, &'a str)],
}

/// One pod with the node's proxy.
pub(crate) const PLAIN: OperatorSpec<'static> = OperatorSpec { replicas: 1, enrolled: true, annotations: &[] };

/// One pod with a proxy inside, to which the kernel sends what the operator dials.
pub(crate) const INSIDE: OperatorSpec<'static> = OperatorSpec { annotations: &[("sidecar", "true")], ..PLAIN };

/// Held by tests with an operator that works on everybody's websites; the others hold it together.
pub(crate) static EVERYBODYS: RwLock<()> = RwLock::new(());

/// Deploys it, with the shard before the pods.
pub(crate) fn deploy(space: Space<'_>, wanted: OperatorSpec<'_>) -> Result<()> {
    let namespace = space.name();
    let labels = json!({"app": NAME});
    let shard = json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": "share"},
        "spec": {"selector": {"matchLabels": labels}, "controller": {"leaderElectionName": LOCK},
            "limits": [{"relateResources": [{"apiGroups": ["web.example.com"], "resources": ["websites"]}],
                "selector": {"matchLabels": {"shard": namespace}}}]}});
    let items = [&[shard], &account(space)[..], &[workload(wanted)]].concat();
    space.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
    rolled_out(space)
}

/// Its account, and what that may do.
pub(crate) fn account(space: Space<'_>) -> [Value; 4] {
    let namespace = space.name();
    let subject = json!([{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}]);
    let role = |kind: &str, name: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name});
    [
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME}}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": namespace, "labels": {MADE: "true"}},
            "roleRef": role("ClusterRole", "example-operator"), "subjects": subject}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": NAME}, "rules": [
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}]}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": NAME},
            "roleRef": role("Role", NAME), "subjects": subject}),
    ]
}

/// Changes how many pods there are, or how they are enrolled.
pub(crate) fn change(space: Space<'_>, wanted: OperatorSpec<'_>) -> Result<()> {
    space.apply(&workload(wanted).to_string())?;
    rolled_out(space)
}

/// Ends its pods, and waits until they are gone.
pub(crate) fn end(space: Space<'_>) -> Result<()> {
    space.kubectl(&["scale", &format!("deployment/{NAME}"), "--replicas=0"])?;
    let gone = ["wait", "pod", "-l", "app=operator", "--for=delete", "--timeout=300s"];
    space.kubectl(&gone).map(drop)
}

/// The labels and annotations of a pod of the operator's.
pub(crate) fn metadata(wanted: OperatorSpec<'_>) -> Value {
    let mut labels = json!({"app": NAME});
    if wanted.enrolled {
        labels["ctrlmesh.kusionstack.io/enable-proxy"] = json!("true");
    }
    let annotation = |(key, value): &(&str, &str)| (format!("ctrlmesh.kusionstack.io/{key}"), json!(value));
    let annotations: serde_json::Map<_, _> = wanted.annotations.iter().map(annotation).collect();
    json!({"labels": labels, "annotations": annotations})
}

/// Its Deployment.
pub(crate) fn workload(wanted: OperatorSpec<'_>) -> Value {
    let pod = json!({
        "serviceAccountName": NAME,
        "terminationGracePeriodSeconds": 5,
        "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{
            "name": "manager",
            "image": Image::ExampleOperator.name(),
            "args": ["--leader-elect", "--health-probe-bind-address=:8081"],
            "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8081}, "periodSeconds": 1},
            "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}},
        }],
    });
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME, "labels": {MADE: "true"}}, "spec": {
        "replicas": wanted.replicas,
        "progressDeadlineSeconds": 600,
        "selector": {"matchLabels": {"app": NAME}},
        "template": {"metadata": metadata(wanted), "spec": pod}}})
}

/// Has its pods made anew, of which none may have been restarted: what is asked afterwards says nothing of them.
pub(crate) fn renew(space: Space<'_>) -> Result<()> {
    none_restarted(&pods(space)?)?;
    space.kubectl(&["rollout", "restart", &format!("deployment/{NAME}")]).map(drop)
}

/// The same, and waits until they are there.
pub(crate) fn renewed(space: Space<'_>) -> Result<()> {
    renew(space)?;
    rolled_out(space)
}

/// Waits until its pods are as they were asked for.
pub(crate) fn rolled_out(space: Space<'_>) -> Result<()> {
    let rollout = format!("deployment/{NAME}");
    space.kubectl(&["rollout", "status", &rollout, "--timeout=300s"]).map(drop)
}

/// A website of the operator's share: those that are labelled with its namespace.
pub(crate) fn own(space: Space<'_>, name: &str) -> Result<()> {
    website(space, name, space.name())
}

/// A website of nobody's share.
pub(crate) fn foreign(space: Space<'_>, name: &str) -> Result<()> {
    website(space, name, "nobodys")
}

fn website(space: Space<'_>, name: &str, shard: &str) -> Result<()> {
    let website = json!({"apiVersion": "web.example.com/v1alpha1", "kind": "Website",
        "metadata": {"name": name, "labels": {"shard": shard}}, "spec": {"title": "Hello", "pages": 1}});
    mesh::until("the website to be taken", || Ok(space.apply(&website.to_string()).ok()))
}

/// Waits until the operator has worked on a website.
pub(crate) fn published(space: Space<'_>, name: &str) -> Result<()> {
    let wait = ["wait", &format!("website/{name}"), "--for=condition=Published", "--timeout=300s"];
    space.kubectl(&wait).map(drop)
}

/// The operator goes on: a website that is made now is worked on.
pub(crate) fn goes_on(space: Space<'_>, name: &str) -> Result<()> {
    own(space, name)?;
    published(space, name)
}

/// Whether the operator has worked on a website.
pub(crate) fn is_published(space: Space<'_>, name: &str) -> Result<bool> {
    Ok(!space.kubectl(&["get", "website", name, "-o", "jsonpath={.status.pages}"])?.is_empty())
}

/// The operator's pods that are not on their way out.
pub(crate) fn pods(space: Space<'_>) -> Result<Vec<Value>> {
    let pods = space.kubectl(&["get", "pods", "-l", "app=operator", "-o", "json"])?;
    let pods: Value = serde_json::from_str(&pods)?;
    let pods = pods["items"].as_array().context("pods")?.iter();
    Ok(pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null()).cloned().collect())
}

/// Refuses pods of which a container was restarted, and that there are none.
pub(crate) fn none_restarted(pods: &[Value]) -> Result<()> {
    ensure!(!pods.is_empty(), "no pod is there");
    for pod in pods {
        let containers = pod["status"]["containerStatuses"].as_array().map_or(0, Vec::len);
        ensure!(containers > 0, "nothing is said of the containers of {pod}");
        for kind in ["containerStatuses", "initContainerStatuses"] {
            for status in pod["status"][kind].as_array().into_iter().flatten() {
                let name = &pod["metadata"]["name"];
                ensure!(status["restartCount"] == 0, "{name}: {status}");
            }
        }
    }
    Ok(())
}

/// The same, where the proxy was away for a while: an operator ends by itself that could not renew its lock for ten
/// seconds, which it says.
pub(crate) fn restarted_for_the_lock_only(space: Space<'_>) -> Result<()> {
    let pods = pods(space)?;
    ensure!(!pods.is_empty(), "no pod is there");
    // All have one lock, which one of them holds; but while a machine is busy, one after the other may lose it.
    for pod in pods {
        if none_restarted(std::slice::from_ref(&pod)).is_ok() {
            continue;
        }
        let name = pod["metadata"]["name"].as_str().context("a name")?;
        let log = space.kubectl(&["logs", "--previous", "--container=manager", name])?;
        let count = &pod["status"]["containerStatuses"][0]["restartCount"];
        ensure!(*count == 1 && log.contains("leader election lost"), "{name}: {count}: {log}");
        writeln!(stderr(), "{name} was restarted once, for its lock")?;
    }
    Ok(())
}

/// Refuses a list or watch of websites by the operator that asks for more than its share.
pub(crate) fn all_asked_for_their_share(space: Space<'_>) -> Result<()> {
    let requests = mesh::requests(space.cluster(), space.name(), NAME)?;
    let lists = requests.iter().filter(|one| one.object.resource == "websites");
    let lists = lists.filter(|one| matches!(one.verb.as_str(), "list" | "watch"));
    let uris: Vec<&str> = lists.map(|one| one.uri.as_str()).collect();
    let share = format!("labelSelector=shard%3D{}", space.name());
    ensure!(!uris.is_empty() && uris.iter().all(|uri| uri.contains(&share)), "{uris:?}");
    Ok(())
}

/// Watches of websites by the operator's only pod, from some moment on.
pub(crate) struct Watches<'a> {
    space: Space<'a>,
    pod: String,
    before: BTreeSet<String>,
}

impl<'a> Watches<'a> {
    /// From now on, once it watches: until the one before has let go of their lock it does not.
    pub(crate) fn from_now(space: Space<'a>) -> Result<Self> {
        let pods = pods(space)?;
        let [pod] = &pods[..] else { bail!("not one pod: {pods:?}") };
        let pod = pod["metadata"]["name"].as_str().context("a name")?.to_owned();
        let mut this = Self { space, pod, before: BTreeSet::new() };
        this.before = mesh::until("the pod to watch", || {
            let asked = this.asked()?;
            let watches = asked.iter().any(|(_, uri)| uri.contains("watch=true"));
            Ok(watches.then(|| asked.into_iter().map(|(id, _)| id).collect()))
        })?;
        Ok(this)
    }

    /// Waits until the pod watches anew, from the version that it saw last: it may not have listed anything since.
    pub(crate) fn resumed(&self) -> Result<()> {
        mesh::until("a watch that goes on", || {
            let asked = self.asked()?.into_iter();
            let uris: Vec<String> = asked.filter(|(id, _)| !self.before.contains(id)).map(|(_, uri)| uri).collect();
            let from = |uri: &String| {
                let from = uri.split(['?', '&']).find_map(|one| one.strip_prefix("resourceVersion="));
                from.is_some_and(|from| from.bytes().any(|digit| matches!(digit, b'1'..=b'9')))
            };
            // One that asks for the first events is a list, too (`WatchListClient`).
            let is_watch = |uri: &String| uri.contains("watch=true") && !uri.contains("sendInitialEvents=true");
            let goes_on = |uri: &String| is_watch(uri) && from(uri);
            ensure!(uris.iter().all(goes_on), "listed again: {uris:?}");
            Ok((!uris.is_empty()).then_some(()))
        })
    }

    /// Each list and watch that was answered, by its id, with its URI.
    fn asked(&self) -> Result<Vec<(String, String)>> {
        let requests = mesh::requests(self.space.cluster(), self.space.name(), NAME)?;
        let asked = requests.into_iter().filter(|one| {
            one.object.resource == "websites"
                && matches!(one.verb.as_str(), "list" | "watch")
                && one.response_status.code == 200
                && mesh::pod_of(one) == Some(&self.pod)
        });
        Ok(asked.map(|one| (one.id, one.uri)).collect())
    }
}

/// Refuses a request of the operator's account that did not come from `sources`, or that another program made than
/// those that have that account: the operator, and kubectl in the pod beside it.
pub(crate) fn all_came_from(space: Space<'_>, sources: &[String]) -> Result<usize> {
    let requests = mesh::requests(space.cluster(), space.name(), NAME)?;
    for request in &requests {
        let from = request.sources.first().context("a source")?;
        ensure!(sources.contains(from), "past the proxy: {request:?}");
        let by = if mesh::pod_of(request) == Some(CLIENT) { "kubectl/" } else { PROGRAM };
        ensure!(request.user_agent.starts_with(by), "by another program: {request:?}");
    }
    Ok(requests.len())
}
