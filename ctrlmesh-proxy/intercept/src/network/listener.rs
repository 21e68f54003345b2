//! Makes the sockets that a proxy listens at inside a pod's network namespace.
//!
//! A thread enters the namespace, makes the socket and ends; a thread that once entered is never used again.
//!
//! The socket for redirected connections is bound to `lo`: what comes in from outside never reaches it, whatever its
//! address says. Sockets for webhook calls cannot be, because their answers go out by another device; they listen on a
//! loopback address, one for each family, which nobody outside can name either.

use std::ffi::OsString;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::{io, thread};

use nix::errno::Errno;
use nix::sched::{self, CloneFlags};
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrStorage, sockopt};

use crate::Error;
use crate::host::privilege;
use crate::network::route;

/// Connections that wait for the proxy to accept them.
const BACKLOG: i32 = 4096;

/// A network namespace, held open.
#[derive(Debug)]
pub struct Namespace {
    path: PathBuf,
    file: File,
    /// The one that we are in: entering it again would take a capability.
    own: bool,
}

/// The socket for redirected connections: port `port` on every address that comes in by `lo`, in both families.
///
/// # Errors
/// If the namespace cannot be entered, or the port is taken there.
pub fn outbound(namespace: &Namespace, port: u16) -> Result<TcpListener, Error> {
    let v6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let listener = namespace.run(|| match bound(v6, Some("lo")) {
        // Redirected connections come over IPv4, so a namespace without IPv6 loses nothing.
        Err(Errno::EAFNOSUPPORT | Errno::EADDRNOTAVAIL) => bound(v4, Some("lo")).map_err(|errno| (v4, errno)),
        other => other.map_err(|errno| (v6, errno)),
    })?;
    listener.map_err(|(address, errno)| Error::Listen { address, source: errno.into() })
}

/// A socket to connect with to an address of this family, as a process of the namespace would.
///
/// # Errors
/// If the namespace cannot be entered, or does not know the family.
pub fn outgoing(namespace: &Namespace, family: IpAddr) -> Result<TcpStream, Error> {
    unconnected(namespace, family, SockType::Stream).map(TcpStream::from)
}

/// The same for datagrams.
///
/// # Errors
/// If the namespace cannot be entered, or does not know the family.
pub fn datagrams(namespace: &Namespace, family: IpAddr) -> Result<UdpSocket, Error> {
    unconnected(namespace, family, SockType::Datagram).map(UdpSocket::from)
}

fn unconnected(namespace: &Namespace, family: IpAddr, kind: SockType) -> Result<OwnedFd, Error> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let family = if family.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let failed = |source| Error::Socket { path: namespace.path.clone(), source };
    namespace.run(|| socket::socket(family, kind, flags, None))?.map_err(|errno| failed(errno.into()))
}

/// The socket for webhook calls to an address of this family, which arrive by `sk_lookup` and not by its own address.
///
/// # Errors
/// If the namespace cannot be entered, or does not know the family.
pub fn inbound(namespace: &Namespace, family: IpAddr) -> Result<TcpListener, Error> {
    let ip: IpAddr = if family.is_ipv6() { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
    let address = SocketAddr::new(ip, 0);
    namespace.run(|| bound(address, None))?.map_err(|errno| Error::Listen { address, source: errno.into() })
}

/// Makes our IPv6 prefix local in a pod's namespace, so that the socket for redirected connections gets those to native
/// IPv6 targets too. It stays so for as long as the namespace lives: nobody can know that no other proxy counts on it.
///
/// # Errors
/// If the namespace cannot be entered, or has no IPv6.
pub(crate) fn make_prefix_local(namespace: &Namespace) -> Result<(), Error> {
    let made = namespace.run(route::make_local)?;
    let failed = |source| Error::Prefix { path: namespace.path.clone(), source };
    let doing = || format!("make our IPv6 prefix local in {}", namespace.path.display());
    made.map_err(|error| privilege::explain(doing(), error, failed))
}

/// Device and inode of the network namespace at `path`, which together are its only name.
///
/// # Errors
/// If there is none, or it may not be looked at.
pub fn identity(path: &Path) -> Result<(u64, u64), Error> {
    let found = fs::metadata(path);
    let found = found.map_err(|error| privilege::explain_process("find network namespace", path, error))?;
    Ok((found.dev(), found.ino()))
}

impl Namespace {
    /// Opens `/proc/PID/ns/net` or a namespace that has a name.
    ///
    /// # Errors
    /// If it does not exist or may not be opened.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file =
            File::open(path).map_err(|error| privilege::explain_process("open network namespace", path, error))?;
        Ok(Self { path: path.to_owned(), file, own: false })
    }

    /// The namespace of this process.
    ///
    /// # Errors
    /// If `/proc` is not there.
    pub fn own() -> Result<Self, Error> {
        Ok(Self { own: true, ..Self::open(Path::new("/proc/self/ns/net"))? })
    }

    /// What the kernel calls it.
    ///
    /// # Errors
    /// If it cannot be asked.
    pub(crate) fn inode(&self) -> Result<u64, Error> {
        Ok(self.file.metadata().map_err(Error::file("read", &self.path))?.ino())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Runs `task` inside, on a thread of its own.
    ///
    /// # Errors
    /// If the namespace cannot be entered.
    pub fn run<T: Send>(&self, task: impl FnOnce() -> T + Send) -> Result<T, Error> {
        if self.own {
            return Ok(task());
        }
        let entered = thread::scope(|scope| {
            let thread = scope.spawn(|| sched::setns(&self.file, CloneFlags::CLONE_NEWNET).map(|()| task()));
            thread.join()
        });
        let failed = |source| Error::Namespace { path: self.path.clone(), source };
        match entered {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(errno)) => Err(privilege::explain_namespace(
                format!("enter network namespace {}", self.path.display()),
                errno.into(),
                failed,
            )),
            Err(_) => Err(failed(io::Error::other("the thread inside panicked"))),
        }
    }
}

fn bound(address: SocketAddr, device: Option<&str>) -> Result<TcpListener, Errno> {
    let family = if address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket: OwnedFd = socket::socket(family, SockType::Stream, flags, SockProtocol::Tcp)?;
    if address.is_ipv6() {
        socket::setsockopt(&socket, sockopt::Ipv6V6Only, &false)?;
    }
    socket::setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    if let Some(device) = device {
        socket::setsockopt(&socket, sockopt::BindToDevice, &OsString::from(device))?;
    }
    socket::bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    socket::listen(&socket, Backlog::new(BACKLOG)?)?;
    Ok(TcpListener::from(socket))
}
