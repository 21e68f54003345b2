//! A policy change under a real client-go informer.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use crate::bed::{ALWAYS, Bed, changes, create_objects, selector_after, write, write_policy};
use crate::harness::proxy::Proxy;
use crate::harness::{soon, until};

/// The watched client-go informer of `xtask/control-plane/informer`.
struct Informer {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Informer {
    fn start(bed: &Bed, proxy: &Proxy, more: &[&str]) -> Self {
        let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../control-plane");
        let program = bed.pki.path("informer");
        let go = Command::new("go").args(["build", "-o"]).arg(&program).arg("./informer").current_dir(module).status();
        assert!(go.unwrap().success());
        let mut child = Command::new(program)
            .args(["-server", &format!("https://{}", proxy.address), "-namespace", &bed.namespace])
            .args(["-token", &bed.token, "-closely", ALWAYS])
            .arg("-ca")
            .arg(bed.pki.path("mesh.crt"))
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut informer = Self { child, lines };
        assert_eq!(informer.line()["synced"], true);
        informer
    }

    fn state(&mut self) -> Value {
        self.child.stdin.as_mut().unwrap().write_all(b"state\n").unwrap();
        self.line()
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Informer {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

async fn changes_reach_a_real_informer(more: &[&str]) {
    let bed = Bed::new().await;
    create_objects(&bed).await;
    let proxy = bed.proxy("policy", "slot in (5,6,9)");
    let mut informer = Informer::start(&bed, &proxy, more);
    let mut selector = String::new();
    let mut written = Vec::new();
    for change in 0..changes() {
        selector = selector_after(change);
        write_policy(&bed.pki, "policy", &selector);
        #[expect(clippy::cast_precision_loss, reason = "a small count")]
        let wanted = (change + 1) as f64;
        let spliced = async {
            while proxy.metric("ctrlmesh_proxy_watches_spliced_total").await < wanted {
                assert!(proxy.metric("ctrlmesh_proxy_watches_expired_total").await == 0.0);
                written.push(write(&bed, written.len()).await);
            }
        };
        soon("the watch to go over to the new policy", spliced).await;
    }
    let truth = json!(bed.truth(&selector).await);
    let informer = std::cell::RefCell::new(&mut informer);
    until("the store to equal the API server", || async { informer.borrow_mut().state()["store"] == truth }).await;
    let state = informer.borrow_mut().state();
    assert_eq!((&state["lists"], &state["watches"], &state["wrong"]), (&json!(1), &json!(1), &json!([])));
    let seen: BTreeSet<u64> = serde_json::from_value(state["closely"].clone()).unwrap();
    written.retain(|version| !seen.contains(version));
    assert!(written.is_empty(), "versions that were never seen: {written:?}");
}

#[tokio::test]
async fn an_informer_follows_policies_in_protobuf_over_http2() {
    changes_reach_a_real_informer(&[]).await;
}

#[tokio::test]
async fn an_informer_follows_policies_in_json_over_http1() {
    changes_reach_a_real_informer(&["-content-type", "application/json", "-http1"]).await;
}
