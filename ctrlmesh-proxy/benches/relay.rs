//! Measures the CPU time of bytes that the node proxy passes on untouched, beside HAProxy without splice.
//!
//! `cargo bench -p ctrlmesh-proxy --bench relay [-- --quick]`. One network namespace has everything: the client, in a
//! pod's cgroup, the server and both relays. The kernel redirects the client's connections to the node proxy; HAProxy
//! it dials. In every other round HAProxy is first. CPU is what the kernel counts for a relay's process. Needs root,
//! `ip`, `nsenter` and `haproxy`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and panics where it cannot go on")]
#![allow(clippy::cast_precision_loss, reason = "what is counted is far below 2^52")]

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use ctrlmesh_intercept::Status;
use ctrlmesh_intercept::cgroup::Hierarchy;
use ctrlmesh_intercept::listener::Namespace;
use figures::{middle, must, spread};
use pki::Pki;
use usage::cpu_nanoseconds;

#[path = "../tests/harness/pki.rs"]
#[allow(dead_code, reason = "the harness of the tests has more")]
mod pki;
#[path = "bed/figures.rs"]
mod figures;
#[path = "bed/usage.rs"]
#[allow(dead_code, reason = "other benches count memory, too")]
mod usage;

const SERVER: &str = "10.96.0.1:2525";
const HAPROXY: &str = "127.0.0.1:2526";

/// What one measurement passes.
const GIGABYTE: u64 = 1_000_000_000;

/// What client and server read and write at once: enough that they are faster than a relay.
const CHUNK_BYTES: usize = 256 << 10;

/// How long a relay may take to start.
const PATIENCE: Duration = Duration::from_secs(30);

/// The first byte of a connection, which is no request of HTTP or TLS: what the server does then.
const DOWN: u8 = 0x01;
const UP: u8 = 0x02;

const DIRECTIONS: [(&str, u8); 2] = [("1 GB from the server", DOWN), ("1 GB to the server", UP)];

/// TCP without splice, and all else by default.
const CONFIGURATION: &str = "global
    nosplice
defaults
    mode tcp
    timeout connect 10s
    timeout client 1h
    timeout server 1h
listen relay
    bind 127.0.0.1:2526
    server one 10.96.0.1:2525
";

/// Seconds of one measurement.
#[derive(Clone, Copy)]
struct Sample {
    cpu: f64,
    wall: f64,
}

/// A network namespace, a cgroup, and what runs in them; removed when dropped.
struct Bed {
    name: String,
    cgroup: PathBuf,
    relays: Vec<Child>,
    /// Last: the node proxy reads its files as long as it runs.
    pki: Pki,
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["client", address, direction] => client(address.parse().unwrap(), direction.parse().unwrap()),
        // `cargo test --benches` only builds.
        _ if arguments.contains(&"--test") => {}
        _ => measure(if arguments.contains(&"--quick") { 3 } else { 15 }),
    }
}

fn measure(rounds: usize) {
    let Some(haproxy) = ["/usr/sbin/haproxy", "/usr/bin/haproxy"].into_iter().find(|path| Path::new(path).exists())
    else {
        return println!("relay is left out: HAProxy is not installed (`apt-get install haproxy` on Debian)");
    };
    assert!(nix::unistd::geteuid().is_root(), "the benchmark needs root");
    let mut bed = Bed::new();
    bed.serve();
    bed.start_ours();
    bed.start_haproxy(haproxy);
    println!("CPU s per GB, and MB/s; median of {rounds} rounds (least to most)\n");
    println!("| | ctrlmesh | HAProxy, nosplice | ratio | MB/s, ctrlmesh | MB/s, HAProxy |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (name, direction) in DIRECTIONS {
        let mut samples = [Vec::new(), Vec::new()];
        // One round more than counts: caches, windows and buffers are cold.
        for round in 0..=rounds {
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for at in order {
                let sample = bed.pass(at, direction);
                if round > 0 {
                    samples[at].push(sample);
                }
            }
        }
        let [ours, theirs] = samples;
        let ratios = ours.iter().zip(&theirs).map(|(ours, theirs)| ours.cpu / theirs.cpu);
        let cpu = |samples: &[Sample]| spread(samples.iter().map(|sample| sample.cpu), 3);
        let rate = |samples: &[Sample]| middle(samples.iter().map(|one| GIGABYTE as f64 / 1e6 / one.wall).collect());
        let (of_ours, of_theirs) = (cpu(&ours), cpu(&theirs));
        let ratios = spread(ratios, 3);
        println!("| {name} | {of_ours} | {of_theirs} | {ratios} | {:.0} | {:.0} |", rate(&ours), rate(&theirs));
    }
    let connections = u64::try_from(DIRECTIONS.len() * (rounds + 1)).unwrap();
    let counters = Status::read(&bed.pins()).unwrap().counters;
    assert_eq!(counters["redirected"], connections, "not every connection was redirected");
}

/// Passes a gigabyte, and says that it did by ending well.
fn client(address: SocketAddr, direction: u8) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(&[direction]).unwrap();
    if direction == DOWN {
        assert_eq!(drain(&mut stream), GIGABYTE);
    } else {
        fill(&mut stream).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        // The server ends when it has read all.
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
}

fn drain(stream: &mut TcpStream) -> u64 {
    let (mut bytes, mut count) = (vec![0; CHUNK_BYTES], 0);
    loop {
        match stream.read(&mut bytes).unwrap() {
            0 => return count,
            read => count += read as u64,
        }
    }
}

fn fill(stream: &mut TcpStream) -> io::Result<()> {
    let chunk = vec![0x5a; CHUNK_BYTES];
    let mut left = usize::try_from(GIGABYTE).unwrap();
    while left > 0 {
        let part = left.min(CHUNK_BYTES);
        stream.write_all(&chunk[..part])?;
        left -= part;
    }
    Ok(())
}

impl Bed {
    fn new() -> Self {
        let name = format!("ctrlmesh-bench-{}", process::id());
        let cgroup = Hierarchy::find().unwrap().mount().join(&name);
        fs::create_dir(&cgroup).unwrap();
        must(Command::new("ip").args(["netns", "add", &name]));
        for command in ["link set lo up", "addr add 10.96.0.1/32 dev lo"] {
            must(Command::new("ip").args(["-n", &name]).args(command.split(' ')));
        }
        Self { name, cgroup, relays: Vec::new(), pki: Pki::new() }
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    fn pins(&self) -> PathBuf {
        Path::new("/sys/fs/bpf").join(&self.name)
    }

    /// The server, in threads of this process.
    fn serve(&self) {
        let listener = Namespace::open(&self.path()).unwrap().run(|| TcpListener::bind(SERVER)).unwrap().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                thread::spawn(move || serve_one(stream));
            }
        });
    }

    /// The node proxy, with one pod whose connections to the server a rule names.
    fn start_ours(&mut self) {
        let rule = serde_json::json!({"breaker": "bench/out", "rule": "servers", "ports": [2525], "list": "allow",
            "urls": [{"parts": {"host": "10.96.0.1"}}], "methods": ["*"]});
        let policy = serde_json::json!({"epoch": 1, "egress": {"ports": [2525], "access": [rule]}});
        let pod = serde_json::json!({"pod": "bench/a", "cgroup": self.cgroup, "network": self.path(),
            "policy": "a.policy"});
        fs::write(self.pki.path("a.policy"), policy.to_string()).unwrap();
        fs::write(self.pki.path("pods"), serde_json::json!({"pods": [pod]}).to_string()).unwrap();
        let mesh = format!("{},{}", self.pki.path("mesh.crt").display(), self.pki.path("mesh.key").display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
        command.args(["node", "--admin-listen", "127.0.0.1:0", "--target", "10.96.0.1:443", "--mesh-ca", &mesh]);
        command.arg("--pods").arg(self.pki.path("pods")).arg("--pin-dir").arg(self.pins());
        command.arg("--upstream-ca").arg(self.pki.path("real.crt")).env("RUST_LOG", "warn");
        self.relays.push(command.stdin(Stdio::null()).spawn().unwrap());
        let pins = self.pins();
        until(|| {
            let status = Status::read(&pins);
            status.is_ok_and(|all| all.attachments.iter().any(|one| one.targets.iter().any(|its| its == "*:2525")))
        });
    }

    fn start_haproxy(&mut self, program: &str) {
        let file = self.pki.path("haproxy.cfg");
        fs::write(&file, CONFIGURATION).unwrap();
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg(program).arg("-db").arg("-f").arg(file);
        self.relays.push(command.stdin(Stdio::null()).spawn().unwrap());
        let network = Namespace::open(&self.path()).unwrap();
        until(|| network.run(|| TcpStream::connect(HAPROXY)).unwrap().is_ok());
    }

    /// Passes a gigabyte through one of the relays.
    fn pass(&self, relay: usize, direction: u8) -> Sample {
        let script = r#"echo $$ > "$0/cgroup.procs" && exec nsenter --net="$1" "$2" client "$3" "$4""#;
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(&self.cgroup).arg(self.path()).arg(env::current_exe().unwrap());
        command.arg([SERVER, HAPROXY][relay]).arg(direction.to_string());
        let pid = self.relays[relay].id();
        let (before, start) = (cpu_nanoseconds(pid), Instant::now());
        must(&mut command);
        let wall = start.elapsed().as_secs_f64();
        Sample { cpu: (cpu_nanoseconds(pid) - before) as f64 / 1e9, wall }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for relay in &mut self.relays {
            drop(relay.kill());
            drop(relay.wait());
        }
        drop(fs::remove_dir_all(self.pins()));
        drop(Command::new("ip").args(["netns", "del", &self.name]).output());
        while fs::remove_dir(&self.cgroup).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy) {
            thread::yield_now();
        }
    }
}

fn serve_one(mut stream: TcpStream) {
    let mut direction = [0];
    // HAProxy's first connection is that of somebody who looks whether it listens.
    if stream.read_exact(&mut direction).is_err() {
        return;
    }
    if direction[0] == DOWN {
        fill(&mut stream).unwrap();
    } else {
        assert_eq!(drain(&mut stream), GIGABYTE);
    }
}

fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "a relay does not start");
        thread::sleep(Duration::from_millis(1));
    }
}
