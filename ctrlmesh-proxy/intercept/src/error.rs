//! What can go wrong, in words that say what to do about it?

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

use super::privilege::Missing;
use super::target::Target;

/// Why interception failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The binary was built without the programs.
    #[error(
        "this binary holds no kernel programs: run `cargo xtask build-ebpf` and build it again"
    )]
    NoObject,
    /// Only cgroup v1, or nothing.
    #[error(
        "find cgroup2: no such file system is mounted (boot with `systemd.unified_cgroup_hierarchy=1`, or mount it beside v1)"
    )]
    NoCgroup2,
    /// Exists, but is no cgroup.
    #[error("{path} is not a cgroup of the cgroup2 file system at {mount}")]
    NotACgroup {
        /// What was given.
        path: PathBuf,
        /// Where cgroups are.
        mount: PathBuf,
    },
    /// Only what is below a pod may be excepted from it.
    #[error("{path} is not below {pod}, so its connections cannot be excepted")]
    NotBelow {
        /// What was to pass.
        path: PathBuf,
        /// The cgroup that is attached.
        pod: PathBuf,
    },
    /// The root would catch the proxy itself.
    #[error("{0} is the root of all cgroups: attach at a pod's or a container's")]
    RootCgroup(PathBuf),
    /// No such pod or container.
    #[error("no cgroup of `{name}` below {below}")]
    NoSuchCgroup {
        /// Pod UID or container id.
        name: String,
        /// Where it was looked for.
        below: PathBuf,
    },
    /// Pins need a bpffs.
    #[error(
        "{path} is not on a BPF file system, and none could be mounted for the whole machine: on the node, `mount -t bpf bpf /sys/fs/bpf`"
    )]
    NoBpffs {
        /// Where pins should go.
        path: PathBuf,
        /// Why it could not be mounted.
        #[source]
        source: Errno,
    },
    /// The file system itself is not ours to fill, and not to remove either.
    #[error("{0} is the BPF file system itself: name a folder below it")]
    PinRoot(PathBuf),
    /// Whoever may open a pin can use it.
    #[error(
        "{path} is not for its owner alone (user {owner}, mode {mode:04o}): whoever can open a pin can use it; `chown root` and `chmod 700` it, or name another folder"
    )]
    Shared {
        /// A folder of the pins, or one above.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// What others may do.
        mode: u32,
    },
    /// Somebody removed everything, and it was made anew.
    #[error("{0} was removed and made anew since it was opened: open it again")]
    Replaced(PathBuf),
    /// Somebody else's folder of pins.
    #[error("{doing} {path}: pins are root's (0700): run as their owner")]
    Private {
        /// What was being done.
        doing: String,
        /// To what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kernel said no, and a capability is missing.
    #[error("{doing}: not permitted; missing {missing}")]
    Capability {
        /// What was being done.
        doing: String,
        /// What the process lacks.
        missing: Missing,
        /// What the kernel said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kernel is older than a feature.
    #[error("the kernel ({running}) is too old: {feature} needs Linux {since}")]
    Kernel {
        /// What is missing.
        feature: Cow<'static, str>,
        /// First kernel that has it.
        since: &'static str,
        /// This kernel.
        running: String,
        /// What the kernel said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Somebody else intercepts here.
    #[error("{cgroup} is attached by `{owner}` (`--owner {owner}` speaks for it)")]
    Owned {
        /// Cgroup.
        cgroup: PathBuf,
        /// Who attached it.
        owner: String,
    },
    /// Somebody else still intercepts where everything was to be removed.
    #[error(
        "the tables stay for {cgroup}, attached by `{owner}`; nothing of this owner's is attached any more (`--force` removes \
         everybody's)"
    )]
    Others {
        /// Cgroup.
        cgroup: PathBuf,
        /// Who attached it.
        owner: String,
    },
    /// It is the proxy of somebody else's, which would be its own client.
    #[error(
        "connections of {cgroup} pass: {pod}, attached by `{owner}`, excepts it (attach that without it first)"
    )]
    Excepted {
        /// What was to be attached.
        cgroup: PathBuf,
        /// The pod above.
        pod: PathBuf,
        /// Who attached that.
        owner: String,
    },
    /// A program of another system was attached exclusively, here or above.
    #[error(
        "attach at {cgroup}: another program holds this cgroup or one above it exclusively (`bpftool cgroup tree` shows it)"
    )]
    Exclusive {
        /// Cgroup.
        cgroup: PathBuf,
        /// What the kernel said.
        #[source]
        source: ProgramError,
    },
    /// Somebody else's pod, one that is gone, or none.
    #[error("number {number} is of no pod that `{owner}` has attached")]
    NotYours {
        /// Slot, or number of a heartbeat.
        number: u32,
        /// Who asked.
        owner: String,
    },
    /// Two pods cannot have the webhook calls of one address and port.
    #[error("webhook calls to {address} are taken for the pod in slot {slot}")]
    Taken {
        /// Address and port.
        address: SocketAddr,
        /// Who has them.
        slot: u16,
    },
    /// A pod has so many addresses and ports, and no more.
    #[error(
        "webhook calls to {address}: of each pod those to {INBOUND_PER_POD} addresses and ports are taken, not more"
    )]
    TooMany {
        /// Address and port.
        address: SocketAddr,
    },
    /// The route of our IPv6 prefix.
    #[error("make our IPv6 prefix local in network namespace {path}")]
    Prefix {
        /// Which namespace.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Nothing is attached there.
    #[error("nothing is attached at {0}")]
    NotAttached(PathBuf),
    /// No room.
    #[error(
        "table {table} is full: it holds {entries} entries (detach what is no longer needed, or name fewer targets)"
    )]
    Full {
        /// Name of the table.
        table: &'static str,
        /// Its size.
        entries: u32,
    },
    /// A connection to it would look as if it had been redirected already.
    #[error("{0} is an address that connections are redirected to, and cannot be a target")]
    Reserved(Target),
    /// Nobody is in a network namespace any more.
    #[error("no process of {cgroup} is in network namespace {inode}")]
    NoSuchNamespace {
        /// Its inode.
        inode: u64,
        /// Whose it was.
        cgroup: PathBuf,
    },
    /// Somebody's processes cannot be found by their numbers.
    #[error(
        "processes of {0} are in another PID namespace than this one (in a pod, `hostPID: true` shows them)"
    )]
    OtherPids(PathBuf),
    /// The proxy would talk to itself.
    #[error(
        "this process is in {0}, which is intercepted: its own connections would come back to it (start it elsewhere, or attach with `--except`)"
    )]
    Inside(PathBuf),
    /// The object as a whole.
    #[error("load the kernel programs")]
    Object(#[source] Box<EbpfError>),
    /// One program.
    #[error("load program `{program}`")]
    Load {
        /// Its name.
        program: &'static str,
        /// What the kernel said.
        #[source]
        source: Box<ProgramError>,
    },
    /// The object lacks a program or a map: it is another version.
    #[error("the kernel programs hold no `{0}`: they are of another version")]
    Absent(&'static str),
    /// Attaching.
    #[error("attach program `{program}` at {to}")]
    Attach {
        /// Its name.
        program: &'static str,
        /// Cgroup or network namespace.
        to: PathBuf,
        /// What the kernel said.
        #[source]
        source: Box<ProgramError>,
    },
    /// Pinning.
    #[error("pin {path}")]
    Pin {
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: PinError,
    },
    /// A map.
    #[error("use map `{map}`")]
    Map {
        /// Its name.
        map: &'static str,
        /// What the kernel said.
        #[source]
        source: MapError,
    },
    /// A file, a folder, a pin.
    #[error("{doing} {path}")]
    File {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A listener.
    #[error("listen on {address}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A network namespace.
    #[error("enter network namespace {path}")]
    Namespace {
        /// Which.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl Error {
    pub(super) fn file(
        doing: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }

    pub(super) fn map(map: &'static str) -> impl FnOnce(MapError) -> Self {
        move |source| Self::Map { map, source }
    }
}
