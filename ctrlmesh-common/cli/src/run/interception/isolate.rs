//! Redirects the connections of the command, and of no other process, by eBPF.
//!
//! The command runs in a cgroup of its own, below that of this process, so that the same limits hold. Pins and maps
//! belong to this run and go when it ends.

use std::collections::BTreeSet;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tracing::warn;

use crate::run::folder::{Folder, FolderError};
use crate::run::interception::leftovers;
use ctrlmesh_intercept::cgroup::Hierarchy;
use ctrlmesh_intercept::listener;
use ctrlmesh_intercept::listener::Namespace;
use ctrlmesh_intercept::{Attach, Error, Interceptor, Limits, ListenerCheck, Options, Slot, Targets};

/// Whose attachments these are, in the tables.
const OWNER: &str = "run";

/// Cgroups that a command may make below its own and still be known by.
const CGROUPS: u32 = 64;

/// How long the kernel may take to let go of a cgroup.
const RELEASED: Duration = Duration::from_secs(5);

/// A cgroup whose connections to the API server come to this process; removed when dropped.
pub(crate) struct Isolation {
    interceptor: Interceptor,
    slot: Slot,
    cgroup: PathBuf,
    pins: PathBuf,
    port: u16,
    targets: BTreeSet<SocketAddr>,
}

/// Why the command cannot be isolated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IsolateError {
    #[error("intercept the command's connections")]
    Intercept(#[from] Error),
    #[error("make the cgroup `{path}`")]
    Cgroup { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Folder(#[from] FolderError),
}

impl Isolation {
    /// Redirects connections to `targets` from a new cgroup to the listener that is returned; port 0 is any free one.
    pub(crate) fn new(
        folder: &Folder,
        pins: &Path,
        port: u16,
        targets: &[SocketAddr],
    ) -> Result<(Self, TcpListener), IsolateError> {
        let listener = listener::outbound(&Namespace::own()?, port)?;
        let port = listener.local_addr().map_or(port, |address| address.port());
        let pins = pins.join(folder.name());
        let cgroup = make(folder, &pins)?;
        let attached = attached(&cgroup, &pins, port, targets, &listener);
        match attached {
            Ok((interceptor, slot)) => {
                let targets = targets.iter().copied().collect();
                Ok((Self { interceptor, slot, cgroup, pins, port, targets }, listener))
            }
            Err(error) => {
                remove(&cgroup, &pins);
                Err(error.into())
            }
        }
    }

    pub(crate) fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// Redirects connections to these, too: the API server's name may lead elsewhere by now.
    pub(crate) fn add(&mut self, targets: &[SocketAddr]) {
        let before = self.targets.len();
        self.targets.extend(targets.iter().copied());
        if self.targets.len() == before {
            return;
        }
        let targets: Vec<SocketAddr> = self.targets.iter().copied().collect();
        let attach = attach(&self.cgroup, self.port, &targets);
        if let Err(error) = self.interceptor.attach(&attach) {
            warn!(error = &error as &dyn std::error::Error, slot = %self.slot, "new addresses of the API server are not redirected");
        }
    }
}

impl Drop for Isolation {
    fn drop(&mut self) {
        remove(&self.cgroup, &self.pins);
    }
}

/// Removes what a run that was killed has left.
pub(crate) fn sweep(left: &Folder) {
    if let Some((cgroup, pins)) = left.noted() {
        remove(&cgroup, &pins);
    }
}

/// A new cgroup, below our own if that can be; noted before it is made.
fn make(folder: &Folder, pins: &Path) -> Result<PathBuf, IsolateError> {
    let hierarchy = Hierarchy::find()?;
    let name = format!("ctrlmesh-run-{}", folder.name());
    let own = hierarchy.own()?.join(&name);
    folder.note(&own, pins)?;
    if fs::create_dir(&own).is_ok() {
        return Ok(own);
    }
    let top = hierarchy.mount().join(&name);
    folder.note(&top, pins)?;
    match fs::create_dir(&top) {
        Ok(()) => Ok(top),
        Err(source) => Err(IsolateError::Cgroup { path: top, source }),
    }
}

fn attached(
    cgroup: &Path,
    pins: &Path,
    port: u16,
    targets: &[SocketAddr],
    listener: &TcpListener,
) -> Result<(Interceptor, Slot), Error> {
    let limits = Limits { cgroups: Some(CGROUPS), ..Limits::default() };
    let options = Options { pins: pins.to_owned(), limits, ..Options::new(OWNER) };
    let mut interceptor = Interceptor::open(options)?;
    let slot = interceptor.attach(&attach(cgroup, port, targets))?;
    interceptor.listen(slot, listener)?;
    Ok((interceptor, slot))
}

fn attach(cgroup: &Path, port: u16, targets: &[SocketAddr]) -> Attach {
    Attach {
        cgroup: cgroup.to_owned(),
        except: Vec::new(),
        targets: Targets { name: "api-server".to_owned(), list: targets.iter().copied().map(Into::into).collect() },
        port,
        fail_open: false,
        listener: ListenerCheck::Held,
        heartbeat: None,
        report: false,
    }
}

/// Ends what still runs in a cgroup, and removes it with its pins. What fails is left to the next run.
fn remove(cgroup: &Path, pins: &Path) {
    if cgroup.is_dir() {
        empty(cgroup);
        remove_cgroup(cgroup);
    }
    // The links go with their pins, and the programs with them.
    let _left = fs::remove_dir_all(pins);
    for folder in pins.ancestors().skip(1).take(2) {
        // Others may have pins there.
        let _used = fs::remove_dir(folder);
    }
}

fn empty(cgroup: &Path) {
    let send = |signal| {
        if signal == Signal::SIGKILL {
            let _old_kernel = fs::write(cgroup.join("cgroup.kill"), "1");
        }
        for process in processes(cgroup) {
            let _gone = signal::kill(process, signal);
        }
    };
    leftovers::end(|| processes(cgroup), send);
}

fn processes(cgroup: &Path) -> Vec<Pid> {
    let mut found = Vec::new();
    let mut folders = vec![cgroup.to_owned()];
    while let Some(folder) = folders.pop() {
        let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        found.extend(text.lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw));
        folders.extend(children(&folder));
    }
    found
}

fn remove_cgroup(cgroup: &Path) {
    for below in children(cgroup) {
        remove_cgroup(&below);
    }
    // A process that has just ended may hold it for a moment.
    let deadline = Instant::now() + RELEASED;
    while fs::remove_dir(cgroup).is_err() && cgroup.is_dir() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}
