//! The example operator in three shards, with its webhooks, and clients that make websites.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::Space;
use http::Request;
use k8s_openapi::ByteString;
use kube::Client;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use xtask::user_cluster::MADE;

use crate::mesh::operator::{self, LOCK, NAME, OperatorSpec, PLAIN};
use crate::mesh::{checkout, in_ours, kubectl, until};

/// Where the operator serves its webhooks.
pub(crate) const PORT: u16 = 9443;

/// The Service in front of all replicas, as the operator's manifests have it.
pub(crate) const SERVICE: &str = "webhook-service";

/// How many replicas there are, each of a shard.
const REPLICAS: usize = 3;

/// The root's canary, and that slots move to and from.
pub(crate) const CANARY: &str = "websites-0-canary";

/// How long the API server waits for one review: its default.
pub(crate) const REVIEWED_WITHIN: Duration = Duration::from_secs(10);

/// Over how many namespaces the websites are spread.
const NAMESPACES: usize = 24;

/// How many websites a namespace may have: the operator's default.
const MAX_WEBSITES: usize = 3;

/// How many clients make websites at once.
const CLIENTS: usize = 6;

/// A certificate authority, and the webhook server's name.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    name: String,
}

/// What came of making a website.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// With this title.
    Allowed(String),
    /// As the operator says.
    Refused(String),
    /// As the API server says.
    Failed(String),
}

/// A website that was made, and when.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) namespace: String,
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
    pub(crate) verdict: Verdict,
}

/// Clients that make websites, until they are told to end.
pub(crate) struct Clients {
    tasks: JoinSet<Vec<Made>>,
    progress: Arc<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    made: AtomicUsize,
    is_over: AtomicBool,
}

impl Authority {
    /// Of a test's namespace.
    pub(crate) fn new(space: Space<'_>) -> Result<Self> {
        let mut params = CertificateParams::new([])?;
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        Ok(Self { issuer, name: format!("{SERVICE}.{}.svc", space.name()) })
    }

    /// Its own certificate.
    pub(crate) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// The name that its certificates are for.
    pub(crate) fn server_name(&self) -> &str {
        &self.name
    }

    /// A Secret with a new pair for the webhook server, and the certificate in it.
    pub(crate) fn secret(&self) -> Result<(Value, String)> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new([self.name.clone()])?.signed_by(&key, &self.issuer)?.pem();
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "certs"},
            "type": "kubernetes.io/tls", "stringData": {"tls.crt": certificate, "tls.key": key.serialize_pem()}});
        Ok((secret, certificate))
    }
}

/// The namespaces of the websites.
pub(crate) fn namespaces(space: Space<'_>) -> impl Iterator<Item = String> {
    (0..NAMESPACES).map(move |number| format!("{}-{number}", space.name()))
}

/// A third of the slots of these namespaces, for the canary: the first or the second.
pub(crate) fn third(space: Space<'_>, number: usize) -> Result<Vec<String>> {
    let slots = namespaces(space).map(|name| NamespaceHash::default().slot(&name).to_string());
    let slots: Vec<String> = slots.collect::<BTreeSet<_>>().into_iter().collect();
    Ok(slots.chunks(slots.len() / 3).nth(number).context("a third")?.to_vec())
}

/// How many websites there are in the namespace of this number: none in some, and too many in others.
fn websites(number: usize) -> usize {
    number % (MAX_WEBSITES + 2)
}

fn title(namespace: &str) -> String {
    format!("Welcome to {namespace}")
}

/// What one replica that sees everything says of one more website in a namespace.
pub(crate) fn expected(namespace: &str) -> Result<Verdict> {
    let number = namespace.rsplit('-').next().context("a number")?.parse()?;
    let count = websites(number);
    if count < MAX_WEBSITES {
        return Ok(Verdict::Allowed(title(namespace)));
    }
    Ok(Verdict::Refused(format!("namespace {namespace} has {count} websites, of {MAX_WEBSITES} at most")))
}

/// Deploys the operator in three shards, over namespaces with their websites, and has the API server ask it.
pub(crate) fn deploy(space: Space<'_>, authority: &Authority, runtime: &Runtime) -> Result<()> {
    let labels = checkout("deploy/example-sharded/labels.yaml").display().to_string();
    kubectl(space.cluster(), &["apply", "--filename", &labels])?;
    let items: Vec<Value> =
        (0..).zip(namespaces(space)).flat_map(|(number, name)| objects(space, number, &name)).collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string();
    // For some seconds after the kind was made known, the API server's own admission does not know it.
    until("the websites to be taken", || Ok(space.cluster().ask(&["apply", "--filename", "-"], &list).ok()))?;
    let (secret, _) = authority.secret()?;
    let service = manifest("service.yaml", space)?;
    let operator =
        [&[secret, root(space, &third(space, 0)?)], &service[..], &operator::account(space)[..], &[workload()]];
    space.apply(&json!({"apiVersion": "v1", "kind": "List", "items": operator.concat()}).to_string())?;
    operator::rolled_out(space)?;
    let mut webhooks = manifest("manifests.yaml", space)?;
    for configuration in &mut webhooks {
        configuration["metadata"] = json!({"name": space.name(), "labels": {MADE: "true"}});
        let webhook = &mut configuration["webhooks"][0];
        webhook["clientConfig"]["caBundle"] = json!(ByteString(authority.pem().into_bytes()));
        webhook["clientConfig"]["service"]["namespace"] = json!(space.name());
        webhook["namespaceSelector"] = json!({"matchLabels": {"websites-of": space.name()}});
    }
    space.apply(&json!({"apiVersion": "v1", "kind": "List", "items": webhooks}).to_string())?;
    let client = runtime.block_on(space.cluster().client())?;
    // kube-proxy may not know the new Service yet.
    until("the webhooks to be called", || {
        let of = |name: String| (runtime.block_on(make_website(&client, &name)), name);
        let failed = namespaces(space).map(of).find(|(verdict, _)| matches!(verdict, Verdict::Failed(_)));
        Ok(failed.is_none().then_some(()))
    })?;
    runtime.block_on(all_right_at_rest(space))
}

/// A namespace with its ConfigMap and its websites, which have no pages.
fn objects(space: Space<'_>, number: usize, name: &str) -> Vec<Value> {
    let labels = json!({"websites-of": space.name()});
    let metadata = |object: &str| json!({"namespace": name, "name": object, "labels": labels});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": name, "labels": {MADE: "true", "websites-of": space.name()}}});
    let defaults = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata("website-defaults"),
        "data": {"title": title(name)}});
    let websites = (0..websites(number)).map(|number| {
        json!({"apiVersion": "web.example.com/v1alpha1", "kind": "Website",
            "metadata": metadata(&format!("site-{number}")), "spec": {"title": "Hello", "pages": 0}})
    });
    [namespace, defaults].into_iter().chain(websites).collect()
}

/// A file of the operator's own manifests, as a list.
fn manifest(name: &str, space: Space<'_>) -> Result<Vec<Value>> {
    let file = checkout("deploy/example-operator/config/webhook").join(name).display().to_string();
    let read = ["create", "--dry-run=client", "--output=json", "--filename", &file];
    let text = space.kubectl(&read)?;
    let mut objects = Vec::new();
    for object in serde_json::Deserializer::from_str(&text).into_iter::<Value>() {
        let mut object = object?;
        match object["items"].take() {
            Value::Array(items) => objects.extend(items),
            _ => objects.push(object),
        }
    }
    for object in objects.iter_mut().filter(|object| object["kind"] == "Service") {
        object["spec"]["selector"] = json!({"app": NAME});
        object["metadata"]["namespace"] = json!(space.name());
    }
    Ok(objects)
}

fn root(space: Space<'_>, canary: &[String]) -> Value {
    let divided = json!([{"apiGroups": ["web.example.com"], "resources": ["websites"]},
        {"apiGroups": [""], "resources": ["configmaps"]}]);
    json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": "websites"},
        "spec": {"controller": {"leaderElectionName": LOCK},
            "webhook": {"certDir": "/certs", "port": PORT, "onUnowned": "Fail"},
            "root": {"prefix": "websites", "targetDeployment": NAME,
                "canary": {"replicas": 1, "inShardHash": canary},
                "auto": {"shardingSize": REPLICAS - 1, "everyShardReplicas": 1},
                "resourceSelector": [{"relateResources": divided,
                    "selector": {"matchLabels": {"websites-of": space.name()}}}]}}})
}

fn workload() -> Value {
    let mut workload = operator::workload(OperatorSpec { replicas: REPLICAS, ..PLAIN });
    let pod = &mut workload["spec"]["template"]["spec"];
    pod["volumes"] = json!([{"name": "certs", "secret": {"secretName": "certs"}}]);
    let container = &mut pod["containers"][0];
    container["volumeMounts"] = json!([{"name": "certs", "mountPath": "/certs", "readOnly": true}]);
    container["args"] = json!(["--leader-elect", "--health-probe-bind-address=:8081", "--webhook-cert-path=/certs"]);
    workload
}

/// Has the canary own these slots, and waits until it does.
pub(crate) fn move_slots(space: Space<'_>, slots: &[String]) -> Result<()> {
    space.apply(&root(space, slots).to_string())?;
    until("the slots to have moved", || {
        let table = ownership(space)?;
        let owned = table["slots"].as_object().context("slots")?.iter().filter(|(_, owner)| **owner == CANARY);
        let owned: BTreeSet<&str> = owned.map(|(slot, _)| slot.as_str()).collect();
        Ok((owned == slots.iter().map(String::as_str).collect()).then_some(()))
    })
}

/// Who owns what.
pub(crate) fn ownership(space: Space<'_>) -> Result<Value> {
    let root = space.kubectl(&["get", "shardingconfig", "websites", "--output=json"])?;
    Ok(serde_json::from_str::<Value>(&root)?["status"]["ownership"].take())
}

/// How many reviews were answered by whom, as the node's proxy counts them.
pub(crate) fn answered(space: Space<'_>, route: &str) -> Result<u64> {
    let page =
        in_ours(space.cluster(), &["exec", "daemonset/ctrlmesh-node", "--", "/ctrlmesh-proxy", "probe", "/metrics"])?;
    let metric = format!("ctrlmesh_proxy_webhook_requests_total{{route=\"{route}\",result=\"ok\"}} ");
    Ok(page.lines().find_map(|line| line.strip_prefix(&metric)?.parse().ok()).unwrap_or_default())
}

/// Removes what is outside the test's own namespace.
pub(crate) fn remove(space: Space<'_>) -> Result<()> {
    let name = space.name();
    space.kubectl(&["delete", "validatingwebhookconfiguration,mutatingwebhookconfiguration", name])?;
    for namespace in namespaces(space) {
        kubectl(space.cluster(), &["--namespace", &namespace, "delete", "websites", "--all"])?;
    }
    operator::end(space)?;
    let ours = format!("--selector=websites-of={name}");
    kubectl(space.cluster(), &["delete", "namespace", "--wait=false", &ours]).map(drop)
}

impl Clients {
    /// Begins to make websites, without keeping any. It belongs to the runtime that it is made in.
    pub(crate) async fn start(space: Space<'_>) -> Result<Self> {
        let client = space.cluster().client().await?;
        let progress = Arc::<Progress>::default();
        let namespaces: Arc<[String]> = namespaces(space).collect();
        let mut tasks = JoinSet::new();
        for _ in 0..CLIENTS {
            tasks.spawn(make_websites(client.clone(), namespaces.clone(), progress.clone()));
        }
        Ok(Self { tasks, progress })
    }

    /// How many were made so far.
    pub(crate) fn made(&self) -> usize {
        self.progress.made.load(Ordering::Relaxed)
    }

    /// Lets them make no further ones: all that were made.
    pub(crate) async fn end(self) -> Result<Vec<Made>> {
        self.progress.is_over.store(true, Ordering::Relaxed);
        Ok(self.tasks.join_all().await.concat())
    }
}

async fn make_websites(client: Client, namespaces: Arc<[String]>, progress: Arc<Progress>) -> Vec<Made> {
    let mut all = Vec::new();
    while !progress.is_over.load(Ordering::Relaxed) {
        let number = progress.made.fetch_add(1, Ordering::Relaxed);
        let Some(namespace) = namespaces.get(number % namespaces.len()) else { break };
        let begun = Instant::now();
        let verdict = make_website(&client, namespace).await;
        all.push(Made { namespace: namespace.clone(), begun, ended: Instant::now(), verdict });
    }
    all
}

/// Makes a website without a title, of which nothing stays.
pub(crate) async fn make_website(client: &Client, namespace: &str) -> Verdict {
    let website = json!({"apiVersion": "web.example.com/v1alpha1", "kind": "Website",
        "metadata": {"name": "one-more"}, "spec": {"pages": 0}});
    let path = format!("/apis/web.example.com/v1alpha1/namespaces/{namespace}/websites?dryRun=All");
    let request = Request::post(path).header("content-type", "application/json").body(website.to_string().into_bytes());
    let Ok(request) = request else { return Verdict::Failed("no request".to_owned()) };
    match client.request::<Value>(request).await {
        Ok(made) => Verdict::Allowed(made["spec"]["title"].as_str().unwrap_or_default().to_owned()),
        Err(kube::Error::Api(status)) => match status.message.split_once("denied the request: ") {
            Some((_, said)) => Verdict::Refused(said.to_owned()),
            None => Verdict::Failed(status.message.clone()),
        },
        Err(error) => Verdict::Failed(error.to_string()),
    }
}

/// Makes a website in each namespace, of which each verdict must be right.
pub(crate) async fn all_right_at_rest(space: Space<'_>) -> Result<()> {
    let client = space.cluster().client().await?;
    for namespace in namespaces(space) {
        let verdict = make_website(&client, &namespace).await;
        ensure!(verdict == expected(&namespace)?, "{namespace}: {verdict:?}");
    }
    Ok(())
}

impl fmt::Display for Made {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} after {:?}: {:?}", self.namespace, self.ended - self.begun, self.verdict)
    }
}
