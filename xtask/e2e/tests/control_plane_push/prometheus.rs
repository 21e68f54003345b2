//! What tests ask a Prometheus server, and promtool.

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::Value;
use xtask::tools;

use crate::bed::eventually;
use crate::process::get;
pub(crate) use crate::prometheus_server::Prometheus;

impl Prometheus {
    /// Starts one, and waits until it has seen itself.
    pub(crate) async fn start(jobs: &[Value], groups: &Value) -> Self {
        let this = Self::spawn(jobs, groups);
        eventually("Prometheus to have seen itself", async || {
            let page = get(this.address, "/api/v1/query?query=up").await?;
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
