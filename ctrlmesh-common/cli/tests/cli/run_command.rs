//! `ctrlmesh run` without any privilege, before a scripted API server.
//!
//! Needs python3, as a client that knows nothing of us, and bash, as a shell with job control.

use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::{fs, thread};

use crate::harness::pki::Pki;
use crate::harness::run::{Bed, LIMIT, Running, output, stderr, stdout, unignored};
use crate::harness::{soon, until};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task;

#[tokio::test(flavor = "multi_thread")]
async fn a_command_sees_only_its_shard_and_its_token_passes_through() {
    let bed = Bed::new().await;
    let output = output(bed.client(&LIMIT, &["/api/v1/pods?limit=5", "/api/v1/nodes"])).await;
    let expected = "200 /api/v1/pods?labelSelector=slot%20in%20%280%2C1%29&limit=5\n200 /api/v1/nodes";
    assert_eq!(stdout(&output), expected, "{}", stderr(&output));
    assert_eq!(bed.upstream.last().headers["authorization"], "Bearer secret");
    assert_eq!(stderr(&output), "ctrlmesh: 2 requests, 1 injected, 0 refused");
    assert!(output.status.success());
    bed.nothing_is_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn arguments_that_name_the_kubeconfig_lead_to_the_generated_one() {
    let bed = Bed::new().await;
    let argument = format!("--kubeconfig={}", bed.file().display());
    let mut run = bed.client(&LIMIT, &[&argument, "/api/v1/pods"]);
    let output = output({
        // Nothing else names it.
        run.env_remove("KUBECONFIG");
        run
    })
    .await;
    assert!(stdout(&output).contains("labelSelector"), "{} {}", stdout(&output), stderr(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_of_several_kubeconfigs_counts_with_its_context() {
    let bed = Bed::new().await;
    let first = bed.pki.path("first");
    fs::write(&first, "users: [{name: u, user: {token: other}}]").unwrap();
    let list = std::env::join_paths([Path::new("/nowhere"), &first, &bed.file()]).unwrap();
    let mut run = bed.client(&[], &["/api"]);
    run.env("KUBECONFIG", &list);
    assert_eq!(stdout(&output(run).await), "200 /api");
    assert_eq!(bed.upstream.last().headers["authorization"], "Bearer other");
    let run = bed.client(&["--context", "nobody"], &["/api"]);
    assert_eq!(stdout(&output(run).await), "200 /api");
    assert!(!bed.upstream.last().headers.contains_key("authorization"));
}

/// An API server that lets nobody in without a certificate of its CA.
fn asking(pki: &Pki) -> Arc<ServerConfig> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(pki.path("real.crt")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone());
    let chain = vec![CertificateDer::from_pem_file(pki.path("leaf.crt")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(pki.path("leaf.key")).unwrap();
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(chain, key)
        .unwrap()
        .into()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_command_may_use_the_users_certificate() {
    let pki = Pki::new();
    let server = asking(&pki);
    let bed = Bed::with(pki, server).await;
    let ca = json!({"certificate-authority": "real.crt"});
    bed.kubeconfig(ca, json!({"client-certificate": "leaf.crt", "client-key": "leaf.key"}));
    let output_ = output(bed.client(&[], &["/api"])).await;
    assert_eq!(stdout(&output_), "200 /api", "{}", stderr(&output_));
    // Whoever has not what the command was given is nobody to the proxy.
    let output_ = output(bed.client(&[], &["--bare", "/api"])).await;
    assert!(stdout(&output_).starts_with("error "), "{}", stdout(&output_));
    assert!(stderr(&output_).contains("1 connections failed in TLS"), "{}", stderr(&output_));
    // The user's own key is in none of the files.
    let secret = fs::read_to_string(bed.pki.path("leaf.key")).unwrap();
    let show = bed.run(&[], &["sh", "-c", "cat $(dirname $KUBECONFIG)/*; ls -l $(dirname $KUBECONFIG)"]);
    let shown = stdout(&output(show).await);
    assert!(!shown.contains(secret.lines().nth(1).unwrap()) && shown.contains("client-key-data"));
    let open = shown.lines().filter(|line| line.starts_with('-') && line.contains(" root "));
    assert!(open.into_iter().all(|line| line.starts_with("-rw-------")), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exit_code_is_the_commands_own() {
    let bed = Bed::new().await;
    for (script, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        // A real-time signal.
        ("kill -40 $$", 168),
    ] {
        let output = output(bed.run(&[], &["sh", "-c", script])).await;
        assert_eq!(output.status.code(), Some(code), "{script}");
        assert!(stderr(&output).starts_with("ctrlmesh: 0 requests"), "{}", stderr(&output));
    }
    let plain = bed.pki.path("real.crt");
    for (program, code, why) in [
        ("no-such-command", 127, "no such command on PATH"),
        ("/no/such/command", 127, "no such command"),
        (plain.to_str().unwrap(), 126, "not executable"),
        ("/", 126, "not executable"),
    ] {
        let output = output(bed.run(&[], &[program])).await;
        assert_eq!(output.status.code(), Some(code), "{program}");
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
    // Executable, until the kernel looks into it.
    let broken = bed.pki.path("broken");
    fs::write(&broken, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&broken, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(output(bed.run(&[], &[&broken])).await.status.code(), Some(127));
    bed.nothing_is_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn input_output_and_arguments_are_the_commands_own() {
    let bed = Bed::new().await;
    let mut run =
        Running::start(bed.run(&[], &["sh", "-c", "read line; echo \"$line\" \"$@\" >&2; cat", "--", "--run", "-x"]));
    run.0.stdin.take().unwrap().write_all(b"first\nrest\n").unwrap();
    let (code, out, error) = run.ended().await;
    assert_eq!((code, out.as_str()), (Some(0), "rest\n"));
    assert!(error.starts_with("first --run -x\n"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_signal_reaches_the_command_once_and_nothing_is_left() {
    let bed = Bed::new().await;
    for (name, signal) in [
        ("TERM", Signal::SIGTERM),
        ("INT", Signal::SIGINT),
        ("HUP", Signal::SIGHUP),
        ("QUIT", Signal::SIGQUIT),
        ("USR1", Signal::SIGUSR1),
        ("USR2", Signal::SIGUSR2),
        ("WINCH", Signal::SIGWINCH),
    ] {
        // Waits for another one for as long as a second takes to come, if there is one.
        let script = format!(
            "ulimit -c 0; n=0; trap 'n=$((n+1))' {name}; echo ready; while [ $n = 0 ]; do sleep 0.02; done; \
             sleep 0.2; echo {name} $n; exit 9"
        );
        let mut run = Running::start(unignored(bed.run(&[], &["sh", "-c", &script])));
        assert_eq!(run.line(), "ready");
        run.send(signal);
        let (code, out, error) = run.ended().await;
        assert_eq!((code, out.trim()), (Some(9), format!("{name} 1").as_str()), "{error}");
        bed.nothing_is_left();
        if signal == Signal::SIGWINCH {
            // Of a window's size nobody dies.
            continue;
        }
        // And where the command does not handle it, that is what ends it.
        let sleeping = bed.run(&[], &["sh", "-c", "ulimit -c 0; echo ready; exec sleep 60"]);
        let mut run = Running::start(unignored(sleeping));
        assert_eq!(run.line(), "ready");
        run.send(signal);
        let (code, _, error) = run.ended().await;
        assert_eq!(code, Some(128 + signal as i32), "{error}");
        bed.nothing_is_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_that_is_ignored_stays_ignored() {
    let bed = Bed::new().await;
    let mut run = Command::new("sh");
    let inner = bed.run(&[], &["sh", "-c", "echo ready; read line; echo alive"]);
    run.args(["-c", "trap '' HUP; exec \"$@\"", "--"]).arg(inner.get_program());
    run.args(inner.get_args()).env("KUBECONFIG", bed.file());
    let mut run = Running::start(run);
    assert_eq!(run.line(), "ready");
    run.send(Signal::SIGHUP);
    run.say();
    let (code, out, _) = run.ended().await;
    assert_eq!((code, out.trim()), (Some(0), "alive"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_the_start_unless_it_is_ignored() {
    let bed = Bed::new().await;
    // An API server that accepts and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = format!("https://{}", silent.local_addr().unwrap());
    bed.kubeconfig(json!({"certificate-authority": "real.crt", "server": server}), json!({}));
    for (trap, expected) in [("", 130), ("trap '' INT;", 125)] {
        let inner = bed.run(&[], &["true"]);
        let mut run = Command::new("env");
        run.args(["--default-signal", "sh", "-c", &format!("{trap} exec \"$@\""), "--"]).arg(inner.get_program());
        run.args(inner.get_args()).env("KUBECONFIG", bed.file());
        let run = Running::start(run);
        let (connection, _) = silent.accept().unwrap();
        run.send(Signal::SIGINT);
        // Where the signal is ignored, `run` ends when the API server hangs up.
        let kept = trap.is_empty().then_some(connection);
        let (code, _, error) = run.ended().await;
        assert_eq!(code, Some(expected), "{trap} {error}");
        drop(kept);
        bed.nothing_is_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leftovers_of_a_killed_run_are_swept_by_the_next() {
    let bed = Bed::new().await;
    let mut run = Running::start(bed.run(&[], &["sh", "-c", "echo $$; exec sleep 60"]));
    let command = Pid::from_raw(run.line().parse().unwrap());
    run.send(Signal::SIGKILL);
    run.0.wait().unwrap();
    until("the command to end, too", || async { signal::kill(command, None).is_err() }).await;
    assert_eq!(fs::read_dir(bed.runs()).unwrap().count(), 1);
    assert!(output(bed.run(&[], &["true"])).await.status.success());
    bed.nothing_is_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shard_follows_its_file_while_the_command_runs() {
    let bed = Bed::new().await;
    let file = bed.pki.path("shards.yaml");
    let write = |slots: &str| {
        let text = format!(
            "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: one}}\n\
             spec:\n  selector: {{matchLabels: {{app: x}}}}\n  controller: {{leaderElectionName: lead}}\n  limits:\n  - relateResources: [{{apiGroups: [''], resources: [pods]}}]\n    selector: {{matchExpressions: [{{key: slot, operator: In, values: [{slots}]}}]}}\n"
        );
        let next = bed.pki.path("next");
        fs::write(&next, text).unwrap();
        fs::rename(next, &file).unwrap();
    };
    write("'4'");
    let flags = ["--explain", "--sharding-config", file.to_str().unwrap()];
    let targets = ["/api/v1/pods"; 200];
    let lock = ["/apis/coordination.k8s.io/v1/namespaces/ops/leases/lead"];
    let mut run = Running::start(bed.client(&flags, &[&["--wait"], &lock[..], &targets].concat()));
    run.line();
    assert!(bed.upstream.last().target.ends_with("leases/lead---one"), "the lock is the shard's");
    run.say();
    let line = run.line();
    assert!(line.contains("%284%29"), "{line}");
    write("'5'");
    for _ in targets {
        run.say();
        let line = run.line();
        if line.contains("%285%29") {
            run.send(Signal::SIGTERM);
            let (_, _, error) = run.ended().await;
            let changed = "ctrlmesh: the policy changed\nctrlmesh: limit on pods of [\"\"]: slot in (5)\n";
            assert!(error.contains(changed), "{error}");
            return;
        }
        assert!(line.contains("%284%29"), "{line}");
        thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("the policy never changed");
}

/// A proxy of that kind, which leads to one server however it is called.
async fn proxied(kind: &'static str, to: std::net::SocketAddr) -> (String, task::JoinHandle<Vec<u8>>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("{kind}://me:pass@{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move {
        let mut first = Vec::new();
        // What `run` asks by itself, and what the command asks through it.
        for _ in 0..2 {
            let (mut client, _) = listener.accept().await.unwrap();
            first.clear();
            if kind == "http" {
                while !first.ends_with(b"\r\n\r\n") {
                    first.push(client.read_u8().await.unwrap());
                }
                client.write_all(b"HTTP/1.1 200 OK\r\nvia: x\r\n\r\n").await.unwrap();
            } else {
                // Greeting, login, and a request for api.example.com, 6443.
                for (bytes, answer) in [(3, &[5, 2][..]), (9, &[1, 0]), (22, &[5, 0, 0, 1, 0, 0, 0, 0, 0, 0])] {
                    let mut read = vec![0; bytes];
                    client.read_exact(&mut read).await.unwrap();
                    first.extend(read);
                    client.write_all(answer).await.unwrap();
                }
            }
            let mut server = tokio::net::TcpStream::connect(to).await.unwrap();
            tokio::spawn(async move {
                drop(tokio::io::copy_bidirectional(&mut client, &mut server).await);
            });
        }
        first
    });
    (url, serving)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_behind_a_proxy_is_reached_through_it() {
    let bed = Bed::new().await;
    for kind in ["http", "socks5"] {
        let (url, serving) = proxied(kind, bed.upstream.address).await;
        let cluster = json!({
            "server": "https://api.example.com:6443", "tls-server-name": "localhost",
            "certificate-authority": "real.crt", "proxy-url": url,
        });
        bed.kubeconfig(cluster, json!({}));
        let output = output(bed.client(&LIMIT, &["/api/v1/pods"])).await;
        assert!(stdout(&output).starts_with("200 "), "{kind}: {} {}", stdout(&output), stderr(&output));
        let asked = soon("the proxy", serving).await.unwrap();
        let asked = String::from_utf8_lossy(&asked).into_owned();
        if kind == "http" {
            assert!(asked.starts_with("CONNECT api.example.com:6443 HTTP/1.1\r\n"), "{asked}");
            assert!(asked.contains("Basic bWU6cGFzcw=="), "{asked}");
        } else {
            assert!(asked.contains("\u{2}me\u{4}pass") && asked.contains("api.example.com"), "{asked:?}");
        }
    }
}
