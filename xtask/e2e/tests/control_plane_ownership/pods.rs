//! The operator's pods: objects, of which we say what kubelet would, and beside each its proxy and its operator.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::bed::{ACCOUNT, Bed, OPERATOR, object};
use crate::blows::address;
use crate::manager::Manager;
use crate::process::Process;

/// Whom the API server's own tokens are for.
const API: &str = "https://kubernetes.default.svc";

/// What the example operator is told anyway: its ports would be the machine's.
pub(crate) const OWN_FLAGS: [&str; 2] = ["--metrics-bind-address=0", "--health-probe-bind-address=0"];

/// A pod, as the API server knows it.
pub(crate) struct Pod {
    namespace: String,
    name: String,
    uid: String,
    account: String,
}

/// A pod of the operator with what runs in it.
pub(crate) struct RunningPod {
    pod: Pod,
    /// None where the pod is not enrolled.
    pub(crate) proxy: Option<Process>,
    /// What the proxy connects to: the manager and the API server.
    pub(crate) proxy_peers: Vec<SocketAddr>,
    pub(crate) operator: Process,
    /// What the operator connects to.
    pub(crate) server: SocketAddr,
}

/// Makes a pod beside its account, on the node that its number says.
pub(crate) async fn make(bed: &Bed, namespace: &str, name: &str, account: &str, enrolled: bool) -> Result<Pod> {
    let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
    bed.apply(accounts, &object("v1", "ServiceAccount", account)).await?;
    let number = name.rsplit('-').next().and_then(|number| number.parse::<u16>().ok()).unwrap_or_default();
    let node = format!("node-{}", number % bed.nodes);
    let mut pod = object("v1", "Pod", name);
    pod["spec"] = json!({
        "serviceAccountName": account, "nodeName": node, "automountServiceAccountToken": false,
        "containers": [{"name": "operator", "image": "none"}],
    });
    if namespace == OPERATOR {
        let set = bed.send("GET", SET, "application/json", &Value::Null).await?;
        pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "op",
            "uid": set["metadata"]["uid"], "controller": true}]);
        pod["metadata"]["labels"] = json!({"app": "op"});
    }
    if enrolled {
        pod["metadata"]["labels"]["ctrlmesh.kusionstack.io/enable-proxy"] = json!("true");
        pod["metadata"]["annotations"] = json!({"ctrlmesh.kusionstack.io/injected": "true"});
        pod["spec"]["initContainers"] = json!([{"name": "ctrlmesh-proxy", "image": "none", "restartPolicy": "Always"}]);
    }
    let made = bed.apply(format!("/api/v1/namespaces/{namespace}/pods"), &pod).await?;
    let uid = made["metadata"]["uid"].as_str().context("a pod without UID")?.to_owned();
    Ok(Pod { namespace: namespace.to_owned(), name: name.to_owned(), uid, account: account.to_owned() })
}

/// The path of the operator's StatefulSet, which nothing but a test acts on.
const SET: &str = "/apis/apps/v1/namespaces/ops/statefulsets/op";

/// Makes the operator's StatefulSet, or changes how many pods it has and whether they are enrolled.
pub(crate) async fn workload(bed: &Bed, replicas: usize, enrolled: bool) -> Result<()> {
    let mut labels = json!({"app": "op"});
    if enrolled {
        labels["ctrlmesh.kusionstack.io/enable-proxy"] = json!("true");
    }
    let mut set = object("apps/v1", "StatefulSet", "op");
    set["spec"] = json!({
        "serviceName": "op", "replicas": replicas, "selector": {"matchLabels": {"app": "op"}},
        "template": {"metadata": {"labels": labels}, "spec": {
            "serviceAccountName": ACCOUNT, "containers": [{"name": "operator", "image": "none"}]}},
    });
    bed.apply(format!("/apis/apps/v1/namespaces/{OPERATOR}/statefulsets"), &set).await.map(drop)
}

impl Bed {
    /// Makes the pod `op-<number>` and starts what runs in it; `flags` are the operator's.
    pub(crate) async fn start_pod(&mut self, number: u16, enrolled: bool, flags: &[&str]) -> Result<()> {
        self.start_unready(number, enrolled, flags).await?;
        self.say_ready(number, true).await
    }

    /// The same of a pod of which nobody has said yet that it is ready.
    pub(crate) async fn start_unready(&mut self, number: u16, enrolled: bool, flags: &[&str]) -> Result<()> {
        let name = format!("op-{number}");
        let pod = make(self, OPERATOR, &name, ACCOUNT, enrolled).await?;
        let url = self.plane.urls().nth(usize::from(number % 2)).context("a second API server")?.to_owned();
        let upstream = address(&url)?;
        let proxy_peers = vec![self.manager_of(number).grpc, upstream];
        let (server, ca, proxy) = if enrolled {
            self.authorities().await?;
            let (address, proxy) = self.proxy(number, &pod, &url).await?;
            proxy.start()?;
            // As kubelet does: an operator that is refused ends.
            self.until("the proxy to listen", async || Ok(TcpStream::connect(address).await?)).await?;
            (address, self.path("mesh.crt"), Some(proxy))
        } else {
            (upstream, self.plane.ca().to_owned(), None)
        };
        let token = pod.token(self, API).await?;
        let kubeconfig = self.path(&format!("{name}.kubeconfig"));
        fs::write(&kubeconfig, credentials(&format!("https://{server}"), &ca, &token).to_string())?;
        let operator = Process::new(
            self,
            &self.path("operator"),
            &format!("{name}-operator"),
            OWN_FLAGS.iter().chain(flags).map(ToString::to_string),
            [("KUBECONFIG".to_owned(), kubeconfig.display().to_string())],
        )?;
        operator.start()?;
        let state = container("operator", &json!({"running": {"startedAt": now()}}));
        let status = json!({"phase": "Running", "conditions": conditions("False"), "containerStatuses": [state]});
        pod.status(self, &status).await?;
        self.pods.insert(name, RunningPod { pod, proxy, proxy_peers, operator, server });
        Ok(())
    }

    /// Deletes the pod `op-<number>`, as Kubernetes does: it is asked to end, and killed after `grace`.
    pub(crate) async fn end_pod(&mut self, number: u16, grace: Duration) -> Result<()> {
        self.terminate_pod(number).await?;
        self.bury_pod(number, grace).await
    }

    /// Asks the pod `op-<number>` to end; it may work on.
    pub(crate) async fn terminate_pod(&mut self, number: u16) -> Result<()> {
        let running = self.pods.get(&format!("op-{number}")).context("no such pod")?;
        running.operator.terminate()?;
        let options = json!({"gracePeriodSeconds": 300});
        self.send("DELETE", &running.pod.path(), "application/json", &options).await.map(drop)
    }

    /// Ends what runs in the pod `op-<number>`, after `grace` by force, and lets the object go.
    pub(crate) async fn bury_pod(&mut self, number: u16, grace: Duration) -> Result<()> {
        let mut running = self.pods.remove(&format!("op-{number}")).context("no such pod")?;
        running.operator.end_within(grace).await?;
        if let Some(proxy) = running.proxy.take() {
            // Whoever still holds it must not have it started again.
            proxy.end_within(Duration::ZERO).await?;
        }
        let state = container("operator", &json!({"terminated": {"exitCode": 0, "finishedAt": now()}}));
        let status = json!({"phase": "Succeeded", "conditions": conditions("False"), "containerStatuses": [state]});
        running.pod.status(self, &status).await?;
        let options = json!({"gracePeriodSeconds": 0});
        self.send("DELETE", &running.pod.path(), "application/json", &options).await.map(drop)
    }

    /// Says of the pod `op-<number>` whether it is ready.
    pub(crate) async fn say_ready(&self, number: u16, is_ready: bool) -> Result<()> {
        let running = self.pods.get(&format!("op-{number}")).context("no such pod")?;
        let ready = if is_ready { "True" } else { "False" };
        running.pod.status(self, &json!({"conditions": conditions(ready)})).await
    }

    /// The manager that the proxy of the pod of this number asks.
    fn manager_of(&self, number: u16) -> &Manager {
        &self.managers[usize::from(number) % self.managers.len()]
    }

    /// A pod's proxy, and where it will listen.
    async fn proxy(&self, number: u16, pod: &Pod, url: &str) -> Result<(SocketAddr, Process)> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 20_000 + number));
        let admin = SocketAddr::from((Ipv4Addr::LOCALHOST, 21_000 + number));
        let name = &pod.name;
        let token = self.path(&format!("{name}.token"));
        fs::write(&token, pod.token(self, "ctrlmesh").await?)?;
        // Each has its own, and a new pod none that another left.
        let state = self.path(&format!("{name}-{}", pod.uid));
        let manager = self.manager_of(number);
        let environment = [
            ("LISTEN", address.to_string()),
            ("ADMIN_LISTEN", admin.to_string()),
            ("LOG_FORMAT", "json".to_owned()),
            ("THREADS", "1".to_owned()),
            ("UPSTREAM", url.to_owned()),
            ("UPSTREAM_CA", self.plane.ca().display().to_string()),
            ("POD", format!("{OPERATOR}/{name}")),
            ("MANAGER", manager.grpc.to_string()),
            ("MANAGER_CA", self.path("manager.crt").display().to_string()),
            ("TOKEN", token.display().to_string()),
            ("STATE_DIR", state.display().to_string()),
        ];
        let environment = environment.map(|(variable, value)| (format!("CTRLMESH_PROXY_{variable}"), value));
        let program = Path::new(env!("CARGO_BIN_EXE_e2e-proxy"));
        let proxy = Process::new(self, program, &format!("{name}-proxy"), ["sidecar".to_owned()], environment)?;
        Ok((address, proxy))
    }
}

impl RunningPod {
    pub(crate) fn uid(&self) -> &str {
        &self.pod.uid
    }
}

impl Pod {
    fn path(&self) -> String {
        format!("/api/v1/namespaces/{}/pods/{}", self.namespace, self.name)
    }

    /// A token that is bound to it.
    pub(crate) async fn token(&self, bed: &Bed, audience: &str) -> Result<String> {
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid});
        let spec = json!({"audiences": [audience], "boundObjectRef": bound, "expirationSeconds": 24 * 3600});
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
        let path = format!("/api/v1/namespaces/{}/serviceaccounts/{}/token", self.namespace, self.account);
        let answer = bed.send("POST", &path, "application/json", &request).await?;
        Ok(answer["status"]["token"].as_str().context("no token")?.to_owned())
    }

    async fn status(&self, bed: &Bed, status: &Value) -> Result<()> {
        bed.merge(&format!("{}/status", self.path()), &json!({"status": status})).await.map(drop)
    }
}

fn conditions(ready: &str) -> Value {
    json!([{"type": "Ready", "status": ready, "lastTransitionTime": now()}])
}

fn container(name: &str, state: &Value) -> Value {
    let runs = !state["running"].is_null();
    json!({"name": name, "image": "none", "imageID": "none", "ready": runs, "started": runs, "restartCount": 0,
        "state": state})
}

fn now() -> String {
    jiff::Timestamp::from_second(jiff::Timestamp::now().as_second()).unwrap_or_default().to_string()
}

/// A kubeconfig with a token.
fn credentials(server: &str, ca: &Path, token: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": OPERATOR}}],
        "clusters": [{"name": "c", "cluster": {"server": server, "certificate-authority": ca}}],
        "users": [{"name": "u", "user": {"token": token}}],
    })
}
