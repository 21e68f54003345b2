//! Prepares the process that becomes the command: its cgroup, and files that it sees in the place of others.
//!
//! The process does this itself, because a parent cannot do it for a child without unsafe code.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use nix::mount::{self, MsFlags};
use nix::sched::{self, CloneFlags};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd;

use crate::run::interception::service_account;
use crate::run::signals;

/// What the process is told.
#[derive(Debug, Args)]
pub(crate) struct ChildArgs {
    /// The process that started this one
    #[arg(long)]
    parent: i32,
    /// The cgroup to enter
    #[arg(long)]
    cgroup: Option<PathBuf>,
    /// A file, and the file in whose place it is to be seen
    #[arg(long, num_args = 2)]
    bind: Vec<PathBuf>,
    /// The files of a service account
    #[arg(long)]
    account: Option<PathBuf>,
    /// The command
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Why the process does not become the command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChildError {
    #[error("the proxy ended before the command began")]
    Orphan,
    #[error("{doing}")]
    Prepare { doing: &'static str, source: io::Error },
    #[error(
        "put a service account's files at {}, which takes root, or user namespaces for everybody (--interception kubeconfig takes neither)",
        crate::run::kubeconfig::source::SERVICE_ACCOUNT
    )]
    Account { source: io::Error },
    #[error("run `{}`", program.display())]
    Execute { program: OsString, source: io::Error },
}

/// The arguments by which [`ChildArgs`] is said.
#[derive(Debug, Default)]
pub(crate) struct Preparation {
    pub(crate) cgroup: Option<PathBuf>,
    pub(crate) binds: Vec<(PathBuf, PathBuf)>,
    pub(crate) account: Option<PathBuf>,
}

impl Preparation {
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let parent = std::process::id().to_string();
        let mut arguments: Vec<OsString> = vec![crate::run::CHILD.into(), "--parent".into(), parent.into()];
        if let Some(cgroup) = &self.cgroup {
            arguments.extend(["--cgroup".into(), cgroup.into()]);
        }
        for (file, place) in &self.binds {
            arguments.extend(["--bind".into(), file.into(), place.into()]);
        }
        if let Some(account) = &self.account {
            arguments.extend(["--account".into(), account.into()]);
        }
        arguments.push("--".into());
        arguments
    }
}

/// Becomes the command.
///
/// # Errors
///
/// Always, where it returns.
pub(crate) fn become_command(args: ChildArgs) -> Result<std::convert::Infallible, ChildError> {
    if let Some(cgroup) = &args.cgroup {
        fs::write(cgroup.join("cgroup.procs"), "0").map_err(prepare("enter the cgroup"))?;
    }
    if let Some(account) = &args.account {
        private_mounts()
            .and_then(|()| service_account::show(account))
            .map_err(|source| ChildError::Account { source })?;
    }
    if let Err(error) = bind(&args.bind) {
        // The environment and the arguments say the same; only what is hard-coded goes wrong, and TLS notices.
        let _closed = writeln!(
            io::stderr(),
            "ctrlmesh: files cannot be replaced for the command ({error}): it must honour KUBECONFIG"
        );
    }
    // An operator without its proxy can do nothing. What was done above would have undone this. SIGTERM is blocked yet.
    tie(args.parent, Signal::SIGKILL)?;
    signals::wait_for_start().map_err(prepare("wait for the proxy"))?;
    tie(args.parent, Signal::SIGTERM)?;
    signals::release().map_err(prepare("let signals through"))?;
    let (program, arguments) = args.command.split_at(1);
    let source = Command::new(&program[0]).args(arguments).exec();
    Err(ChildError::Execute { program: program[0].clone(), source })
}

/// Has the kernel send a signal to this process when its parent ends.
fn tie(parent: i32, signal: Signal) -> Result<(), ChildError> {
    prctl::set_pdeathsig(signal).map_err(prepare("tie the command to the proxy"))?;
    if unistd::getppid().as_raw() == parent { Ok(()) } else { Err(ChildError::Orphan) }
}

/// Shows files in the place of others, to this process and its children only.
fn bind(files: &[PathBuf]) -> io::Result<()> {
    if files.is_empty() {
        return Ok(());
    }
    private_mounts()?;
    let none: Option<&Path> = None;
    for pair in files.chunks_exact(2) {
        mount::mount(Some(&pair[0]), &pair[1], none, MsFlags::MS_BIND, none)?;
    }
    Ok(())
}

/// What is mounted elsewhere from now on is seen here, and not the other way round. Who is not root does it in a user
/// namespace, as the same user.
fn private_mounts() -> io::Result<()> {
    let (user, group) = (unistd::geteuid(), unistd::getegid());
    if user.is_root() {
        sched::unshare(CloneFlags::CLONE_NEWNS)?;
    } else {
        sched::unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    let none: Option<&Path> = None;
    Ok(mount::mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?)
}

fn prepare<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> ChildError {
    move |source| ChildError::Prepare { doing, source: source.into() }
}

impl ChildError {
    /// As shells say it.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Orphan | Self::Prepare { .. } | Self::Account { .. } => crate::run::OWN_FAILURE,
            Self::Execute { source, .. } if source.kind() == io::ErrorKind::NotFound => crate::run::NOT_FOUND,
            Self::Execute { .. } => crate::run::NOT_EXECUTABLE,
        }
    }
}
