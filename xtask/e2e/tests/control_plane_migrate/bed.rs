//! A control plane with the predecessor's state, and the command.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::{ControlPlane, Entered, Network, Options, retry, skipped};
use http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::task;
use xtask::tools;

use crate::harness::{self, NAMESPACE as SYSTEM};
use crate::predecessor::{self, KEY, OPERATOR};
use crate::stand_ins::{self, StandIn};

/// Not of loopback, so that the API server is an endpoint that shows what it fences.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Where our manager's webhooks listen, each time that it starts.
const WEBHOOKS: &str = "127.0.0.1:19443";

pub(crate) const ADMISSION: &str = "/apis/admissionregistration.k8s.io/v1";

pub(crate) struct Bed {
    pub(crate) client: Client,
    pub(crate) plane: Arc<ControlPlane>,
    stand_ins: Vec<StandIn>,
    _entered: Entered,
    _network: Network,
}

impl Bed {
    /// Starts it, without our manager; `None` where this may not have a network of its own.
    pub(crate) async fn start(test: &str) -> Result<Option<Self>> {
        let network = match Network::make(&[ADDRESS]) {
            Ok(network) => network,
            Err(error) if tools::on_path("ip") => return Err(error),
            Err(error) => return skipped(test, &format!("{error:#}")).map(|()| None).map_err(Into::into),
        };
        let entered = network.enter()?;
        let options = Options { controller_manager: true, addresses: vec![ADDRESS], ..Options::default() };
        let plane = Arc::new(ControlPlane::start(&options)?);
        let client = plane.client().await?;
        harness::install(&client).await?;
        predecessor::install(&client).await?;
        let stand_ins = vec![stand_ins::kubelet(client.clone()), stand_ins::predecessors_manager(client.clone())];
        Ok(Some(Self { client, plane, stand_ins, _entered: entered, _network: network }))
    }

    /// Makes the rules in this group, and the operator's pods with this trigger.
    pub(crate) async fn with_rules(&self, group: &str) -> Result<()> {
        for (plural, object) in predecessor::rules(group) {
            post(&self.client, &collection(group, plural), object).await?;
        }
        let sets = format!("/apis/apps/v1/namespaces/{OPERATOR}/statefulsets");
        post(&self.client, &sets, predecessor::operator(&format!("{group}/enable-proxy"))).await?;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), OPERATOR);
        retry(|| async {
            let ready = pods.list(&ListParams::default()).await?.items.into_iter();
            let ready = ready
                .filter(|pod| pod.status.as_ref().is_some_and(|status| status.phase.as_deref() == Some("Running")));
            ensure!(ready.count() == 3, "pods are missing");
            Ok(())
        })
        .await?;
        predecessor::register_webhooks(&self.client).await
    }

    /// Makes our managers' Deployment and the webhook for pods, and runs a manager as the Deployment says.
    pub(crate) async fn install_ours(&mut self, replicas: u32) -> Result<()> {
        let flags = ["--sharding-hash=kusionstack".to_owned(), format!("--label-sharding-hash={KEY}")];
        let more = ["--label-rate=1000", "--webhook-host=127.0.0.1", &format!("--listen-webhook={WEBHOOKS}")]
            .map(str::to_owned);
        let template = json!({"metadata": {"labels": {"app": "m"}}, "spec": {"automountServiceAccountToken": false,
            "containers": [{"name": "manager", "image": "none", "args": flags}]}});
        let manager = json!({"metadata": {"name": "ctrlmesh-manager"},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "m"}}, "template": template}});
        post(&self.client, &format!("/apis/apps/v1/namespaces/{SYSTEM}/deployments"), manager).await?;
        let flags = flags.into_iter().chain(more).collect();
        self.stand_ins.push(stand_ins::our_manager(Arc::clone(&self.plane), self.client.clone(), flags));
        let pods = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]});
        let mut hook = our_webhook("inject", &pods);
        hook["objectSelector"] = json!({"matchLabels": {"ctrlmesh.kusionstack.io/enable-proxy": "true"}});
        post(&self.client, &format!("{ADMISSION}/mutatingwebhookconfigurations"), our_webhooks(hook)).await
    }

    /// Makes our webhook for rules, which fails closed.
    pub(crate) async fn install_validation(&self) -> Result<()> {
        let rules = json!({"apiGroups": ["ctrlmesh.kusionstack.io"], "apiVersions": ["v1alpha1"],
            "resources": ["shardingconfigs", "circuitbreakers", "faultinjections", "managerstates"],
            "operations": ["CREATE", "UPDATE"]});
        let webhooks = our_webhooks(our_webhook("validate", &rules));
        post(&self.client, &format!("{ADMISSION}/validatingwebhookconfigurations"), webhooks).await
    }

    /// Says how many managers of ours are to run.
    pub(crate) async fn scale_ours(&self, replicas: u32) -> Result<()> {
        let path = format!("/apis/apps/v1/namespaces/{SYSTEM}/deployments/ctrlmesh-manager");
        merge(&self.client, &path, &json!({"spec": {"replicas": replicas}})).await.map(drop)
    }

    /// The command, with these words.
    pub(crate) async fn migrate(&self, words: &[&str]) -> Result<Output> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_e2e-ctrlmesh"));
        command.arg("migrate").args(words).arg("--kubeconfig").arg(self.plane.kubeconfig());
        // This thread is in the network of the bed.
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        Ok(task::spawn_blocking(|| child.wait_with_output()).await??)
    }

    /// What the command prints, where it succeeds.
    pub(crate) async fn migrated(&self, words: &[&str]) -> Result<String> {
        let output = self.migrate(words).await?;
        let said = String::from_utf8(output.stdout)?;
        ensure!(output.status.success(), "{words:?}: {said}\n{}", String::from_utf8_lossy(&output.stderr));
        Ok(said)
    }

    /// All that a migration changes, as it is now.
    pub(crate) async fn state(&self) -> Result<BTreeMap<String, Value>> {
        let paths = [
            collection("ctrlmesh.kusionstack.io", "shardingconfigs"),
            collection("ctrlmesh.kusionstack.io", "circuitbreakers"),
            format!("/apis/apps/v1/namespaces/{OPERATOR}/statefulsets"),
            format!("/apis/apps/v1/namespaces/{}/deployments", predecessor::NAMESPACE),
            format!("{ADMISSION}/mutatingwebhookconfigurations/ctrlmesh-webhook"),
            format!("{ADMISSION}/validatingwebhookconfigurations/ctrlmesh-webhook"),
            format!("{ADMISSION}/validatingadmissionpolicies"),
            format!("{ADMISSION}/validatingadmissionpolicybindings"),
        ];
        let mut state = BTreeMap::new();
        for path in paths {
            for object in items(&self.client, &path).await? {
                let metadata = &object["metadata"];
                let name = metadata["name"].as_str().context("a name")?;
                // The informer's policy stays, whatever is undone.
                if name == "ctrlmesh-fence" {
                    continue;
                }
                let kept = json!({"spec": object["spec"], "webhooks": object["webhooks"], "labels": metadata["labels"],
                    "finalizers": metadata["finalizers"], "owners": metadata["ownerReferences"]});
                state.insert(format!("{path} {name}"), kept);
            }
        }
        let labels = items(&self.client, "/apis/ctrlmesh.kusionstack.io/v1alpha1/managerstates").await?;
        state.insert("labels".to_owned(), labels.iter().map(|one| one["status"]["labels"].clone()).collect());
        Ok(state)
    }
}

/// A webhook at this path of our manager's.
fn our_webhook(path: &str, rules: &Value) -> Value {
    json!({"name": format!("{path}.ctrlmesh.kusionstack.io"), "sideEffects": "None", "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail", "clientConfig": {"url": format!("https://{WEBHOOKS}/{path}")}, "rules": [rules]})
}

fn our_webhooks(hook: Value) -> Value {
    let labels = json!({"app.kubernetes.io/part-of": "ctrlmesh"});
    json!({"metadata": {"name": "ctrlmesh", "labels": labels}, "webhooks": [hook]})
}

/// Objects of these kinds in the operator's namespace.
pub(crate) fn collection(group: &str, plural: &str) -> String {
    format!("/apis/{group}/v1alpha1/namespaces/{OPERATOR}/{plural}")
}

/// The items of a list, or the object itself; none where there is no such object.
pub(crate) async fn items(client: &Client, path: &str) -> Result<Vec<Value>> {
    let answer = client.request::<Value>(Request::get(path).body(Vec::new())?).await;
    Ok(match answer {
        Ok(mut list) => match list.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => items,
            _ => vec![list],
        },
        Err(kube::Error::Api(status)) if status.is_not_found() => Vec::new(),
        Err(error) => return Err(error.into()),
    })
}

pub(crate) async fn post(client: &Client, path: &str, object: Value) -> Result<()> {
    let request = Request::post(path).header("content-type", "application/json").body(serde_json::to_vec(&object)?)?;
    client.request::<Value>(request).await.with_context(|| format!("post to {path}: {object}"))?;
    Ok(())
}

pub(crate) async fn merge(client: &Client, path: &str, change: &Value) -> Result<Value> {
    let request = Request::patch(path).header("content-type", "application/merge-patch+json");
    Ok(client.request::<Value>(request.body(serde_json::to_vec(change)?)?).await?)
}

/// Names of the operator's pods whose UIDs are these.
pub(crate) async fn uids(client: &Client) -> Result<BTreeMap<String, Option<String>>> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), OPERATOR);
    let pods = pods.list(&ListParams::default()).await?;
    Ok(pods.iter().map(|pod| (pod.name_any(), pod.uid())).collect())
}
