//! The manager's part, in a process of its own: what a line on its standard input asks for, it does and answers.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _, stdin, stdout};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use ctrlmesh_common::policy::{Limit, Policy};
use ctrlmesh_common::selector::Selector;
use ctrlmesh_manager::board::{Board, Notice, Receipt};
use ctrlmesh_manager::certs::authority::Names;
use ctrlmesh_manager::certs::serving;
use ctrlmesh_manager::certs::vault::{Vault, Wanted};
use ctrlmesh_manager::compile::Told;
use ctrlmesh_manager::drain::Drain;
use ctrlmesh_manager::identity::Reviewer;
use ctrlmesh_manager::lease::{self, Candidate};
use ctrlmesh_manager::listen::{Limits, Listen};
use ctrlmesh_manager::metrics::Refusals;
use ctrlmesh_manager::pod::PodName;
use ctrlmesh_manager::push::{Accounts, Allowance, Push, PushMetrics};
use ctrlmesh_manager::tls;
use ctrlmesh_testbed::ControlPlane;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use rustls::crypto::aws_lc_rs;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::pods::OnePod;

/// Enough for all of them, who come from one address here.
const LIMITS: Limits = Limits { connections: 20_000, unproven: 2048, unproven_of_one: 2048 };

/// The process, seen from the other.
pub(crate) struct Manager {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    address: SocketAddr,
    folder: PathBuf,
}

impl Manager {
    /// Starts it; at `address`, if there is one.
    pub(crate) fn start(
        plane: &ControlPlane,
        namespace: &str,
        pods: &[OnePod],
        address: Option<SocketAddr>,
    ) -> Self {
        let folder = plane.folder().to_owned();
        let list = folder.join("bench-pods");
        let lines: Vec<String> =
            pods.iter().map(|pod| format!("{} {}\n", pod.name, pod.uid)).collect();
        fs::write(&list, lines.concat()).unwrap();
        let address = address.unwrap_or(([127, 0, 0, 1], 0).into());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg("--serve")
            .arg(plane.kubeconfig())
            .args([namespace, &address.to_string()])
            .arg(&list)
            .arg(folder.join("bench-ca"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut this = Self { child, input, output, address, folder };
        this.address = this.line().parse().unwrap();
        this
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn ca(&self) -> PathBuf {
        self.folder.join("bench-ca")
    }

    /// Asks for something that takes until `count` proxies have done it.
    pub(crate) fn ask(&mut self, what: &str, count: usize) -> String {
        writeln!(self.input, "{what} {count}").unwrap();
        self.line()
    }

    /// Changes every policy; when each of them was acknowledged, after the change.
    pub(crate) fn change(&mut self, count: usize) -> Vec<Duration> {
        let micros = self.ask("change", count);
        micros.split(' ').map(|time| Duration::from_micros(time.parse().unwrap())).collect()
    }

    /// Its resident memory, in bytes.
    pub(crate) fn resident(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.output.read_line(&mut line).unwrap() > 0, "the manager ended");
        line.trim().to_owned()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Inside the process.
pub(crate) fn main(arguments: &[String]) {
    let [kubeconfig, namespace, address, list, ca] = arguments else { panic!("{arguments:?}") };
    drop(aws_lc_rs::default_provider().install_default());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let pods: Vec<(String, String)> = fs::read_to_string(list)
        .unwrap()
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, uid)| (name.to_owned(), uid.to_owned()))
        .collect();
    let board = Arc::<Board>::default();
    publish(&board, namespace, &pods, 1);
    let serving = serve(kubeconfig, namespace, address, ca, board.clone());
    let address = runtime.block_on(serving);
    println!("{address}");
    let mut epoch = 1;
    for line in stdin().lines() {
        let line = line.unwrap();
        let (what, count) = line.split_once(' ').unwrap();
        let count: usize = count.parse().unwrap();
        let mut begun = SystemTime::UNIX_EPOCH;
        if what == "change" {
            epoch += 1;
            begun = SystemTime::now();
            publish(&board, namespace, &pods, epoch);
        }
        let receipts = runtime.block_on(acknowledged(&board, epoch, count));
        let micros: Vec<String> = receipts
            .values()
            .map(|one| one.last_contact.duration_since(begun).unwrap().as_micros().to_string())
            .collect();
        println!("{}", if what == "change" { micros.join(" ") } else { "done".to_owned() });
        stdout().flush().unwrap();
    }
}

fn publish(board: &Board, namespace: &str, pods: &[(String, String)], epoch: u64) {
    let selector = Selector::parse(
        "ctrlmesh.kusionstack.io/sharding-hash in (0,1,10,11,12,13,14,15,16,17,18,19,2,20,21,22)",
    );
    let limit =
        Limit { relate_resources: Vec::new(), selector: selector.unwrap(), changed_at: None };
    board.publish(pods.iter().map(|(name, uid)| Notice {
        pod: PodName { namespace: namespace.to_owned(), name: name.clone() },
        uid: uid.clone(),
        node: None,
        told: Some(Told::new(
            None,
            Some(format!("{namespace}/op")),
            epoch,
            Policy { epoch, limits: vec![limit.clone()], ..Policy::default() },
        )),
    }));
}

async fn serve(
    kubeconfig: &str,
    namespace: &str,
    address: &str,
    ca: &str,
    board: Arc<Board>,
) -> SocketAddr {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    let client = Client::try_from(config.unwrap()).unwrap();
    let names = Names::of(["127.0.0.1"]);
    let wanted = Wanted {
        api_server: Vec::new(),
        manager: names.clone(),
        validity: Duration::from_hours(24),
    };
    let vault = Arc::new(Vault::open(client.clone(), namespace, wanted).await.unwrap());
    fs::write(ca, vault.current().manager.bundle()).unwrap();
    let (drain, mut registry) = (Drain::default(), Registry::default());
    let refusals = Refusals::register(&mut registry);
    let candidate = Candidate {
        lease: "bench".to_owned(),
        identity: std::process::id().to_string(),
        address: address.to_owned(),
        leader: Gauge::default(),
    };
    let push = Arc::new(Push {
        board,
        reviewer: Reviewer::new(client.clone(), &mut registry),
        vault: vault.clone(),
        accounts: Accounts { node: "a/node".to_owned(), manager: "a/manager".to_owned() },
        leadership: lease::campaign(client, namespace, candidate, &drain),
        refusals: refusals.clone(),
        metrics: PushMetrics::register(&mut registry),
        drain: drain.clone(),
        sessions: Mutex::default(),
        signatures: Allowance::default(),
    });
    let presented = serving::first(&vault, &names).unwrap();
    let tls = TlsAcceptor::from(Arc::new(tls::server(presented, &[tls::ALPN_HTTP2]).unwrap()));
    let listener = TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let serve = move |stream, admission| push.clone().serve(stream, admission);
    drain.spawn(Listen::new(LIMITS, refusals).run(listener, tls, drain.clone(), serve));
    address
}

/// Waits until `count` proxies are connected and have `epoch` in force.
async fn acknowledged(board: &Board, epoch: u64, count: usize) -> BTreeMap<PodName, Receipt> {
    let mut changes = board.receipts_changed();
    loop {
        changes.mark_unchanged();
        let receipts = board.receipts();
        let done = receipts.values().filter(|one| one.connected && one.epoch == epoch).count();
        if done == count {
            return receipts;
        }
        changes.changed().await.unwrap();
        // Looking at all of them is not to keep it busy.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
