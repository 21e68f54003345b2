//! A real Prometheus server.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;
use xtask::tools;

/// Runs until it is dropped.
pub(crate) struct Prometheus {
    process: Child,
    pub(crate) address: SocketAddr,
    _folder: TempDir,
}

impl Prometheus {
    /// Scrapes, and evaluates these groups of rules, once a second. It watches itself, beside what it is told to, and
    /// keeps exemplars. It may not answer yet.
    pub(crate) fn spawn(jobs: &[Value], groups: &Value) -> Self {
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
        command.arg(format!("--web.listen-address={address}"));
        command.args(["--log.level=error", "--enable-feature=exemplar-storage"]);
        let process = command.stdin(Stdio::null()).spawn().unwrap();
        Self { process, address, _folder: folder }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
