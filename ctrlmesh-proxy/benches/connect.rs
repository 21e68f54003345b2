//! Measures what interception costs a client's `connect()`: with nothing attached, with our programs, and with iptables
//! REDIRECT. All take turns within one run.
//!
//! Each way has a network namespace and a client process of its own. A client connects and closes, in batches; after
//! each batch another client has its turn, in an order that changes, so that what else the machine does hits all alike.
//! Needs root, `ip`, `nsenter` and `iptables`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and panics where it cannot go on")]

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{self, Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ctrlmesh_intercept::cgroup::Hierarchy;
use ctrlmesh_intercept::listener::{self, Namespace};
use ctrlmesh_intercept::{Attach, Heartbeat, Interceptor, ListenerCheck, Options, Targets};
use figures::{middle, must, spread};

#[path = "bed/figures.rs"]
mod figures;

const TARGET: &str = "10.96.0.1:443";
const PROXY: u16 = 15_001;
/// Connections between two changes of turn. The first few are not counted: caches are cold after a change.
const BATCH: usize = 60;
const WARM_UP: usize = 10;
/// Batches per round; a round gives one p50 and one p99 of each way, and the spread is over rounds.
const BATCHES: usize = 50;

/// A container's place below the first level, as Kubernetes has it.
const BELOW: &str = "burstable/pod/container";

/// The ways, in the order of the table.
const WAYS: [Way; 6] = [Way::None, Way::Ours, Way::OursBelow, Way::OursByPort, Way::Iptables, Way::NoneAgain];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    None,
    Ours,
    /// Attached at a pod's cgroup, with the client in a container's below.
    OursBelow,
    OursByPort,
    Iptables,
    /// The same as the first: what differs between the two is noise.
    NoneAgain,
}

struct Client {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// Everything of one way; removed when dropped.
struct Lane {
    name: String,
    cgroup: PathBuf,
    /// Where the client is, below the cgroup.
    below: &'static str,
    /// The server's, or the proxy's.
    listener: TcpListener,
    client: Option<Client>,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "client") {
        return client();
    }
    let rounds = if arguments.iter().any(|argument| argument == "--quick") { 4 } else { 20 };
    assert!(nix::unistd::geteuid().is_root(), "the benchmark needs root");
    let pins = PathBuf::from(format!("/sys/fs/bpf/ctrlmesh-bench-{}", process::id()));
    let mut interceptor = Interceptor::open(Options { pins: pins.clone(), ..Options::new("bench") }).unwrap();
    let mut lanes: Vec<Lane> = WAYS.iter().map(|way| Lane::new(*way, &mut interceptor)).collect();
    let mut results = vec![Vec::new(); WAYS.len()];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..rounds {
        interceptor.beat(0).unwrap();
        let mut samples = vec![Vec::new(); WAYS.len()];
        for _ in 0..BATCHES {
            for at in random.order(WAYS.len()) {
                samples[at].extend(lanes[at].batch());
            }
        }
        for (result, sample) in results.iter_mut().zip(samples) {
            result.push(Quantiles::of(sample));
        }
    }
    let counters = interceptor.status().unwrap().counters;
    drop(lanes);
    drop(interceptor);
    fs::remove_dir_all(pins).unwrap();
    print(&results, rounds);
    let expected = (3 * rounds * BATCHES * BATCH) as u64;
    assert_eq!(counters["redirected"], expected, "not every connection was redirected");
}

/// `connect()` and close, as often as asked, nanoseconds of each.
fn client() {
    let target: SocketAddr = TARGET.parse().unwrap();
    let mut output = std::io::stdout().lock();
    for _ in std::io::stdin().lock().lines().map_while(Result::ok) {
        let mut line = String::with_capacity(BATCH * 6);
        for at in 0..BATCH {
            let start = Instant::now();
            let stream = TcpStream::connect(target).unwrap();
            let connected = start.elapsed();
            // Closed by a reset: connections that wait would fill up the ports, and slow the later ones down.
            let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
            nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::Linger, &linger).unwrap();
            let start = Instant::now();
            drop(stream);
            let took = (connected + start.elapsed()).as_nanos();
            if at >= WARM_UP {
                line.push_str(&took.to_string());
                line.push(' ');
            }
        }
        writeln!(output, "{line}").unwrap();
    }
}

impl Lane {
    fn new(way: Way, interceptor: &mut Interceptor) -> Self {
        let name = format!("ctrlmesh-bench-{}-{}", process::id(), way as u8);
        let cgroup = Hierarchy::find().unwrap().mount().join(&name);
        let below = if way == Way::OursBelow { BELOW } else { "" };
        fs::create_dir_all(cgroup.join(below)).unwrap();
        must(Command::new("ip").args(["netns", "add", &name]));
        for command in ["link set lo up", "addr add 10.96.0.1/32 dev lo"] {
            must(Command::new("ip").args(["-n", &name]).args(command.split(' ')));
        }
        let listener = Self::listener(way, &name);
        listener.set_nonblocking(true).unwrap();
        let mut lane = Self { name, cgroup, below, listener, client: None };
        lane.attach(way, interceptor);
        lane.start();
        lane
    }

    fn listener(way: Way, namespace: &str) -> TcpListener {
        let path = Path::new("/run/netns").join(namespace);
        let namespace = Namespace::open(&path).unwrap();
        match way {
            Way::None | Way::NoneAgain => namespace.run(|| TcpListener::bind(TARGET)).unwrap().unwrap(),
            Way::Iptables => {
                let rule = "iptables -t nat -A OUTPUT -p tcp -d 10.96.0.1 --dport 443 -j REDIRECT --to-ports 15001";
                must(Command::new("nsenter").arg(format!("--net={}", path.display())).args(rule.split(' ')));
                namespace.run(|| TcpListener::bind(("0.0.0.0", PROXY))).unwrap().unwrap()
            }
            Way::OursByPort => namespace.run(|| TcpListener::bind(("::", PROXY))).unwrap().unwrap(),
            Way::Ours | Way::OursBelow => listener::outbound(&namespace, PROXY).unwrap(),
        }
    }

    /// Ours runs with every check there is: the cgroup, the heartbeat, the listener.
    fn attach(&self, way: Way, interceptor: &mut Interceptor) {
        let check = match way {
            Way::Ours | Way::OursBelow => ListenerCheck::Held,
            Way::OursByPort => ListenerCheck::Port,
            Way::None | Way::Iptables | Way::NoneAgain => return,
        };
        let slot = interceptor
            .attach(&Attach {
                cgroup: self
                    .cgroup
                    .join(self.below)
                    .parent()
                    .filter(|_| way == Way::OursBelow)
                    .unwrap_or(&self.cgroup)
                    .to_owned(),
                except: Vec::new(),
                targets: Targets { name: "bench".to_owned(), list: vec![TARGET.parse().unwrap()] },
                port: PROXY,
                fail_open: false,
                listener: check,
                heartbeat: Some(Heartbeat { number: Some(0), max_age: Duration::from_hours(1) }),
                report: false,
            })
            .unwrap();
        interceptor.listen(slot, &self.listener).unwrap();
    }

    fn start(&mut self) {
        let script = r#"echo $$ > "$0/cgroup.procs" && exec nsenter --net="$1" "$2" client"#;
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .arg(self.cgroup.join(self.below))
            .arg(self.path())
            .arg(std::env::current_exe().unwrap());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        self.client = Some(Client { process, orders, answers });
    }

    /// What the client did while nothing else ran: its connections wait to be accepted until the batch is over, for
    /// which of two processors a server's thread wakes up on decides more about the time than any program does.
    fn batch(&mut self) -> Vec<u32> {
        let client = self.client.as_mut().unwrap();
        client.orders.write_all(b"\n").unwrap();
        let mut line = String::new();
        client.answers.read_line(&mut line).unwrap();
        let times: Vec<u32> = line.split_ascii_whitespace().map(|time| time.parse().unwrap()).collect();
        assert_eq!(times.len(), BATCH - WARM_UP, "a client failed");
        while self.listener.accept().is_ok() {}
        times
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some(Client { mut process, orders, .. }) = self.client.take() {
            drop(orders);
            drop(process.kill());
            drop(process.wait());
        }
        drop(Command::new("ip").args(["netns", "del", &self.name]).output());
        for below in Path::new(self.below).ancestors().filter(|below| *below != Path::new("")) {
            remove(&self.cgroup.join(below));
        }
        remove(&self.cgroup);
    }
}

/// Busy until the last process is gone.
fn remove(cgroup: &Path) {
    while fs::remove_dir(cgroup).is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy) {
        thread::yield_now();
    }
}

/// One round of one way, in nanoseconds.
#[derive(Clone, Copy)]
struct Quantiles {
    p50: f64,
    p99: f64,
}

impl Quantiles {
    fn of(mut sample: Vec<u32>) -> Self {
        sample.sort_unstable();
        let at = |percent: usize| f64::from(sample[sample.len() * percent / 100]);
        Self { p50: at(50), p99: at(99) }
    }
}

/// A small generator, so that the order of turns changes the same way in every run.
struct Random(u64);

impl Random {
    fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for at in (1..count).rev() {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            order.swap(at, usize::try_from(self.0 % (at as u64 + 1)).unwrap());
        }
        order
    }
}

fn print(results: &[Vec<Quantiles>], rounds: usize) {
    println!(
        "connect() and close, us; {} connections each; median of {rounds} rounds (least to most)\n",
        rounds * BATCHES * (BATCH - WARM_UP)
    );
    println!("| | p50 | against none | p99 | added at p50 |");
    println!("|---|---|---|---|---|");
    let none = median(&results[0], |round| round.p50);
    for (way, rounds) in WAYS.iter().zip(results) {
        let ratios: Vec<f64> = rounds.iter().zip(&results[0]).map(|(round, none)| round.p50 / none.p50).collect();
        println!(
            "| {} | {} | {:+.1} % ({:+.1} to {:+.1}) | {} | {:+.2} |",
            way.name(),
            spread(rounds.iter().map(|round| round.p50 / 1000.0), 2),
            percent(middle(ratios.clone())),
            percent(ratios.iter().copied().fold(f64::MAX, f64::min)),
            percent(ratios.iter().copied().fold(f64::MIN, f64::max)),
            spread(rounds.iter().map(|round| round.p99 / 1000.0), 2),
            (median(rounds, |round| round.p50) - none) / 1000.0,
        );
    }
    let added = |at: usize| median(&results[at], |round| round.p50) - none;
    println!("\niptables adds {:.1} times as much as ours", added(4) / added(1));
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Ours => "ours: heartbeat, listener held",
            Self::OursBelow => "the same, four cgroups deep",
            Self::OursByPort => "ours: heartbeat, listener looked up by port",
            Self::Iptables => "iptables REDIRECT",
            Self::NoneAgain => "none, again",
        }
    }
}

fn percent(ratio: f64) -> f64 {
    (ratio - 1.0) * 100.0
}

fn median(rounds: &[Quantiles], value: impl Fn(&Quantiles) -> f64) -> f64 {
    middle(rounds.iter().map(value).collect())
}
