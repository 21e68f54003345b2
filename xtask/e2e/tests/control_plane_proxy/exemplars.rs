//! A real Prometheus keeps the exemplars that a proxy shows.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use http::{HeaderValue, Version};
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpStream;
use xtask::tools;

use crate::bed::Bed;
use crate::collector::Collector;
use crate::harness::client::{Client, plain_get};
use crate::harness::proxy::Proxy;
use crate::harness::until;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// Scrapes one address each second, until dropped.
struct Prometheus {
    process: Child,
    address: SocketAddr,
    _folder: TempDir,
}

impl Prometheus {
    fn start(scraped: SocketAddr) -> Self {
        let folder = TempDir::new().unwrap();
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let job = json!({"job_name": "proxy", "static_configs": [{"targets": [scraped.to_string()]}]});
        let settings = json!({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]});
        let config = folder.path().join("prometheus.yml");
        fs::write(&config, settings.to_string()).unwrap();
        let mut command = Command::new(tools::prometheus());
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()));
        command.arg(format!("--web.listen-address={address}")).args(["--log.level=error"]);
        let process = command.arg("--enable-feature=exemplar-storage").stdin(Stdio::null()).spawn().unwrap();
        Self { process, address, _folder: folder }
    }

    async fn exemplars(&self, series: &str) -> String {
        if TcpStream::connect(self.address).await.is_err() {
            return String::new();
        }
        // From the beginning of time to the year 2100.
        let query = format!("/api/v1/query_exemplars?query={series}&start=0&end=4102444800");
        plain_get(self.address, &query).await.1
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

#[tokio::test]
async fn prometheus_keeps_the_trace_of_a_request() {
    let bed = Bed::new().await;
    let collector = Collector::start().await;
    let pod = format!("{}/operator-0", bed.namespace);
    let url = format!("http://{}", collector.address);
    let proxy = Proxy::start(&bed.pki, bed.upstream(), &["--pod", &pod, "--otlp-endpoint", &url]);
    let mut request = bed.get(&bed.config_maps(), "application/json");
    let context = format!("00-{TRACE}-00f067aa0ba902b7-01");
    request.headers_mut().insert("traceparent", HeaderValue::from_str(&context).unwrap());
    Client::connect(&bed.pki, proxy.address, Version::HTTP_2).await.ask(request).await;
    let prometheus = Prometheus::start(proxy.admin);
    for series in ["pod_requests_total", "pod_request_seconds_bucket", "added_seconds_bucket"] {
        let series = format!("ctrlmesh_proxy_{series}");
        until(&series, || async {
            let kept = prometheus.exemplars(&series).await;
            kept.contains(&series) && kept.contains(TRACE)
        })
        .await;
    }
}
