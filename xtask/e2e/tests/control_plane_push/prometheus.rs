//! A real Prometheus server, and promtool.

use std::fs;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;
use xtask::tools;

use crate::bed::eventually;
use crate::process::get;

/// It watches itself, beside what it is told to.
pub(crate) struct Prometheus {
    process: Child,
    pub(crate) address: SocketAddr,
    _folder: TempDir,
}

impl Prometheus {
    /// Scrapes, and evaluates these groups of rules, once a second.
    pub(crate) async fn start(jobs: &[Value], groups: &Value) -> Self {
        let folder = TempDir::new().unwrap();
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let (config, rules) = (folder.path().join("prometheus.yml"), folder.path().join("rules.yml"));
        fs::write(&rules, json!({ "groups": groups }).to_string()).unwrap();
        let own = json!({"job_name": "self", "static_configs": [{"targets": [address.to_string()]}]});
        let scraped: Vec<&Value> = jobs.iter().chain([&own]).collect();
        let settings = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [rules],
            "scrape_configs": scraped,
        });
        fs::write(&config, settings.to_string()).unwrap();
        let mut command = Command::new(tools::prometheus());
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()));
        command.arg(format!("--web.listen-address={address}")).args(["--log.level=error"]);
        let process = command.stdin(Stdio::null()).spawn().unwrap();
        let this = Self { process, address, _folder: folder };
        eventually("Prometheus to have seen itself", async || {
            let page = get(address, "/api/v1/query?query=up").await?;
            page.contains("\"self\"").then_some(())
        })
        .await;
        this
    }

    /// The series that a query gives now, each with its labels and its value.
    pub(crate) fn query(&self, query: &str) -> Vec<Value> {
        let url = format!("http://{}", self.address);
        let output = Command::new(tools::promtool()).args(["query", "instant", "--format=json", &url, query]).output();
        let output = output.unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{query}: {error}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Whether an alert of that name fires.
    pub(crate) fn fires(&self, alert: &str) -> bool {
        !self.query(&format!("ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"}}")).is_empty()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Runs promtool with that on its standard input, and returns what it says where it does not accept it.
pub(crate) fn promtool(arguments: &[&str], input: &str) -> Result<(), String> {
    let mut command = Command::new(tools::promtool());
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    process.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = process.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&said).into_owned()) }
}
