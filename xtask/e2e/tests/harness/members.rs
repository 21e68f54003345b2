//! Member clusters behind an aggregated API of a host, which proxies as Karmada's does: in the user's name.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use ctrlmesh_testbed::retry;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use kube::Client;
use kube::client::Body;
use rcgen::{CertificateParams, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls_pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

const VERSION: &str = "v1alpha1";

/// Whom the headers of the host name, and what they are for the member.
const USER: [(&str, &str); 2] = [("x-remote-user", "impersonate-user"), ("x-remote-group", "impersonate-group")];

/// The same of what else is known of the user, such as the pod.
const EXTRA: (&str, &str) = ("x-remote-extra-", "impersonate-extra-");

/// Serves member clusters to a host until it is dropped.
pub(crate) struct Members {
    group: String,
    #[expect(dead_code, reason = "held: the server ends with it")]
    tasks: JoinSet<()>,
}

/// What is served.
struct Served {
    group: String,
    /// By their names on the host, as their administrators.
    members: BTreeMap<String, Client>,
}

impl Members {
    /// Serves these in an API group of their own, and has the host know it by a Service of `namespace`.
    pub(crate) async fn serve(
        host: &Client,
        namespace: &str,
        group: String,
        members: BTreeMap<String, Client>,
    ) -> Result<Self> {
        let first = members.keys().next().context("a member")?.clone();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (acceptor, port) = (acceptor()?, listener.local_addr()?.port());
        let (mut tasks, served) = (JoinSet::new(), Arc::new(Served { group: group.clone(), members }));
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, served) = (acceptor.clone(), Arc::clone(&served));
                connections.spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let answer = service_fn(move |request| answer(Arc::clone(&served), request));
                    let builder = auto::Builder::new(TokioExecutor::new());
                    drop(Box::pin(builder.serve_connection(TokioIo::new(stream), answer)).await);
                });
            }
        });
        let this = Self { group, tasks };
        this.register(host, namespace, port).await?;
        let version = format!("{}/version", this.path(&first));
        retry(|| ask(host, "GET", &version, &Value::Null)).await.context("the members are not served")?;
        Ok(this)
    }

    /// The template of the paths that lead to them.
    pub(crate) fn template(&self) -> String {
        format!("/apis/{}/{VERSION}/clusters/{{cluster}}/proxy", self.group)
    }

    /// The path that leads to one of them.
    pub(crate) fn path(&self, name: &str) -> String {
        self.template().replace("{cluster}", name)
    }

    /// Has the host send requests for the group to us.
    async fn register(&self, host: &Client, namespace: &str, port: u16) -> Result<()> {
        let service = json!({
            "metadata": {"name": "members"},
            "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
        });
        ask(host, "POST", &format!("/api/v1/namespaces/{namespace}/services"), &service).await?;
        let registered = json!({
            "metadata": {"name": format!("{VERSION}.{}", self.group)},
            "spec": {
                "group": self.group, "version": VERSION, "groupPriorityMinimum": 1000, "versionPriority": 10,
                "insecureSkipTLSVerify": true,
                "service": {"namespace": namespace, "name": "members", "port": port},
            },
        });
        ask(host, "POST", "/apis/apiregistration.k8s.io/v1/apiservices", &registered).await.map(drop)
    }
}

/// Makes a namespace in a member, in which this service account of the host may do anything.
pub(crate) async fn admit(member: &Client, namespace: &str, account: &str, of: &str) -> Result<()> {
    ask(member, "POST", "/api/v1/namespaces", &json!({"metadata": {"name": namespace}})).await?;
    let binding = json!({
        "metadata": {"name": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": of}],
    });
    ask(member, "POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await.map(drop)
}

/// Asks an API server.
pub(crate) async fn ask(client: &Client, method: &str, target: &str, body: &Value) -> Result<Value> {
    let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let request = Request::builder().method(method).uri(target).header("content-type", kind).body(body)?;
    client.request(request).await.with_context(|| format!("{method} {target}"))
}

/// TLS with a certificate that nobody verifies.
fn acceptor() -> Result<TlsAcceptor> {
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(["localhost".to_owned()])?.self_signed(&key)?;
    let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(anyhow::Error::msg)?;
    let mut config = ServerConfig::builder_with_provider(aws_lc_rs::default_provider().into())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)?;
    config.alpn_protocols = ["h2", "http/1.1"].map(|name| name.as_bytes().to_vec()).to_vec();
    Ok(TlsAcceptor::from(Arc::new(config)))
}

type Answered = Response<Either<Full<Bytes>, Body>>;

async fn answer(served: Arc<Served>, request: Request<Incoming>) -> Result<Answered, Infallible> {
    let Served { group, members } = &*served;
    let (root, path) = (format!("/apis/{group}/{VERSION}"), request.uri().path().to_owned());
    if path == root {
        let resource = json!({"name": "clusters", "singularName": "cluster", "kind": "Cluster", "namespaced": false,
            "verbs": ["get"]});
        let list = json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("{group}/{VERSION}"),
            "resources": [resource]});
        return Ok(said(StatusCode::OK, &list));
    }
    let behind = path.strip_prefix(&format!("{root}/clusters/")).and_then(|rest| rest.split_once("/proxy"));
    let Some((member, behind)) = behind.and_then(|(name, behind)| Some((members.get(name)?, behind))) else {
        return Ok(said(StatusCode::NOT_FOUND, &json!({})));
    };
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let answered = forward(member, &format!("{behind}{query}"), request).await;
    Ok(answered.unwrap_or_else(|error| said(StatusCode::BAD_GATEWAY, &json!({"message": error.to_string()}))))
}

async fn forward(member: &Client, target: &str, request: Request<Incoming>) -> Result<Answered> {
    let target: Uri = target.parse()?;
    let (head, body) = request.into_parts();
    let mut sent = Request::new(Body::from(body.collect().await?.to_bytes().to_vec()));
    *sent.method_mut() = head.method;
    *sent.uri_mut() = target;
    *sent.headers_mut() = in_the_users_name(&head.headers);
    Ok(member.send(sent).await?.map(Either::Right))
}

/// What the client says that matters to the member, and what the host says of the user, as impersonation.
fn in_the_users_name(headers: &HeaderMap) -> HeaderMap {
    let mut sent = HeaderMap::new();
    for (name, value) in headers {
        let name = name.as_str();
        let passed = matches!(name, "accept" | "content-type").then(|| name.to_owned());
        let user = || USER.iter().find(|(from, _)| *from == name).map(|(_, to)| (*to).to_owned());
        let extra = || name.strip_prefix(EXTRA.0).map(|key| format!("{}{key}", EXTRA.1));
        let name = passed.or_else(user).or_else(extra).and_then(|name| HeaderName::try_from(name).ok());
        if let Some(name) = name {
            sent.append(name, value.clone());
        }
    }
    sent
}

fn said(status: StatusCode, body: &Value) -> Answered {
    let mut answer = Response::new(Either::Left(Full::from(body.to_string())));
    *answer.status_mut() = status;
    answer.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
    answer
}
