//! The errors of interception, with what to do about them.

use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use aya::EbpfError;
use aya::maps::MapError;
use aya::pin::PinError;
use aya::programs::ProgramError;
use ctrlmesh_common::kernel::INBOUND_PER_POD;
use nix::errno::Errno;

use crate::host::privilege::Missing;
use crate::target::Target;

/// Why interception failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("this binary holds no kernel programs: run `cargo xtask build-ebpf` and build it again")]
    NoObject,
    #[error(
        "find cgroup2: no such file system is mounted (boot with `systemd.unified_cgroup_hierarchy=1`, or mount it beside v1)"
    )]
    NoCgroup2,
    #[error("{path} is not a cgroup of the cgroup2 file system at {mount}")]
    NotACgroup { path: PathBuf, mount: PathBuf },
    #[error("{path} is not below {pod}, so its connections cannot be excepted")]
    NotBelow { path: PathBuf, pod: PathBuf },
    #[error("{0} is the root of all cgroups: attach at a pod's or a container's")]
    RootCgroup(PathBuf),
    #[error("no cgroup of `{name}` below {below}")]
    NoSuchCgroup { name: String, below: PathBuf },
    #[error(
        "{path} is not on a BPF file system, and none could be mounted for the whole machine: on the node, `mount -t bpf bpf /sys/fs/bpf`"
    )]
    NoBpffs { path: PathBuf, source: Errno },
    #[error("{0} is the BPF file system itself: name a folder below it")]
    PinRoot(PathBuf),
    #[error(
        "{path} is not for its owner alone (user {owner}, mode {mode:04o}): whoever can open a pin can use it; `chown root` and `chmod 700` it, or name another folder"
    )]
    Shared { path: PathBuf, owner: u32, mode: u32 },
    #[error("{0} was removed and made anew since it was opened: open it again")]
    Replaced(PathBuf),
    #[error("{doing} {path}: pins are root's (0700): run as their owner")]
    Private { doing: String, path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{doing}: not permitted; missing {missing}")]
    Capability { doing: String, missing: Missing, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("the kernel ({running}) is too old: {feature} needs Linux {since}")]
    Kernel {
        feature: Cow<'static, str>,
        since: &'static str,
        running: String,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{cgroup} is attached by `{owner}` (`--owner {owner}` speaks for it)")]
    Owned { cgroup: PathBuf, owner: String },
    #[error(
        "the tables stay for {cgroup}, attached by `{owner}`; nothing of this owner's is attached any more (`--force` removes \
         everybody's)"
    )]
    Others { cgroup: PathBuf, owner: String },
    #[error("connections of {cgroup} pass: {pod}, attached by `{owner}`, excepts it (attach that without it first)")]
    Excepted { cgroup: PathBuf, pod: PathBuf, owner: String },
    #[error(
        "attach at {cgroup}: another program holds this cgroup or one above it exclusively (`bpftool cgroup tree` shows it)"
    )]
    Exclusive { cgroup: PathBuf, source: ProgramError },
    #[error("number {number} is of no pod that `{owner}` has attached")]
    NotYours { number: u32, owner: String },
    #[error("webhook calls to {address} are taken for the pod in slot {slot}")]
    Taken { address: SocketAddr, slot: u16 },
    #[error(
        "webhook calls to {address}: of each pod those to {INBOUND_PER_POD} addresses and ports are taken, not more"
    )]
    TooMany { address: SocketAddr },
    #[error("remove the table of nftables that drops what bypasses the proxy")]
    Bypass(#[source] io::Error),
    #[error("make our IPv6 prefix local in network namespace {path}")]
    Prefix { path: PathBuf, source: io::Error },
    #[error("nothing is attached at {0}")]
    NotAttached(PathBuf),
    #[error(
        "table {table} is full: it holds {entries} entries (detach what is no longer needed, or name fewer targets)"
    )]
    Full { table: &'static str, entries: u32 },
    #[error("{0} is an address that connections are redirected to, and cannot be a target")]
    Reserved(Target),
    #[error("no process of {cgroup} is in network namespace {inode}")]
    NoSuchNamespace { inode: u64, cgroup: PathBuf },
    #[error("processes of {0} are in another PID namespace than this one (in a pod, `hostPID: true` shows them)")]
    OtherPids(PathBuf),
    #[error(
        "this process is in {0}, which is intercepted: its own connections would come back to it (start it elsewhere, or attach with `--except`)"
    )]
    Inside(PathBuf),
    #[error("load the kernel programs")]
    Object(#[source] Box<EbpfError>),
    #[error("load program `{program}`")]
    Load { program: &'static str, source: Box<ProgramError> },
    #[error("the kernel programs hold no `{0}`: they are of another version")]
    Absent(&'static str),
    #[error("attach program `{program}` at {to}")]
    Attach { program: &'static str, to: PathBuf, source: Box<ProgramError> },
    #[error("pin {path}")]
    Pin { path: PathBuf, source: PinError },
    #[error("use map `{map}`")]
    Map { map: &'static str, source: MapError },
    #[error("{doing} {path}")]
    File { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("listen on {address}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("make a socket in network namespace {path}")]
    Socket { path: PathBuf, source: io::Error },
    #[error("enter network namespace {path}")]
    Namespace { path: PathBuf, source: io::Error },
}

impl Error {
    /// Whether the machine cannot do what we need, whoever asks, and however often.
    pub fn is_of_the_kernel(&self) -> bool {
        matches!(self, Self::Kernel { .. } | Self::NoCgroup2 | Self::NoBpffs { .. })
    }

    pub(crate) fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }

    pub(crate) fn map(map: &'static str) -> impl FnOnce(MapError) -> Self {
        move |source| Self::Map { map, source }
    }
}
