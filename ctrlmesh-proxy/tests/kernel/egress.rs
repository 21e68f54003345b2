//! What a pod talks to beside the API server goes through its node's proxy, where a rule names the port.

use std::process::Stdio;

use serde_json::{Value, json};

use self::bed::{Egress, POD, SERVERS, rule, write, write_with};
use crate::bed::Process;
use crate::harness::until;
use crate::operators::served;

mod bed;
mod clients;
mod names;
mod forward;
mod faults;

#[tokio::test(flavor = "multi_thread")]
async fn requests_in_the_clear_pass_or_are_refused_one_by_one() {
    let mut egress = Egress::new().await;
    egress.http(8080, None);
    egress.http(8081, None);
    for (more, version) in [(&["--http1.1"][..], "HTTP/1.1"), (&["--http2-prior-knowledge"], "HTTP/2.0")] {
        let with = |arguments: &[&'static str]| [more, arguments].concat();
        let seen = egress.asked(&with(&["http://allowed.test:8080/public/a?b=c"])).await;
        assert_eq!(
            seen,
            json!({"host": "allowed.test:8080", "path": "/public/a?b=c", "method": "GET", "version": version,
                "peer": POD, "bytes": 0})
        );
        let seen = egress.asked(&with(&["--data", "some text", "http://allowed.test:8080/"])).await;
        assert_eq!((&seen["method"], &seen["bytes"]), (&json!("POST"), &json!(9)));
        for (url, rule) in
            [("http://other.test:8080/", "hosts"), ("http://allowed.test:8080/a/../private/b", "private")]
        {
            let arguments = [more, &["--path-as-is", "--include", url]].concat();
            let (text, code) = egress.curl(&arguments).await;
            let text = text.to_lowercase();
            assert_eq!(code, 0);
            assert!(text.contains(&format!("x-ctrlmesh-rule: ops/out/{rule}")) && text.ends_with("\n403"), "{text}");
            assert!(
                text.contains(&format!("ctrlmesh-proxy: rule ops/out/{rule} does not let this pod talk to")),
                "{text}"
            );
        }
        // One method of a path, but not another.
        let put = ["--request", "PUT", "http://allowed.test:8080/private/"];
        let (text, _) = egress.curl(&[more, &put].concat()).await;
        assert!(text.ends_with("\n200"), "{text}");
    }
    let (text, _) = egress.curl(&["http://allowed.test:8080/private/", "http://allowed.test:8080/public"]).await;
    assert!(text.contains("\n403") && text.ends_with("\n200"), "{text}");
    // A port that no rule names.
    assert_eq!(egress.asked(&["http://other.test:8081/"]).await["host"], "other.test:8081");
    assert_eq!(egress.metric(r#"egress_refused_total{rule="ops/out/hosts"}"#).await, 2.0);
    assert_eq!(egress.metric(r#"egress_connections_total{protocol="http2"}"#).await, 5.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_passes_end_to_end_by_its_server_name() {
    let mut egress = Egress::new().await;
    let (pki, ca) = (&egress.node.pki, egress.node.pki.path("real.crt").display().to_string());
    let tls = pki.server(&["h2", "http/1.1"]);
    egress.http(8443, Some(tls));
    let url = "https://localhost:8443/private/a";
    for (more, version) in [
        (&["--http1.1", "--tlsv1.2", "--tls-max", "1.2"][..], "HTTP/1.1"),
        (&["--http1.1", "--tlsv1.3"], "HTTP/1.1"),
        (&["--http2", "--tlsv1.3"], "HTTP/2.0"),
    ] {
        let seen = egress.asked(&[more, &["--cacert", &ca, url]].concat()).await;
        assert_eq!((&seen["version"], &seen["peer"]), (&json!(version), &json!(POD)));
        let refused = egress.curl(&[more, &["--insecure", "https://other.test:8443/"]].concat()).await;
        assert_eq!(refused, ("\n000".to_owned(), 35), "the connection ends in the handshake");
    }
    // Without a server name it is the address that counts.
    let (_, code) = egress.curl(&["--insecure", &format!("https://{SERVERS}:8443/")]).await;
    assert_eq!(code, 35);
    assert_eq!(egress.metric(r#"egress_refused_total{rule="ops/out/hosts"}"#).await, 4.0);
    assert_eq!(egress.metric(r#"egress_connections_total{protocol="tls"}"#).await, 7.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_speaks_first_is_heard() {
    let mut egress = Egress::new().await;
    egress.speaks_first(2525);
    let script = format!(
        "import socket; s = socket.create_connection(('{SERVERS}', 2525)); f = s.makefile('rw'); \
         print(f.readline(), s.getpeername()); f.write('hello\\n'); f.flush(); print(f.readline())"
    );
    let output = egress.run("python3", &["-c", &script]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        text,
        format!("220 ready\n ('{SERVERS}', 2525)\nhello\n\n"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgraded_connection_passes_bytes() {
    let mut egress = Egress::new().await;
    egress.http(8080, None);
    let script = format!(
        "import socket; s = socket.create_connection(('{SERVERS}', 8080))\n\
         s.sendall(b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: upgrade\\r\\nUpgrade: echo\\r\\n\\r\\n')\n\
         f = s.makefile('rb')\n\
         print(f.readline()); [None for line in iter(f.readline, b'\\r\\n')]\n\
         s.sendall(b'some bytes\\n'); print(f.readline())"
    );
    let output = egress.run("python3", &["-c", &script]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        text,
        "b'HTTP/1.1 101 Switching Protocols\\r\\n'\nb'some bytes\\n'\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_change_under_open_connections() {
    let mut egress = Egress::new().await;
    egress.http(8080, None);
    egress.speaks_first(2525);
    let script = format!(
        "import socket, sys\n\
         u = socket.create_connection(('{SERVERS}', 8080)); v = u.makefile('rb')\n\
         u.sendall(b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: upgrade\\r\\nUpgrade: echo\\r\\n\\r\\n')\n\
         [None for line in iter(v.readline, b'\\r\\n')]\n\
         h = socket.create_connection(('{SERVERS}', 8080)); m = socket.create_connection(('{SERVERS}', 2525))\n\
         f, g = h.makefile('rb'), m.makefile('rb')\n\
         print(g.readline().decode().strip(), flush=True)\n\
         for line in sys.stdin:\n\
         \x20 h.sendall(b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n')\n\
         \x20 status, size = f.readline().split()[1].decode(), 0\n\
         \x20 for head in iter(f.readline, b'\\r\\n'):\n\
         \x20   if head.lower().startswith(b'content-length'): size = int(head.split()[1])\n\
         \x20 f.read(size)\n\
         \x20 try: m.sendall(b'ping\\n'); pong = g.readline().decode().strip()\n\
         \x20 except OSError: pong = ''\n\
         \x20 try: u.sendall(b'up\\n'); up = v.readline().decode().strip()\n\
         \x20 except OSError: up = ''\n\
         \x20 print(status, pong, up, flush=True)"
    );
    let mut command = egress.node.bed.inside(&egress.node.bed.cgroup("a"), "", "python3");
    let command = command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = Process(command.spawn().unwrap());
    assert_eq!(client.line(), "220 ready");
    let mut stdin = client.0.stdin.take().unwrap();
    let mut ask = || {
        use std::io::Write as _;
        writeln!(stdin).unwrap();
        client.line()
    };
    assert_eq!(ask(), "200 ping up");
    let other = json!([{"parts": {"host": "other.test"}}]);
    write(&egress.node, &json!([rule("hosts", "allow", &other, &["*"])]));
    until("the new rules", || {
        let answer = ask();
        async move { answer == "403" }
    })
    .await;
    write(&egress.node, &json!([]));
    until("no rule any more", || {
        let answer = ask();
        async move { answer == "200" }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_count_requests_and_connections_of_tls() {
    let mut egress = Egress::new().await;
    egress.http(8080, None);
    egress.http(8443, Some(egress.node.pki.server(&["h2", "http/1.1"])));
    let guard = |rule: &str, url: &Value, method: &str| {
        let bucket = json!({"burst": 2, "limit": 1, "intervalNanoseconds": 3_600_000_000_000_u64});
        json!({"breaker": "ops/out", "rule": rule, "bucket": bucket, "trigger": "limiterOnly", "requests": [],
            "urls": [{"url": url, "method": method}]})
    };
    let slow = json!({"scheme": "http", "host": "allowed.test", "port": 8080, "path": "/slow/*"});
    let tls = json!({"scheme": "https", "host": "localhost", "port": 8443});
    let guards = json!([guard("slow", &slow, "GET"), guard("tls", &tls, "*")]);
    write_with(&egress.node, 2, &json!([]), &guards);
    let asked = async |url: &str| egress.curl(&["--insecure", "--include", url]).await;
    until("the limits", || async { egress.metric(r#"policy_epoch{pod="ops/a"}"#).await > 1.5 }).await;
    for _ in 0..2 {
        assert!(asked("http://allowed.test:8080/slow/a").await.0.ends_with("\n200"));
        assert!(asked("https://localhost:8443/").await.0.ends_with("\n200"));
    }
    let (text, _) = asked("http://allowed.test:8080/slow/b").await;
    assert!(text.ends_with("\n429") && text.contains("x-ctrlmesh-rule: ops/out/slow"), "{text}");
    let seconds = text.lines().find_map(|line| line.strip_prefix("retry-after: ")).unwrap().parse::<u32>().unwrap();
    assert!((3_590..=3_600).contains(&seconds), "{text}");
    assert!(asked("http://allowed.test:8080/fast").await.0.ends_with("\n200"));
    assert_eq!(asked("https://localhost:8443/").await.1, 35);
    for rule in ["slow", "tls"] {
        let refused = format!(r#"guard_requests_total{{rule="ops/out/{rule}",outcome="refused"}}"#);
        assert_eq!(egress.metric(&refused).await, 1.0, "{rule}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_passes_while_node_proxies_come_and_go() {
    let mut egress = Egress::new().await;
    egress.http(8080, None);
    let script = format!(
        "import collections, json, socket, sys, threading\n\
         over = threading.Event(); counts = collections.Counter()\n\
         threading.Thread(target=lambda: (sys.stdin.read(), over.set())).start()\n\
         while not over.is_set():\n\
         \x20 try:\n\
         \x20   with socket.create_connection(('{SERVERS}', 8080)) as s:\n\
         \x20     s.sendall(b'GET / HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n')\n\
         \x20     counts[s.makefile().readline()[9:12]] += 1\n\
         \x20 except OSError: counts['none'] += 1\n\
         print(json.dumps(counts))"
    );
    let mut command = egress.node.bed.inside(&egress.node.bed.cgroup("a"), "", "python3");
    let command = command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let client = Process(command.spawn().unwrap());
    for _ in 0..3 {
        let refused = r#"egress_refused_total{rule="ops/out/hosts"}"#;
        until("the client to be refused", || async {
            let page = egress.proxy.page().await;
            page.contains(&format!("ctrlmesh_proxy_{refused}"))
        })
        .await;
        // The last one is killed, and the next one finds the pod attached.
        nix::sys::signal::kill(egress.proxy.pid(), nix::sys::signal::Signal::SIGKILL).unwrap();
        egress.proxy = egress.node.proxy();
        served(&egress.proxy, 1.0).await;
    }
    let counts: std::collections::BTreeMap<String, u64> = client.finish();
    assert!(counts["403"] > 0 && !counts.contains_key("200"), "{counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_breaks_the_connection() {
    let egress = Egress::new().await;
    for url in ["http://allowed.test:8080/", "https://localhost:8443/"] {
        let (_, code) = egress.curl(&[url]).await;
        assert!([35, 52, 56].contains(&code), "{url}: {code}");
    }
    assert_eq!(egress.metric("egress_failed_total").await, 2.0);
}
