//! Faults that an operator's requests to other servers meet on purpose.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::bed::{Egress, SERVERS, write_faults};
use crate::harness::until;

const ALL: u32 = 1_000_000_000;

/// So long that no test waits for it.
const HOUR: u64 = 3_600_000_000_000;

fn fault(name: &str, effect: &Value, http: &Value) -> Value {
    let mut fault = json!({"injection": "ops/storm", "fault": name, "http": [http]});
    fault.as_object_mut().unwrap().extend(effect.as_object().unwrap().clone());
    fault
}

fn delay(nanoseconds: u64) -> Value {
    json!({"delay": {"nanoseconds": nanoseconds, "share": ALL}})
}

fn abort(status: u16) -> Value {
    json!({"abort": {"status": status, "share": ALL}})
}

fn at_path(path: &str) -> Value {
    json!({"path": {"exact": path}, "ports": [8080]})
}

async fn with_faults(egress: &Egress, epoch: u64, faults: &Value) {
    write_faults(&egress.node, epoch, faults);
    egress.in_force(epoch).await;
}

async fn injected(egress: &Egress, fault: &str, effect: &str) -> f64 {
    egress.metric(&format!(r#"faults_injected_total{{fault="ops/storm/{fault}",effect="{effect}"}}"#)).await
}

/// A client that sends a request, which waits in the proxy, and prints the answer's first line.
async fn waiting(egress: &Egress) -> Child {
    let script = format!(
        "import socket; s = socket.create_connection(('{SERVERS}', 8080))\n\
         s.sendall(b'GET /waits HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n'); print(s.makefile().readline())"
    );
    let mut command = egress.node.bed.inside(&egress.node.bed.cgroup("a"), "", "python3");
    let child = command.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let delayed = r#"ctrlmesh_proxy_faults_injected_total{fault="ops/storm/long",effect="delay"} 1"#;
    until("the request to wait", || async { egress.proxy.page().await.contains(delayed) }).await;
    child
}

fn printed(child: Child) -> String {
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_in_the_clear_are_delayed_and_aborted() {
    let mut egress = Egress::new().await;
    egress.http(8080, None);
    let user = json!({"headers": [{"name": "X-User", "value": "op"}], "ports": [8080]});
    let faults = json!([
        fault("slow", &delay(300_000_000), &at_path("/slow")),
        fault("down", &abort(503), &at_path("/down")),
        fault("user", &abort(429), &user),
        fault("empty", &abort(204), &at_path("/empty")),
        fault("port", &abort(500), &json!({"ports": [8081]})),
        fault("api", &abort(500), &json!({})),
    ]);
    with_faults(&egress, 2, &faults).await;
    for version in ["--http1.1", "--http2-prior-knowledge"] {
        let begun = Instant::now();
        assert_eq!(egress.asked(&[version, "http://allowed.test:8080/slow?a=b"]).await["path"], "/slow?a=b");
        assert!(begun.elapsed() >= Duration::from_millis(300));
        egress.asked(&[version, "http://allowed.test:8080/other"]).await;
        let down = &["http://allowed.test:8080/a/../down"][..];
        for (arguments, name, code) in
            [(down, "down", 503), (&["--header", "x-user: op", "http://allowed.test:8080/"], "user", 429)]
        {
            let (text, _) = egress.curl(&[&[version, "--path-as-is", "--include"], arguments].concat()).await;
            let message = format!("ctrlmesh: fault \"{name}\" of FaultInjection ops/storm\n");
            assert!(text.ends_with(&format!("{message}\n{code}")), "{text}");
            assert!(text.contains(&format!("x-ctrlmesh-fault: ops/storm/{name}\r\n")), "{text}");
        }
        assert_eq!(egress.curl(&[version, "http://allowed.test:8080/empty"]).await, ("\n204".to_owned(), 0));
    }
    for (fault, effect) in [("slow", "delay"), ("down", "abort"), ("user", "abort"), ("empty", "abort")] {
        assert_eq!(injected(&egress, fault, effect).await, 2.0, "{fault}");
    }
    // The connection can be used again.
    let again = ["down", "empty", "other"].map(|path| format!("http://allowed.test:8080/{path}"));
    let (text, _) = egress.curl(&again.each_ref().map(String::as_str)).await;
    assert!(text.contains("\n503") && text.contains("\n204") && text.ends_with("\n200"), "{text}");
    assert_eq!(egress.metric(r#"egress_connections_total{protocol="http1"}"#).await, 6.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_over_tls_are_reset_by_their_server_name() {
    let mut egress = Egress::new().await;
    egress.http(8443, Some(egress.node.pki.server(&["h2", "http/1.1"])));
    let of = |host: &str| json!({"host": {"exact": host}, "path": {"exact": "/seen-by-nobody"}, "ports": [8443]});
    let faults =
        json!([fault("down", &abort(503), &of("other.test")), fault("slow", &delay(300_000_000), &of("localhost")),]);
    with_faults(&egress, 2, &faults).await;
    let (text, code) = egress.curl(&["--insecure", "--verbose", "--stderr", "-", "https://other.test:8443/"]).await;
    assert!(code == 35 && text.contains("reset"), "{code}: {text}");
    let begun = Instant::now();
    egress.asked(&["--insecure", "https://localhost:8443/"]).await;
    assert!(begun.elapsed() >= Duration::from_millis(300));
    egress.asked(&["--insecure", "https://allowed.test:8443/"]).await;
    assert_eq!((injected(&egress, "down", "abort").await, injected(&egress, "slow", "delay").await), (1.0, 1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_no_longer_than_its_fault_is_there() {
    let mut egress = Egress::new().await;
    egress.http(8080, None);
    let long = json!({"delay": delay(HOUR)["delay"], "abort": abort(503)["abort"]});
    with_faults(&egress, 2, &json!([fault("long", &long, &at_path("/waits"))])).await;
    let client = waiting(&egress).await;
    with_faults(&egress, 3, &json!([])).await;
    assert_eq!(printed(client), "HTTP/1.1 200 OK\n\n");
    egress.asked(&["http://allowed.test:8080/waits"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_comes_while_a_request_waits_holds_for_it() {
    let mut egress = Egress::new().await;
    egress.http(8080, None);
    with_faults(&egress, 2, &json!([fault("long", &delay(HOUR), &at_path("/waits"))])).await;
    let client = waiting(&egress).await;
    let other = json!([{"parts": {"host": "other.test"}}]);
    super::write_with(&egress.node, 3, &json!([super::rule("hosts", "allow", &other, &["*"])]), &json!([]));
    assert_eq!(printed(client), "HTTP/1.1 403 Forbidden\n\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_ends_the_wait() {
    let mut egress = Egress::new().await;
    egress.http(8080, None);
    let long = json!({"delay": delay(HOUR)["delay"], "abort": abort(503)["abort"]});
    with_faults(&egress, 2, &json!([fault("long", &long, &at_path("/waits"))])).await;
    let client = waiting(&egress).await;
    egress.proxy.terminate();
    assert_eq!(printed(client), "HTTP/1.1 503 Service Unavailable\n\n");
}
