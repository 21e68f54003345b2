//! A real Prometheus keeps the exemplars that a proxy shows.

use http::{HeaderValue, Version};
use serde_json::json;
use tokio::net::TcpStream;

use crate::bed::Bed;
use crate::collector::Collector;
use crate::harness::client::{Client, plain_get};
use crate::harness::proxy::Proxy;
use crate::harness::until;
use crate::prometheus::Prometheus;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

impl Prometheus {
    async fn exemplars(&self, series: &str) -> String {
        if TcpStream::connect(self.address).await.is_err() {
            return String::new();
        }
        // From the beginning of time to the year 2100.
        let query = format!("/api/v1/query_exemplars?query={series}&start=0&end=4102444800");
        plain_get(self.address, &query).await.1
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
    let job = json!({"job_name": "proxy", "static_configs": [{"targets": [proxy.admin.to_string()]}]});
    let prometheus = Prometheus::spawn(&[job], &json!([]));
    for series in ["pod_requests_total", "pod_request_seconds_bucket", "added_seconds_bucket"] {
        let series = format!("ctrlmesh_proxy_{series}");
        until(&series, || async {
            let kept = prometheus.exemplars(&series).await;
            kept.contains(&series) && kept.contains(TRACE)
        })
        .await;
    }
}
