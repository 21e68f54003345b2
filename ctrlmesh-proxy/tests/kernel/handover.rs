//! One process of a node follows another: no connection is refused or passes, and one process serves at a time.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ctrlmesh_common::names::port;
use ctrlmesh_intercept::Slot;
use nix::sys::signal;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::bed;
use crate::harness::proxy::Proxy;
use crate::harness::until;
use crate::older::{LimitedBuild, once_written};
use crate::operators::{Node, Operator, refused, served, shows};
use crate::upgrade::linked;

/// A pod's connections are refused where its proxy was silent for so long; and a little.
const MAX_SILENCE: Duration = Duration::from_secs(16);

/// A proxy that meets others in a folder; it waits for so long for one that follows.
fn proxy(node: &Node, patience: &str) -> Proxy {
    proxy_of(Path::new(env!("CARGO_BIN_EXE_ctrlmesh-proxy")), node, patience)
}

/// The same, of a version of its own.
fn proxy_of(program: &Path, node: &Node, patience: &str) -> Proxy {
    let mut command = Command::new(program);
    command.arg("node").arg("--handover-dir").arg(node.pki.path("handover"));
    command.args(["--handover-timeout", patience]);
    node.run_with(command)
}

/// A second one, once it waits to follow.
async fn successor(node: &Node) -> Proxy {
    waiting(proxy(node, "60s")).await
}

async fn waiting(proxy: Proxy) -> Proxy {
    until("it to wait", || async { proxy.log().contains("waiting to follow it") }).await;
    until("it to be ready", || async { is_ready(&proxy).await }).await;
    proxy
}

/// Tells `first` to stop, and returns when `next` has been given everything and has come to its first pod; it goes on
/// when what is returned is dropped.
fn amid(node: &Node, first: &Proxy, next: &Proxy) -> File {
    let lock = File::open(node.bed.pins()).unwrap();
    lock.lock().unwrap();
    first.terminate();
    bed::waits_for_lock(next.pid().as_raw().unsigned_abs());
    lock
}

async fn is_ready(proxy: &Proxy) -> bool {
    crate::harness::client::plain_get(proxy.admin, "/readyz").await.0 == 200
}

/// Whether a connection in a pod's network namespace waits for somebody to accept it.
fn waits_to_be_accepted(node: &Node, pod: &str) -> bool {
    let net = format!("--net={}", node.bed.path(pod).display());
    let mut cat = Command::new("nsenter");
    let cat = cat.args([&net, "cat", "/proc/net/tcp", "/proc/net/tcp6"]);
    let sockets = String::from_utf8(cat.output().unwrap().stdout).unwrap();
    let here = format!(":{:04X}", port::PROXY_REDIRECTED);
    sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|socket| {
        // Of one that listens, what there is to read are connections.
        matches!(socket[..], [_, own, _, "0A", queues, ..]
            if own.ends_with(&here) && !queues.ends_with(":00000000"))
    })
}

/// Asks on a new connection again and again, until told to stop; gives the operator, and what it was answered.
struct Busy {
    stop: Arc<AtomicBool>,
    asks: thread::JoinHandle<(Operator, Vec<Value>)>,
}

impl Busy {
    fn begin(mut operator: Operator) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let told = stop.clone();
        let asks = thread::spawn(move || {
            let mut answers = Vec::new();
            while answers.len() < 2 || !told.load(Ordering::Relaxed) {
                answers.push(operator.anew());
            }
            (operator, answers)
        });
        Self { stop, asks }
    }

    /// Refuses anything but what the pod's own policy makes of each.
    fn end(self, team: &str) -> Operator {
        self.stop.store(true, Ordering::Relaxed);
        let (operator, answers) = self.asks.join().unwrap();
        let other: Vec<&Value> = answers.iter().filter(|one| **one != shows(team)).collect();
        assert!(other.is_empty(), "{other:?} of {}", answers.len());
        operator
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_connection_is_refused_during_a_handover_and_back() {
    let node = Node::new().await;
    node.list(&[node.pod("a"), node.pod("b")]);
    let mut first = proxy(&node, "60s");
    served(&first, 2.0).await;
    let (slot, _strangers) = (node.slot("a"), [node.stranger("a"), node.stranger("b")]);
    let link = || linked(&node.bed.pin(Slot::new(slot), "connect4"));
    let adopted = link();
    let busy = [Busy::begin(node.operator("a")), Busy::begin(node.operator("b"))];
    for _ in 0..5 {
        let next = successor(&node).await;
        first.terminate();
        assert!(first.ended().await.success());
        served(&next, 2.0).await;
        first = next;
    }
    let [a, b] = busy;
    let mut operator = a.end("a");
    b.end("b");
    assert_eq!((node.slot("a"), link()), (slot, adopted));
    // It does all that a process does that began by itself.
    node.write_policy("a", "team=c");
    until("the new policy", || {
        let changed = operator.anew() == shows("c");
        async move { changed }
    })
    .await;
    node.list(&[node.pod("b"), node.pod("d")]);
    until("another pod", || async { node.operator("d").anew() == shows("d") }).await;
    drop(first);
    assert_eq!(node.operator("b").anew(), refused());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_refused_during_an_upgrade_and_its_rollback() {
    let node = Node::new().await;
    node.list(&[node.pod("a"), node.pod("b")]);
    let first = proxy(&node, "60s");
    served(&first, 2.0).await;
    let slot = Slot::new(node.slot("a"));
    let object = || std::fs::read_link(node.bed.pin(slot, "object")).unwrap();
    let program = || linked(&node.bed.pin(slot, "connect4")).1;
    let (ours, before) = (object(), program());
    let newer = LimitedBuild::version();
    assert!(once_written(Command::new(newer.path()).arg("--version")).status.success());
    let busy = [Busy::begin(node.operator("a")), Busy::begin(node.operator("b"))];
    let next = waiting(proxy_of(&newer.path(), &node, "60s")).await;
    first.terminate();
    assert!(first.ended().await.success());
    served(&next, 2.0).await;
    until("its programs", || async { object() != ours }).await;
    let newer = program();
    assert_ne!(newer, before);
    let back = successor(&node).await;
    next.terminate();
    assert!(next.ended().await.success());
    served(&back, 2.0).await;
    until("the programs from before", || async { object() == ours }).await;
    assert_ne!(program(), newer);
    for (busy, team) in busy.into_iter().zip(["a", "b"]) {
        busy.end(team);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_share_a_network_namespace_go_over_together() {
    let node = Node::new().await;
    let (one, mut other) = (node.pod("a"), node.pod("b"));
    other["network"] = one["network"].clone();
    node.list(&[one, other]);
    let first = proxy(&node, "60s");
    served(&first, 2.0).await;
    let second = || node.operator_at("b", "a", node.upstream.address);
    let busy = [Busy::begin(node.operator("a")), Busy::begin(second())];
    let (next, mut last) = (successor(&node).await, second());
    let lock = amid(&node, &first, &next);
    // Now only the next one can accept what comes, and it has none of the two yet.
    signal::kill(first.pid(), Signal::SIGSTOP).unwrap();
    let asks = thread::spawn(move || last.anew());
    bed::until("it waits", || waits_to_be_accepted(&node, "a"));
    drop(lock);
    assert_eq!(asks.join().unwrap(), shows("b"));
    signal::kill(first.pid(), Signal::SIGCONT).unwrap();
    assert!(first.ended().await.success());
    served(&next, 2.0).await;
    for (busy, team) in busy.into_iter().zip(["a", "b"]) {
        busy.end(team);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_that_takes_long_refuses_nothing() {
    let node = Node::new().await;
    node.list(&[node.pod("a"), node.pod("b")]);
    let first = proxy(&node, "60s");
    served(&first, 2.0).await;
    let (next, operators) = (successor(&node).await, ["a", "b"].map(|name| node.operator(name)));
    let lock = amid(&node, &first, &next);
    // Killed: now only the next one can say that somebody serves, and it has none of the two yet.
    drop(first);
    thread::sleep(MAX_SILENCE);
    let asks = operators.map(|mut operator| thread::spawn(move || operator.anew()));
    for pod in ["a", "b"] {
        bed::until("it waits", || waits_to_be_accepted(&node, pod));
    }
    drop(lock);
    for (asks, team) in asks.into_iter().zip(["a", "b"]) {
        assert_eq!(asks.join().unwrap(), shows(team));
    }
    served(&next, 2.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_told_to_stop_serves_on_until_another_one_comes() {
    let node = Node::new().await;
    node.list(&[node.pod("a")]);
    let first = proxy(&node, "60s");
    served(&first, 1.0).await;
    let busy = Busy::begin(node.operator("a"));
    first.terminate();
    let next = proxy(&node, "60s");
    assert!(first.ended().await.success());
    served(&next, 1.0).await;
    busy.end("a");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_stopped_in_a_takeover_serves_until_the_next() {
    let node = Node::new().await;
    node.list(&["a", "b", "c", "d"].map(|name| node.pod(name)));
    let first = proxy(&node, "60s");
    served(&first, 4.0).await;
    let busy = Busy::begin(node.operator("d"));
    let next = successor(&node).await;
    let lock = amid(&node, &first, &next);
    next.terminate();
    drop(lock);
    assert!(first.ended().await.success());
    served(&next, 4.0).await;
    let last = proxy(&node, "60s");
    assert!(next.ended().await.success());
    served(&last, 4.0).await;
    busy.end("d");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_told_to_stop_does_not_wait_for_ever() {
    let node = Node::new().await;
    node.list(&[node.pod("a")]);
    let first = proxy(&node, "100ms");
    served(&first, 1.0).await;
    let mut operator = node.operator("a");
    assert_eq!(operator.anew(), shows("a"));
    first.terminate();
    assert!(first.ended().await.success());
    assert_eq!(operator.anew(), refused());
    let next = proxy(&node, "100ms");
    served(&next, 1.0).await;
    assert_eq!(operator.anew(), shows("a"));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_is_in_charge_when_the_other_one_dies() {
    let node = Node::new().await;
    node.list(&[node.pod("a")]);
    let first = proxy(&node, "60s");
    served(&first, 1.0).await;
    let next = successor(&node).await;
    // Killed.
    drop(first);
    served(&next, 1.0).await;
    assert_eq!(node.operator("a").anew(), shows("a"));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_and_is_told_to_stop_leaves_the_other_one_alone() {
    let node = Node::new().await;
    node.list(&[node.pod("a")]);
    let first = proxy(&node, "60s");
    served(&first, 1.0).await;
    let busy = Busy::begin(node.operator("a"));
    let next = successor(&node).await;
    next.terminate();
    assert!(next.ended().await.success());
    // Nor does one that was killed stand in the way of one that comes after it.
    drop(successor(&node).await);
    let last = successor(&node).await;
    first.terminate();
    assert!(first.ended().await.success());
    served(&last, 1.0).await;
    busy.end("a");
}
