//! One contestant: a process whose CPU time and memory the kernel counts.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::pki::Pki;
use super::usage::{cpu_nanoseconds, resident_bytes};
use super::{Kind, free_address};

/// How long a contestant may take to start.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often is looked whether one has started.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Runs until dropped.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: SocketAddr,
    /// From its start until somebody could connect.
    pub(crate) startup: Duration,
    /// Nobody's time counts: the load goes to the backend itself.
    direct: bool,
}

impl Process {
    /// The server that answers all.
    pub(crate) fn backend(pki: &Pki) -> Self {
        Self::own("backend", pki, None)
    }

    /// One contestant before `backend`; nothing where it is not installed.
    pub(crate) fn contestant(kind: Kind, pki: &Pki, backend: SocketAddr) -> Option<Self> {
        match kind {
            Kind::Direct => {
                let mut process = Self::own("backend", pki, None);
                process.direct = true;
                Some(process)
            }
            Kind::Relay => Some(Self::own("relay", pki, Some(backend))),
            Kind::Nginx => Self::nginx(pki, backend),
            Kind::Ours => Some(Self::ours(pki, backend, "mode: pass")),
            Kind::Ruled => Some(Self::ours(pki, backend, RULE)),
        }
    }

    /// This program again, in another part.
    fn own(part: &str, pki: &Pki, backend: Option<SocketAddr>) -> Self {
        let address = free_address();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg(part).arg(address.to_string()).arg(pki.dir.path());
        command.args(backend.map(|backend| backend.to_string()));
        Self::spawn(command, address)
    }

    fn nginx(pki: &Pki, backend: SocketAddr) -> Option<Self> {
        let program = ["/usr/sbin/nginx", "/usr/bin/nginx"].into_iter().find(|path| Path::new(path).exists())?;
        let address = free_address();
        let dir = pki.dir.path().to_str().unwrap();
        let mut text = include_str!("../nginx.conf").to_owned();
        let values = [
            ("{{DIR}}", dir.to_owned()),
            ("{{LISTEN}}", address.to_string()),
            ("{{BACKEND}}", backend.to_string()),
            ("{{CERT}}", format!("{dir}/leaf.crt")),
            ("{{KEY}}", format!("{dir}/leaf.key")),
            ("{{CA}}", format!("{dir}/real.crt")),
        ];
        for (name, value) in values {
            text = text.replace(name, &value);
        }
        let file = pki.path("nginx.conf");
        fs::write(&file, text).unwrap();
        let mut command = Command::new(program);
        command.arg("-c").arg(file).arg("-e").arg(pki.path("nginx.log"));
        Some(Self::spawn(command, address))
    }

    fn ours(pki: &Pki, backend: SocketAddr, policy: &str) -> Self {
        let address = free_address();
        let file = pki.path(&format!("policy-{}.yaml", address.port()));
        fs::write(&file, policy).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
        let mesh = format!("{},{}", pki.path("mesh.crt").display(), pki.path("mesh.key").display());
        command
            .args(["sidecar", "--admin-listen", "127.0.0.1:0", "--listen", &address.to_string()])
            .args(["--max-connections", "65536"])
            .args(["--upstream", &format!("https://localhost:{}", backend.port()), "--mesh-ca", &mesh])
            .arg("--upstream-ca")
            .arg(pki.path("real.crt"))
            .arg("--policy")
            .arg(file)
            .arg("--state-dir")
            .arg(pki.path(&format!("state-{}", address.port())))
            .env("RUST_LOG", "warn");
        Self::spawn(command, address)
    }

    fn spawn(mut command: Command, address: SocketAddr) -> Self {
        let begun = Instant::now();
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        while TcpStream::connect(address).is_err() {
            assert!(begun.elapsed() < PATIENCE, "{command:?} does not listen");
            thread::sleep(LOOK_EVERY);
        }
        Self { child, address, startup: begun.elapsed(), direct: false }
    }

    /// The process, or the first of its family.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// CPU time so far, of the process and its children, in seconds.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        if self.direct {
            return 0.0;
        }
        let used: u64 = self.family().iter().map(|pid| cpu_nanoseconds(*pid)).sum();
        #[expect(clippy::cast_precision_loss, reason = "minutes are far below 2^52 nanoseconds")]
        let nanoseconds = used as f64;
        nanoseconds / 1e9
    }

    /// Resident memory, of the process and its children.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.family().iter().map(|pid| resident_bytes(*pid)).sum()
    }

    fn family(&self) -> Vec<u32> {
        let own = self.child.id();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(own).chain(children).collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        for pid in self.family() {
            if let Ok(pid) = i32::try_from(pid) {
                let _gone = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM);
            }
        }
        thread::sleep(Duration::from_millis(50));
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Limits what the benches list.
const RULE: &str = r#"{"limits":[{"relateResources":[{"apiGroups":[""],"resources":["pods"]}],
 "selector":"ctrlmesh.kusionstack.io/sharding-hash in (0,1,2,3,4,5,6,7)"}]}"#;
