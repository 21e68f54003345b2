//! A pod may say to its node's proxy itself where its requests go.

use std::net::{Ipv4Addr, SocketAddr, TcpListener as StdListener, UdpSocket as StdSocket};
use std::process::{Output, Stdio};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use ctrlmesh_intercept::listener::Namespace;
use serde_json::{Value, json};
use tokio::net::{TcpListener, UdpSocket};

use super::bed::{Egress, POD, SERVERS, rule};
use super::names::Zone;
use crate::bed::Process;
use crate::harness::until;

const PROXY: &str = "http://127.0.0.1:15002";

/// [`SERVERS`].
const SERVERS_IP: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);

static ZONE: Zone = Zone {
    hosts: &[
        ("web.ops.svc.cluster.local", SERVERS_IP),
        ("long.example.com", SERVERS_IP),
        ("metadata.test", Ipv4Addr::new(169, 254, 169, 254)),
    ],
    over_tcp: "long.example.com",
};

/// A pod with a forward proxy, and a container whose files say what hosts are called.
struct ForwardBed {
    egress: Egress,
    _container: Process,
}

fn policy(epoch: u64, access: &Value) -> String {
    let egress = json!({"ports": [8080, 8443, 2525], "access": access});
    let limits = json!([{"relateResources": [{"apiGroups": [""], "resources": ["pods"]}], "selector": "team=a"}]);
    json!({"epoch": epoch, "limits": limits, "egress": egress, "forwardProxy": true}).to_string()
}

impl ForwardBed {
    async fn new(access: &Value) -> Self {
        let egress = Egress::new().await;
        let container = container(&egress);
        names(&egress);
        egress.node.write("a.policy", &policy(2, access));
        egress.redirected("127.0.0.1:15002").await;
        until("the policy", || async { egress.metric(r#"policy_epoch{pod="ops/a"}"#).await > 1.5 }).await;
        Self { egress, _container: container }
    }

    /// What curl printed when it was told to use the proxy, and its exit status.
    async fn curl(&self, arguments: &[&str]) -> (String, i32) {
        let common =
            ["--silent", "--max-time", "20", "--write-out", "\n%{http_code} %{http_connect}", "--proxy", PROXY];
        let Output { stdout, status, .. } = self.egress.run("curl", &[&common, arguments].concat()).await;
        (String::from_utf8(stdout).unwrap(), status.code().unwrap())
    }

    /// What a server saw of a request.
    async fn asked(&self, arguments: &[&str]) -> Value {
        let (text, code) = self.curl(arguments).await;
        let (body, status) = text.rsplit_once('\n').unwrap();
        assert!(status.starts_with("200 ") && code == 0, "{arguments:?}: {text} {code}");
        serde_json::from_str(body).unwrap()
    }

    /// The same with the predecessor's header, straight to the proxy.
    async fn with_header(&self, url: &str, more: &[&str]) -> (String, i32) {
        let header = format!("Mesh-Real-Endpoint: {url}");
        let direct = ["--proxy", "", "--noproxy", "*", "--header", &header, "http://127.0.0.1:15002/"];
        self.curl(&[&direct, more].concat()).await
    }
}

/// The oldest process of the pod, which sees other files than the node does.
fn container(egress: &Egress) -> Process {
    let pki = &egress.node.pki;
    egress.node.write("hosts", "10.244.1.1 listed.test secure.test localhost\n");
    let servers = format!("search ops.svc.cluster.local\nnameserver {SERVERS}\noptions ndots:5\n");
    egress.node.write("resolv.conf", &servers);
    let token = |audience: &str| {
        let claims = json!({"sub": "system:serviceaccount:ops:a", "iss": "https://issuer", "aud": [audience]});
        let encoded = |value: &Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
        format!("{}.{}.c2ln", encoded(&json!({"alg": "none"})), encoded(&claims))
    };
    egress.node.write("mounted", &token("api"));
    egress.node.write("vault", &token("vault"));
    let [hosts, resolv, token, roots] = ["hosts", "resolv.conf", "mounted", "real.crt"].map(|file| pki.path(file));
    let script = format!(
        "set -e; mount --bind {} /etc/hosts; mount --bind {} /etc/resolv.conf
         mount -t tmpfs none /run; mkdir -p /run/secrets/kubernetes.io/serviceaccount
         cp {} /run/secrets/kubernetes.io/serviceaccount/token
         mount -t tmpfs none /etc/ssl; mkdir /etc/ssl/certs; cp {} /etc/ssl/certs/ca-certificates.crt
         echo ready; exec sleep 600",
        hosts.display(),
        resolv.display(),
        token.display(),
        roots.display()
    );
    let mut command = egress.node.bed.inside(&egress.node.bed.cgroup("a"), "", "unshare");
    command.args(["--mount", "sh", "-c", &script]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut process = Process(command.spawn().unwrap());
    assert_eq!(process.line(), "ready");
    process
}

/// A name server beside the other servers.
fn names(egress: &Egress) {
    let network = Namespace::open(&egress.node.bed.path("servers")).unwrap();
    let address: SocketAddr = format!("{SERVERS}:53").parse().unwrap();
    let (udp, tcp) = network.run(|| (StdSocket::bind(address).unwrap(), StdListener::bind(address).unwrap())).unwrap();
    udp.set_nonblocking(true).unwrap();
    tcp.set_nonblocking(true).unwrap();
    tokio::spawn(ZONE.serve_udp(UdpSocket::from_std(udp).unwrap()));
    tokio::spawn(ZONE.serve_tcp(TcpListener::from_std(tcp).unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_go_where_they_say() {
    let mut bed = ForwardBed::new(&json!([])).await;
    bed.egress.http(8081, None);
    bed.egress.http(8443, Some(bed.egress.node.pki.server(&["http/1.1"])));
    for host in ["web", "web.ops.svc.cluster.local", "long.example.com", "listed.test", "LISTED.test.", SERVERS] {
        let url = format!("http://{host}:8081/a?b=c");
        let seen = bed.asked(&[&url]).await;
        let expected = json!({"host": format!("{host}:8081"), "path": "/a?b=c", "method": "GET", "version": "HTTP/1.1",
            "peer": POD, "bytes": 0});
        assert_eq!(seen, expected, "{host}");
        let tunnelled = bed.asked(&["--proxytunnel", "--data", "text", &url]).await;
        assert_eq!((&tunnelled["peer"], &tunnelled["bytes"]), (&json!(POD), &json!(4)), "{host}");
    }
    let (text, code) = bed.with_header("http://listed.test:8081/x?y", &["--data", "some"]).await;
    let seen: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!((&seen["host"], &seen["path"], code), (&json!("listed.test:8081"), &json!("/x?y"), 0), "{text}");
    // The proxy verifies the server by what the pod's image trusts.
    for (host, status) in [("localhost", "200"), ("secure.test", "502")] {
        let (text, _) = bed.with_header(&format!("https://{host}:8443/"), &[]).await;
        assert!(text.rsplit_once('\n').unwrap().1.starts_with(status), "{host}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_is_limited_through_the_forward_proxy_too() {
    let bed = ForwardBed::new(&json!([])).await;
    let api = bed.egress.node.upstream.address;
    let ca = bed.egress.node.pki.path("mesh.crt").display().to_string();
    let url = format!("https://{api}/api/v1/pods");
    let (text, code) = bed.curl(&["--cacert", &ca, &url]).await;
    assert_eq!((text.as_str(), code), ("/api/v1/pods?labelSelector=team%3Da\n200 200", 0));
    // What the proxy would send itself is not a client's TLS.
    for (text, _) in [bed.with_header(&url, &[]).await, bed.curl(&[&format!("http://{api}/api/v1/pods")]).await] {
        assert!(text.contains("reached with CONNECT only") && text.contains("\n403"), "{text}");
    }
    let clear = bed.curl(&["--proxytunnel", &format!("http://{api}/api/v1/pods")]).await;
    assert!(!clear.0.contains("\n200"), "{clear:?}");
    assert_eq!(bed.egress.metric(r#"egress_refused_total{rule="api-server"}"#).await, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_hold_in_the_forward_proxy() {
    let allowed = json!([{"parts": {"host": "listed.test"}}]);
    let private = json!([{"parts": {"scheme": "http", "host": "*", "path": "/private/*"}}]);
    let denied = json!([{"parts": {"host": SERVERS, "port": 2525}}]);
    let access = json!([
        rule("hosts", "allow", &allowed, &["*"]),
        rule("private", "deny", &private, &["GET"]),
        rule("address", "deny", &denied, &["*"])
    ]);
    let mut bed = ForwardBed::new(&access).await;
    bed.egress.http(8080, None);
    bed.egress.http(8443, Some(bed.egress.node.pki.server(&["http/1.1"])));
    bed.egress.speaks_first(2525);
    for (tunnel, url, rule) in [
        (false, "http://web:8080/", Some("hosts")),
        (true, "http://web:8080/", Some("hosts")),
        (true, "https://web:8443/", Some("hosts")),
        (false, "http://listed.test:8080/private/a", Some("private")),
        (false, "http://listed.test:8080/a", None),
        (true, "http://listed.test:8080/a", None),
        (true, "https://listed.test:8443/private/", None),
        (true, "http://listed.test:2525/", Some("address")),
    ] {
        let tunnel = if tunnel { &["--proxytunnel"][..] } else { &[] };
        let (text, _) = bed.curl(&[&["--insecure", "--include", url], tunnel].concat()).await;
        match rule {
            Some(rule) => {
                assert!(text.contains(&format!("x-ctrlmesh-rule: ops/out/{rule}")), "{url} {tunnel:?}: {text}");
                let is_refused = text.ends_with("403 000") || text.ends_with("000 403") || text.ends_with("403 403");
                assert!(is_refused, "{url} {tunnel:?}: {text}");
            }
            None => assert!(text.rsplit_once('\n').unwrap().1.starts_with("200 "), "{url} {tunnel:?}: {text}"),
        }
    }
    // A path that only the request inside shows.
    let (text, _) = bed.curl(&["--proxytunnel", "--include", "http://listed.test:8080/private/a"]).await;
    assert!(text.ends_with("\n403 200") && text.contains("x-ctrlmesh-rule: ops/out/private"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_no_way_to_what_the_pod_should_not_reach() {
    let mut bed = ForwardBed::new(&json!([])).await;
    bed.egress.http(8081, None);
    let refused = |reason: &str| format!(r#"egress_refused_total{{rule="{reason}"}}"#);
    for url in ["http://169.254.169.254/", "http://metadata.test:8080/", "http://[fe80::1]/"] {
        let (text, _) = bed.curl(&[url]).await;
        assert!(text.contains("link-local or metadata address") && text.contains("\n403 "), "{url}: {text}");
    }
    let (text, _) = bed.curl(&["--proxytunnel", "http://169.254.169.254/"]).await;
    assert!(text.ends_with("\n000 403"), "{text}");
    assert_eq!(bed.egress.metric(&refused("metadata-address")).await, 4.0);
    let (text, _) = bed.curl(&["http://127.0.0.1:15002/"]).await;
    assert!(text.contains("an address of the proxy itself") && text.contains("\n403 "), "{text}");
    // The pod's token for the API server, and one for somebody else.
    for (token, status) in [("mounted", "403"), ("vault", "200")] {
        let token = std::fs::read_to_string(bed.egress.node.pki.path(token)).unwrap();
        let header = format!("Authorization: Bearer {token}");
        let (text, _) = bed.curl(&["--header", &header, "http://listed.test:8081/"]).await;
        assert!(text.rsplit_once('\n').unwrap().1.starts_with(status), "{text}");
    }
    let token = std::fs::read_to_string(bed.egress.node.pki.path("mounted")).unwrap();
    let header = format!("X-Any: {token}");
    let (text, _) = bed.curl(&["--proxytunnel", "--header", &header, "http://listed.test:8081/"]).await;
    assert!(text.ends_with("\n403 200"), "{text}");
    assert_eq!(bed.egress.metric(&refused("service-account-token")).await, 2.0);
    let (text, _) = bed.curl(&["--proxytunnel", "--header", "Host: web", "http://listed.test:8081/"]).await;
    assert!(text.contains("Host is another one") && text.ends_with("\n400 200"), "{text}");
    // Nobody outside the pod finds it.
    let mut outside = bed.egress.node.bed.inside(&bed.egress.node.bed.cgroup("other"), "", "curl");
    let output = outside.args(["--silent", "--max-time", "5", "--proxy", PROXY, "http://listed.test:8081/"]);
    assert_eq!(output.output().unwrap().status.code(), Some(7), "connection refused");
    for (url, status) in [("http://nowhere.test/", "502"), ("http://listed.test:9/", "502"), ("ftp://a.test/", "400")] {
        let (text, _) = bed.curl(&[url]).await;
        assert!(text.rsplit_once('\n').unwrap().1.starts_with(status), "{url}: {text}");
    }
    // A rule that names a metadata address opens it; nobody is there in this test.
    let metadata = json!([{"parts": {"host": "169.254.169.254", "port": 8080}}]);
    bed.egress.node.write("a.policy", &policy(3, &json!([rule("metadata", "allow", &metadata, &["GET"])])));
    until("the rule", || async { bed.egress.metric(r#"policy_epoch{pod="ops/a"}"#).await > 2.5 }).await;
    let (text, _) = bed.curl(&["http://169.254.169.254:8080/"]).await;
    assert!(text.contains("is not reached"), "{text}");
    // Whoever owns a name says what it means: a rule that names it opens nothing.
    bed.egress.node.write(
        "a.policy",
        &policy(4, &json!([rule("name", "allow", &json!([{"parts": {"host": "metadata.test"}}]), &["GET"])])),
    );
    until("the rule", || async { bed.egress.metric(r#"policy_epoch{pod="ops/a"}"#).await > 3.5 }).await;
    let (text, _) = bed.curl(&["http://metadata.test:8080/"]).await;
    assert!(text.contains("names that address"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_comes_and_goes_with_the_policy() {
    let mut bed = ForwardBed::new(&json!([])).await;
    bed.egress.http(8081, None);
    assert_eq!(bed.asked(&["http://listed.test:8081/"]).await["peer"], POD);
    bed.egress.node.write("a.policy", &json!({"epoch": 3, "mode": "pass"}).to_string());
    let gone = async || bed.curl(&["http://listed.test:8081/"]).await.1 == 7;
    until("nobody to listen", gone).await;
}
