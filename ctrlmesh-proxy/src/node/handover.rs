//! Hands the pods of a node over from one process to the next.
//!
//! The process that holds a lock file serves. The next process connects to the handover socket in the same folder, and
//! waits. When the first one ends, it sends the lock, the handover socket, and the listeners of all pods at once. So at
//! every moment some process listens. The kernel releases the lock of a process that dies, and a waiting one takes it.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::unistd::Uid;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};
use tokio::time;
use tracing::{debug, info};

use super::network::{InheritedListener, NetworkId};
use ctrlmesh_intercept::Slot;

mod link;

pub(super) use link::Link;
use link::Message;

/// The protocol version. A process refuses another version.
const VERSION: u32 = 1;

/// For the successor to confirm that everything arrived. Until then this process serves.
const TAKEN_TIMEOUT: Duration = Duration::from_secs(3);

/// For the successor to serve after that. Meanwhile this process accepts, too. Where a successor takes longer, new
/// connections wait at the sockets, which it has. On a busy node one took 8 s.
const SERVING_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 8;

/// The right to serve the node's pods.
pub(super) struct ServingLock {
    lock: OwnedFd,
    handover_socket: UnixListener,
    successor: Option<Link>,
}

/// What came of claiming the lock.
pub(super) enum Claim {
    Ours(ServingLock),
    /// Another process has it, and will hand it over.
    Theirs(Predecessor),
    /// Its holder is starting or ending; try again.
    Later,
}

/// The process that serves, and what it has sent so far.
pub(super) struct Predecessor {
    link: Link,
    serving_lock: Option<(OwnedFd, OwnedFd)>,
    listeners: Vec<InheritedListener>,
}

/// Takes the lock in `folder` if it is free, or connects to the process that holds it.
pub(super) fn claim(folder: &Path) -> io::Result<Claim> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let lock = options.open(folder.join("lock"))?;
    let handover_socket = folder.join("socket");
    match lock.try_lock() {
        Ok(()) => ServingLock::open(lock.into(), &handover_socket).map(Claim::Ours),
        Err(TryLockError::Error(error)) => Err(error),
        Err(TryLockError::WouldBlock) => match connect(&handover_socket) {
            Ok(link) => {
                let (serving_lock, listeners) = (None, Vec::new());
                let link = Link(UnixStream::from_std(link.into())?);
                Ok(Claim::Theirs(Predecessor { link, serving_lock, listeners }))
            }
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) => Ok(Claim::Later),
            Err(errno) => Err(errno.into()),
        },
    }
}

impl ServingLock {
    fn open(lock: OwnedFd, handover_socket: &PathBuf) -> io::Result<Self> {
        // The socket of a process that is gone: only the holder of the lock makes one.
        if let Err(error) = fs::remove_file(handover_socket)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        let socket = socket()?;
        net::bind(&socket, &SocketAddrUnix::new(handover_socket)?)?;
        net::listen(&socket, BACKLOG)?;
        Ok(Self { lock, handover_socket: unix_listener(socket)?, successor: None })
    }

    /// Accepts the connection of a successor. A later one replaces it.
    pub(super) async fn accept_successor(&mut self) -> io::Result<()> {
        let (accepted, _) = self.handover_socket.accept().await?;
        if accepted.peer_cred()?.uid() == Uid::effective().as_raw() {
            info!("another process waits to follow this one");
            self.successor = Some(Link(accepted));
        }
        Ok(())
    }

    /// Whether a process waits to follow this one.
    pub(super) fn has_successor(&self) -> bool {
        self.successor.is_some()
    }

    /// Hands everything over to the successor, and returns once that serves. The caller then drops its own sockets.
    ///
    /// # Errors
    /// The successor does not take them, or dies before it serves. Then this process serves on, and the next successor
    /// gets everything anew.
    pub(super) async fn give(&mut self, listeners: Vec<InheritedListener>) -> io::Result<()> {
        let Some(successor) = self.successor.take() else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let given = time::timeout(TAKEN_TIMEOUT, self.send_all(&successor, listeners)).await;
        given.map_err(|_elapsed| io::Error::from(io::ErrorKind::TimedOut)).flatten()?;
        match time::timeout(SERVING_TIMEOUT, successor.receive()).await {
            Ok(Ok(Some((Message::Serves, _)))) => Ok(()),
            // This process still holds the lock and all sockets.
            Ok(Ok(_)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(Err(error)) => Err(error),
            Err(_elapsed) => {
                debug!("the process that follows takes its time");
                Ok(())
            }
        }
    }

    async fn send_all(&self, successor: &Link, listeners: Vec<InheritedListener>) -> io::Result<()> {
        let serving_lock = Message::Lock { version: VERSION };
        successor.send(&serving_lock, &[self.lock.as_fd(), self.handover_socket.as_fd()]).await?;
        for InheritedListener { network: NetworkId { device, inode }, port, slots, listener } in listeners {
            let slots = slots.iter().map(|slot| slot.get()).collect();
            let message = Message::Listener { device, inode, port, slots };
            successor.send(&message, &[listener.as_fd()]).await?;
        }
        successor.send(&Message::Last, &[]).await?;
        match successor.receive().await? {
            Some((Message::Taken, _)) => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl Predecessor {
    /// Waits until everything has arrived. Returns false where the process has ended instead. Cancel safe.
    pub(super) async fn receive_all(&mut self) -> io::Result<bool> {
        loop {
            let Some((message, mut sockets)) = self.link.receive().await? else { return Ok(false) };
            match (message, sockets.pop(), sockets.pop()) {
                (Message::Lock { version: VERSION }, Some(handover_socket), Some(lock)) => {
                    self.serving_lock = Some((lock, handover_socket));
                }
                (Message::Listener { device, inode, port, slots }, Some(socket), None) => {
                    let network = NetworkId { device, inode };
                    let slots = slots.into_iter().map(Slot::new).collect();
                    let listener = TcpListener::from(socket);
                    self.listeners.push(InheritedListener { network, port, slots, listener });
                }
                (Message::Last, None, None) if self.serving_lock.is_some() => return Ok(true),
                (message, ..) => {
                    let unknown = format!("{message:?} is not understood");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, unknown));
                }
            }
        }
    }

    /// Takes the lock and the listeners, and confirms them. [`Link::confirm_serving`] is called once the pods are
    /// served.
    pub(super) async fn accept(self) -> io::Result<(ServingLock, Vec<InheritedListener>, Link)> {
        let Self { link, serving_lock, listeners } = self;
        let (lock, handover_socket) = serving_lock.ok_or(io::ErrorKind::InvalidData)?;
        let serving_lock = ServingLock { lock, handover_socket: unix_listener(handover_socket)?, successor: None };
        link.send(&Message::Taken, &[]).await?;
        Ok((serving_lock, listeners, link))
    }
}

fn unix_listener(socket: OwnedFd) -> io::Result<UnixListener> {
    UnixListener::from_std(socket.into())
}

fn connect(handover_socket: &PathBuf) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    net::connect(&socket, &SocketAddrUnix::new(handover_socket)?)?;
    Ok(socket)
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn ours(folder: &Path) -> ServingLock {
        match claim(folder).unwrap() {
            Claim::Ours(serving_lock) => serving_lock,
            Claim::Theirs(_) | Claim::Later => panic!("it is another's"),
        }
    }

    fn theirs(folder: &Path) -> Predecessor {
        match claim(folder).unwrap() {
            Claim::Theirs(before) => before,
            Claim::Ours(_) | Claim::Later => panic!("nobody has it"),
        }
    }

    fn inherited(slots: &[u16]) -> InheritedListener {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let network = NetworkId { device: 1, inode: u64::from(port) };
        InheritedListener { network, port, slots: slots.iter().copied().map(Slot::new).collect(), listener }
    }

    #[tokio::test]
    async fn everything_goes_from_one_to_the_next_and_on_to_a_third() {
        let folder = TempDir::new().unwrap();
        let mut serving_lock = ours(folder.path());
        // As many as a node may have.
        let slots: Vec<u16> = (0..4096).collect();
        let mut listeners: Vec<_> = (0..300).map(|_| inherited(&[7])).collect();
        listeners.push(inherited(&slots));
        for _ in 0..2 {
            let mut next = theirs(folder.path());
            serving_lock.accept_successor().await.unwrap();
            let ports: Vec<u16> = listeners.iter().map(|one| one.port).collect();
            let (given, taken) = tokio::join!(serving_lock.give(listeners), async {
                assert!(next.receive_all().await.unwrap());
                let (serving_lock, sockets, link) = next.accept().await.unwrap();
                link.confirm_serving().await.unwrap();
                (serving_lock, sockets)
            });
            given.unwrap();
            let (received, sockets) = taken;
            serving_lock = received;
            for (socket, port) in sockets.iter().zip(&ports) {
                assert_eq!(socket.listener.local_addr().unwrap().port(), *port);
            }
            assert_eq!(sockets.len(), ports.len());
            assert_eq!(sockets.last().unwrap().slots.len(), slots.len());
            listeners = sockets;
        }
    }

    #[tokio::test]
    async fn a_successor_that_fails_leaves_the_lock_with_its_holder() {
        let folder = TempDir::new().unwrap();
        let mut serving_lock = ours(folder.path());
        drop(theirs(folder.path()));
        serving_lock.accept_successor().await.unwrap();
        assert!(serving_lock.give(vec![inherited(&[1])]).await.is_err());
        assert!(!serving_lock.has_successor());
        let mut next = theirs(folder.path());
        drop(serving_lock);
        assert!(!next.receive_all().await.unwrap());
        drop(ours(folder.path()));
    }

    #[tokio::test]
    async fn a_successor_that_dies_early_leaves_the_lock_with_its_holder() {
        let folder = TempDir::new().unwrap();
        let mut serving_lock = ours(folder.path());
        let mut next = theirs(folder.path());
        serving_lock.accept_successor().await.unwrap();
        let (given, ()) = tokio::join!(serving_lock.give(vec![inherited(&[1])]), async {
            assert!(next.receive_all().await.unwrap());
            drop(next.accept().await.unwrap());
        });
        assert!(given.is_err());
        // The next one connects to the same socket, and gets everything.
        let mut last = theirs(folder.path());
        serving_lock.accept_successor().await.unwrap();
        let (given, received) = tokio::join!(serving_lock.give(vec![inherited(&[1])]), async {
            assert!(last.receive_all().await.unwrap());
            let (serving_lock, sockets, link) = last.accept().await.unwrap();
            link.confirm_serving().await.unwrap();
            assert_eq!(sockets.len(), 1);
            serving_lock
        });
        given.unwrap();
        drop(serving_lock);
        assert!(matches!(claim(folder.path()).unwrap(), Claim::Theirs(_)));
        drop(received);
        drop(ours(folder.path()));
    }

    #[tokio::test]
    async fn a_version_that_is_not_known_is_not_taken() {
        let folder = TempDir::new().unwrap();
        let serving_lock = ours(folder.path());
        let mut next = theirs(folder.path());
        let (accepted, _) = serving_lock.handover_socket.accept().await.unwrap();
        let message = Message::Lock { version: VERSION + 1 };
        Link(accepted)
            .send(&message, &[serving_lock.lock.as_fd(), serving_lock.handover_socket.as_fd()])
            .await
            .unwrap();
        assert!(next.receive_all().await.unwrap_err().to_string().contains("not understood"));
        assert!(next.accept().await.is_err());
    }
}
