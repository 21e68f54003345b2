//! The bed of a test: cgroups, a network namespace and pins of its own, which are removed however the test ends.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, process};

use ctrlmesh_intercept::cgroup::Hierarchy;
use ctrlmesh_intercept::listener::Namespace;
use ctrlmesh_intercept::{Attach, Interceptor, ListenerCheck, Options, Originals, Slot, Targets, listener};
use serde::de::DeserializeOwned;

mod client;
mod remains;
mod server;
mod wait;

pub(crate) use client::{ClientReport, ConnectCounts, Process};
pub(crate) use server::{Server, echo};
pub(crate) use wait::{until, until_seen, waits_for_lock};

/// Name of everything that tests make, followed by the process and a number.
const PREFIX: &str = "ctrlmesh-test-";
const PINS: &str = "/sys/fs/bpf";

/// The API server's address in every namespace.
pub(crate) const TARGET: &str = "10.96.0.1:443";
pub(crate) const TARGET_V6: &str = "[fd00:96::1]:443";
/// The proxy's port in every namespace.
pub(crate) const PROXY: u16 = 15_001;

pub(crate) struct Bed {
    name: String,
    cgroup: PathBuf,
}

impl Bed {
    /// A namespace that knows the targets' addresses, with a server at each, and an empty cgroup.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        static SWEPT: Once = Once::new();
        assert!(nix::unistd::geteuid().is_root(), "the kernel tier needs root");
        SWEPT.call_once(remains::sweep);
        let name = format!("{PREFIX}{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let cgroup = Hierarchy::find().unwrap().mount().join(&name);
        let bed = Self { name, cgroup };
        fs::create_dir(&bed.cgroup).unwrap();
        bed.namespace("");
        bed
    }

    /// Another namespace like the first.
    pub(crate) fn namespace(&self, suffix: &str) -> PathBuf {
        let name = format!("{}{suffix}", self.name);
        must(Command::new("ip").args(["netns", "add", &name]));
        for command in [
            "link set lo up",
            "addr add 10.96.0.1/32 dev lo",
            "addr add 10.97.3.7/32 dev lo",
            "addr add fd00:96::1/128 dev lo nodad",
            "addr add fd00:97::3:7/128 dev lo nodad",
        ] {
            self.ip(suffix, command);
        }
        self.path(suffix)
    }

    /// Makes a second namespace, a node to the first one's pod: `10.244.1.1` and `fd00:244::1` there, `10.244.1.5` and
    /// `fd00:244::5` here.
    pub(crate) fn wire(&self, suffix: &str) {
        self.namespace(suffix);
        let (pod, node) = (self.name(""), self.name(suffix));
        must(
            Command::new("ip")
                .args(["link", "add", "eth0", "netns", &pod, "type", "veth", "peer", "name", "eth0", "netns", &node]),
        );
        for (namespace, last) in [(&pod, 5), (&node, 1)] {
            for command in [
                format!("addr add 10.244.1.{last}/24 dev eth0"),
                format!("addr add fd00:244::{last}/64 dev eth0 nodad"),
                "link set eth0 up".to_owned(),
            ] {
                must(Command::new("ip").args(["-n", namespace]).args(command.split(' ')));
            }
        }
    }

    /// `ip`, in a namespace.
    pub(crate) fn ip(&self, suffix: &str, command: &str) {
        let name = format!("{}{suffix}", self.name);
        must(Command::new("ip").args(["-n", &name]).args(command.split(' ')));
    }

    /// What is local in the first namespace.
    pub(crate) fn local_routes(&self) -> String {
        let mut command = Command::new("ip");
        let command = command.args(["-n", &self.name, "-6", "route", "show", "table", "local"]);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    /// Name of a namespace, as `ip` knows it.
    pub(crate) fn name(&self, suffix: &str) -> String {
        format!("{}{suffix}", self.name)
    }

    /// Path of a namespace.
    pub(crate) fn path(&self, suffix: &str) -> PathBuf {
        PathBuf::from(format!("/run/netns/{}{suffix}", self.name))
    }

    /// The network namespace that a process is in.
    #[expect(clippy::unused_self, reason = "reads better where it is called")]
    pub(crate) fn network(&self, process: &Process) -> PathBuf {
        fs::read_link(format!("/proc/{}/ns/net", process.0.id())).unwrap()
    }

    pub(crate) fn net(&self) -> Namespace {
        Namespace::open(&self.path("")).unwrap()
    }

    pub(crate) fn pins(&self) -> PathBuf {
        Path::new(PINS).join(&self.name)
    }

    /// A cgroup of this test, made if need be.
    pub(crate) fn cgroup(&self, name: &str) -> PathBuf {
        let path = self.cgroup.join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    pub(crate) fn interceptor(&self) -> Interceptor {
        Interceptor::open(self.options("test")).unwrap()
    }

    pub(crate) fn options(&self, owner: &str) -> Options {
        Options { pins: self.pins(), ..Options::new(owner) }
    }

    /// How a test attaches unless it is about something else: closed, one target per family, a listener that is held.
    #[expect(clippy::unused_self, reason = "reads better where it is called")]
    pub(crate) fn attach(&self, cgroup: &Path) -> Attach {
        Attach {
            cgroup: cgroup.to_owned(),
            except: Vec::new(),
            targets: targets(&[TARGET, TARGET_V6]),
            port: PROXY,
            fail_open: false,
            listener: ListenerCheck::Held,
            heartbeat: None,
            report: false,
        }
    }

    /// A target server: says who connected, as it sees it.
    pub(crate) fn target(&self, address: &str) -> Server {
        self.target_in("", address)
    }

    pub(crate) fn target_in(&self, suffix: &str, address: &str) -> Server {
        let address: SocketAddr = address.parse().unwrap();
        let namespace = Namespace::open(&self.path(suffix)).unwrap();
        answering(namespace.run(|| TcpListener::bind(address)).unwrap().unwrap())
    }

    /// The same, with a socket that takes no IPv4.
    pub(crate) fn target_v6only(&self, address: &str) -> Server {
        use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage};
        use std::os::fd::AsRawFd as _;
        let address: SocketAddr = address.parse().unwrap();
        let bound = self.net().run(|| {
            let flags = SockFlag::SOCK_CLOEXEC;
            let socket = socket::socket(AddressFamily::Inet6, SockType::Stream, flags, None)?;
            socket::setsockopt(&socket, socket::sockopt::Ipv6V6Only, &true)?;
            socket::bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
            socket::listen(&socket, Backlog::new(16)?).map(|()| socket)
        });
        answering(TcpListener::from(bound.unwrap().unwrap()))
    }

    /// A proxy that answers with what the tables say of a connection.
    #[expect(clippy::unused_self, reason = "reads better where it is called")]
    pub(crate) fn proxy(&self, originals: Originals, listener: TcpListener) -> Server {
        Server::start(listener, move |mut client: &TcpStream| {
            let original = originals.find(client.local_addr()?, client.peer_addr()?).unwrap();
            match original {
                Some(original) => writeln!(client, "proxy {} {}", original.slot, original.target),
                None => writeln!(client, "proxy unknown"),
            }
        })
    }

    /// Attaches `cgroup`, and starts a proxy for it in the first namespace, IPv6 natively.
    pub(crate) fn enrol(&self, interceptor: &mut Interceptor, attach: &Attach) -> Server {
        let listener = self.outbound(attach.port);
        let slot = interceptor.attach(attach).unwrap();
        interceptor.listen(slot, &listener).unwrap();
        interceptor.serve_ipv6(slot, &self.net()).unwrap();
        self.proxy(interceptor.originals().unwrap(), listener)
    }

    /// A socket for redirected connections. One that was closed at the same port may listen on for a moment: a test
    /// that starts a process just then has copied it, until that process is executed.
    fn outbound(&self, port: u16) -> TcpListener {
        let mut listener = None;
        until("the port is free", || {
            listener = listener::outbound(&self.net(), port).ok();
            listener.is_some()
        });
        listener.unwrap()
    }

    /// A command inside a cgroup and the namespace: it joins before it is executed.
    pub(crate) fn inside(&self, cgroup: &Path, suffix: &str, program: &str) -> Command {
        let mut command = Command::new("sh");
        let script = r#"echo $$ > "$0/cgroup.procs" && net=$1 && shift && exec nsenter --net="$net" "$@""#;
        command.args(["-c", script]).arg(cgroup).arg(self.path(suffix)).arg(program);
        command
    }

    /// A process in a cgroup and a namespace that is not root's, as most pods' are.
    pub(crate) fn nobody(&self, cgroup: &Path, suffix: &str) -> Process {
        let mut command = self.inside(cgroup, suffix, "setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--", "sh", "-c"]);
        command.arg("echo ready && exec cat").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process(command.spawn().unwrap());
        assert_eq!(process.line(), "ready");
        process
    }

    /// Runs a client and reads its answer.
    pub(crate) fn client<T: DeserializeOwned>(&self, cgroup: &Path, arguments: &[&str]) -> T {
        self.client_in("", cgroup, arguments)
    }

    pub(crate) fn client_in<T: DeserializeOwned>(&self, suffix: &str, cgroup: &Path, arguments: &[&str]) -> T {
        let output = self.peer(suffix, cgroup, arguments).stderr(Stdio::inherit()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", output.status);
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// One connection to an address.
    pub(crate) fn connect(&self, cgroup: &Path, address: &str, how: &str) -> ClientReport {
        let (host, port) = split(address);
        self.client(cgroup, &["once", &host, &port, how])
    }

    pub(crate) fn peer(&self, suffix: &str, cgroup: &Path, arguments: &[&str]) -> Command {
        let mut command = self.inside(cgroup, suffix, "python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kernel/peer.py")).args(arguments);
        // The system's own, if there is one: version managers put slow scripts in front.
        command.env("PATH", format!("/usr/bin:{}", std::env::var("PATH").unwrap_or_default()));
        command
    }

    /// Starts a client that hammers until [`Process::finish`], and says in a line that it has connected for the first
    /// time.
    pub(crate) fn hammer(&self, cgroup: &Path, address: &str, expected: &str) -> Process {
        self.hammer_in("", cgroup, address, expected)
    }

    pub(crate) fn hammer_in(&self, suffix: &str, cgroup: &Path, address: &str, expected: &str) -> Process {
        let (host, port) = split(address);
        let command = &mut self.peer(suffix, cgroup, &["hammer", &host, &port, expected]);
        Process(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// Starts a client that holds connections; a line on its stdin makes it say what came in.
    pub(crate) fn hold(&self, cgroup: &Path, address: &str, connections: usize) -> Process {
        let (host, port) = split(address);
        let command = &mut self.peer("", cgroup, &["hold", &host, &port, &connections.to_string()]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process(command.spawn().unwrap());
        assert_eq!(process.line(), "holding");
        process
    }

    /// A pin of a pod's.
    pub(crate) fn pin(&self, slot: Slot, name: &str) -> PathBuf {
        self.pins().join(format!("pods/{slot}/{name}"))
    }

    /// Says that a pod's programs are those of another version.
    pub(crate) fn outdate(&self, slot: Slot) {
        let object = self.pin(slot, "object");
        fs::remove_file(&object).unwrap();
        symlink("another", object).unwrap();
    }

    /// Starts our binary.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
        command.args(["intercept", "--pin-dir"]).arg(self.pins()).args(arguments);
        command
    }

    /// Starts `intercept run` in the namespace, and waits until it listens.
    pub(crate) fn relay(&self) -> Process {
        self.relay_with(&[])
    }

    /// The same, told of more.
    pub(crate) fn relay_with(&self, more: &[&str]) -> Process {
        self.relay_at(PROXY, more)
    }

    /// The same, at another port.
    pub(crate) fn relay_at(&self, port: u16, more: &[&str]) -> Process {
        let mut command = self.inside(&self.cgroup("relay"), "", env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
        let to = port.to_string();
        command.args(["intercept", "--pin-dir"]).arg(self.pins()).args(["run", "--to", &to]);
        command.args(more);
        let child = Process(command.env("RUST_LOG", "warn").spawn().unwrap());
        self.listening(port);
        child
    }

    /// Waits until somebody listens in the namespace.
    pub(crate) fn listening(&self, port: u16) {
        let net = self.net();
        until("the relay listens", || net.run(|| TcpStream::connect(("127.0.0.1", port))).unwrap().is_ok());
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        remains::remove(&self.name);
    }
}

/// Says who connected, as it sees it.
fn answering(listener: TcpListener) -> Server {
    Server::start(listener, |mut client: &TcpStream| {
        let peer = client.peer_addr()?;
        writeln!(client, "target {}", SocketAddr::new(peer.ip().to_canonical(), peer.port()))
    })
}

pub(crate) fn targets(list: &[&str]) -> Targets {
    Targets { name: "test".to_owned(), list: list.iter().map(|text| text.parse().unwrap()).collect() }
}

/// How often an outcome was counted.
pub(crate) fn counted(interceptor: &Interceptor, outcome: &str) -> u64 {
    interceptor.status().unwrap().counters[outcome]
}

/// A tenth of a large count, or all of it where asked for.
pub(crate) fn count(full: usize) -> usize {
    if std::env::var_os("CTRLMESH_TEST_FULL").is_some_and(|value| value == "1") { full } else { full / 10 }
}

fn split(address: &str) -> (String, String) {
    let address: SocketAddr = address.parse().unwrap();
    let ip = match address.ip() {
        // `SocketAddr` prints it so, and the client takes it so.
        IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some() => format!("::ffff:{}", ip.to_canonical()),
        ip => ip.to_string(),
    };
    (ip, address.port().to_string())
}

pub(crate) fn must(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
