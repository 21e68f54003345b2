//! `ctrlmesh dashboard` before a scripted API server.

use std::process::Stdio;

use http::StatusCode;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::harness::run::Bed;
use crate::harness::soon;

/// The command, until it is dropped.
struct Dashboard {
    _process: Child,
    address: String,
    token: String,
    _bed: Bed,
}

/// An API server with root `web` of namespace `ops`. It has no proxies, and shows no breakers.
fn answer(target: &str) -> (StatusCode, Value) {
    let ours = "ctrlmesh.kusionstack.io/v1alpha1";
    let table =
        json!({"epoch": 3, "slots": {"7": "web-1-normal"}, "revoked": {"epoch": 3, "slots": {"8": "web-2-normal"}}});
    let root = json!({"apiVersion": ours, "kind": "ShardingConfig", "metadata": {"namespace": "ops", "name": "web"},
        "spec": {"root": {"prefix": "web", "targetDeployment": "web"}}, "status": {"epoch": 3, "ownership": table}});
    match target.split('?').next().unwrap_or_default() {
        "/apis/ctrlmesh.kusionstack.io/v1alpha1/shardingconfigs" => {
            (StatusCode::OK, json!({"apiVersion": ours, "kind": "ShardingConfigList", "metadata": {}, "items": [root]}))
        }
        "/api/v1/pods" | "/api/v1/namespaces/ctrlmesh-system/pods" => {
            (StatusCode::OK, json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []}))
        }
        _ => {
            let refused = json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403,
                "message": "not for you"});
            (StatusCode::FORBIDDEN, refused)
        }
    }
}

impl Dashboard {
    async fn start() -> Self {
        let bed = Bed::answering(|seen| answer(&seen.target)).await;
        let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh"));
        command.args(["dashboard", "--no-browser", "-A"]).env("KUBECONFIG", bed.file());
        let mut process = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = soon("the address", lines.next_line()).await.unwrap().unwrap();
        let (address, token) = line.strip_prefix("dashboard: http://").unwrap().split_once("/#token=").unwrap();
        Self { address: address.to_owned(), token: token.to_owned(), _process: process, _bed: bed }
    }

    async fn ask(&self, path: &str, token: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {token}\r\n", self.address);
        stream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes()).await.unwrap();
        stream
    }

    /// Head and body of the answer.
    async fn get(&self, path: &str, token: &str) -> (String, String) {
        let mut text = String::new();
        let mut stream = self.ask(path, token).await;
        soon("an answer", stream.read_to_string(&mut text)).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.to_lowercase(), body.to_owned())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_is_served_with_its_files_and_may_load_nothing_else() {
    let dashboard = Dashboard::start().await;
    for (path, kind) in [("/", "text/html"), ("/app.js", "text/javascript"), ("/page.css", "text/css")] {
        let (head, body) = dashboard.get(path, "").await;
        assert!(head.starts_with("http/1.1 200") && head.contains(&format!("content-type: {kind}")), "{head}");
        assert!(head.contains("content-security-policy: default-src 'self'") && !body.is_empty(), "{head}");
    }
    assert!(dashboard.get("/etc/passwd", "").await.0.starts_with("http/1.1 404"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_the_cluster_is_told_with_the_token_only() {
    let dashboard = Dashboard::start().await;
    let (head, body) = dashboard.get("/api/status", &dashboard.token).await;
    let page: Value = serde_json::from_str(&body).unwrap();
    assert!(head.starts_with("http/1.1 200"), "{head}");
    assert_eq!(
        (&page["roots"][0]["name"], &page["roots"][0]["moving"]),
        (&json!("web"), &json!({"8": "web-2-normal"}))
    );
    for token in ["", "0", &dashboard.token[1..]] {
        for path in ["/api/status", "/api/events", "/api/explain?resource=pods&name=a"] {
            assert!(dashboard.get(path, token).await.0.starts_with("http/1.1 401"), "{path} {token}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_is_sent_what_there_is_and_why_there_are_no_rates() {
    let dashboard = Dashboard::start().await;
    let mut events = BufReader::new(dashboard.ask("/api/events", &dashboard.token).await).lines();
    let rates = async {
        loop {
            let line = events.next_line().await.unwrap().unwrap();
            let Some(data) = line.strip_prefix("data: ") else { continue };
            let page: Value = serde_json::from_str(data).unwrap();
            assert_eq!((&page["roots"][0]["name"], page.get("stale")), (&json!("web"), None));
            if let Some(why) = page["noRates"].as_str() {
                return why.to_owned();
            }
        }
    };
    assert!(soon("why there are no rates", rates).await.starts_with("no proxy runs"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_cannot_be_explained_says_why() {
    let dashboard = Dashboard::start().await;
    let (head, body) = dashboard.get("/api/explain?resource=pods", &dashboard.token).await;
    assert!(head.starts_with("http/1.1 400") && body.contains("resource and name are needed"), "{head} {body}");
    let (head, body) = dashboard.get("/api/explain?resource=pods&name=a", &dashboard.token).await;
    assert!(head.starts_with("http/1.1 422") && body.contains("kubectl"), "{head} {body}");
}
