//! Which process of a node is in charge of its pods, and how does the next one come to be?
//!
//! In charge is who holds a lock in a folder. Who comes while another one is in charge waits at a socket in that folder,
//! and is given everything at once when the other one ends: the lock, the socket itself, and the sockets at which the
//! pods' connections arrive. So there is no moment at which nobody listens, whatever either of them does; and a process
//! that dies, dies with its lock, so that who waits is in charge without being told.
//!
//! Sockets are given as the kernel lets them be (`SCM_RIGHTS`), each in a packet that says in JSON what it is.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::unistd::Uid;
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::time;
use tracing::{debug, info};

use super::network::{Heirloom, NetworkId};
use ctrlmesh_intercept::Slot;

/// What is said. A version that another process does not know it does not take.
const VERSION: u32 = 1;

/// How long a successor may take to say that it has everything. Until then we serve.
const TAKEN_WITHIN: Duration = Duration::from_secs(3);

/// How long it may take to serve from there on: meanwhile we go on to accept, beside it. Who lives and takes longer has
/// the sockets, and what comes waits there.
const SERVED_WITHIN: Duration = Duration::from_secs(3);

/// The longest packet, in bytes: a network namespace in which every pod of a node is.
const MAX_PACKET_BYTES: usize = 64 * 1024;

/// The most sockets in a packet.
const MAX_SOCKETS: usize = 2;

/// Those who may wait to be let in.
const BACKLOG: i32 = 8;

/// The right to serve the node's pods.
pub(super) struct Charge {
    lock: OwnedFd,
    door: UnixListener,
    successor: Option<Link>,
}

/// Whether it is ours.
pub(super) enum Claim {
    Ours(Charge),
    /// Another process has it, and will give it.
    Theirs(Predecessor),
    /// Another process begins or ends at this very moment.
    Later,
}

/// The process that is in charge, and what it has given so far.
pub(super) struct Predecessor {
    link: Link,
    charge: Option<(OwnedFd, OwnedFd)>,
    heirlooms: Vec<Heirloom>,
}

/// One process on the way to another.
pub(super) struct Link(UnixStream);

/// What a packet says.
#[derive(Debug, Deserialize, Serialize)]
#[serde(tag = "is", rename_all = "camelCase")]
enum Said {
    /// With it go the lock and the door.
    Charge { version: u32 },
    /// With it goes a socket, which takes the connections of the pods in these slots.
    Listener { device: u64, inode: u64, port: u16, slots: Vec<u16> },
    /// That was all.
    Last,
    /// The answer: all of it arrived.
    Taken,
    /// The last word: who took it serves.
    Serves,
}

/// Looks whose the charge is that `folder` stands for, and takes it where it is nobody's.
pub(super) fn claim(folder: &Path) -> io::Result<Claim> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let lock = options.open(folder.join("lock"))?;
    let door = folder.join("socket");
    match lock.try_lock() {
        Ok(()) => Charge::open(lock.into(), &door).map(Claim::Ours),
        Err(TryLockError::Error(error)) => Err(error),
        Err(TryLockError::WouldBlock) => match knock(&door) {
            Ok(link) => {
                let (charge, heirlooms) = (None, Vec::new());
                let link = Link(UnixStream::from_std(link.into())?);
                Ok(Claim::Theirs(Predecessor { link, charge, heirlooms }))
            }
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) => Ok(Claim::Later),
            Err(errno) => Err(errno.into()),
        },
    }
}

// === impl Charge ===

impl Charge {
    fn open(lock: OwnedFd, door: &PathBuf) -> io::Result<Self> {
        // Of a process that is gone: nobody else could make it while we hold the lock.
        if let Err(error) = fs::remove_file(door)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        let socket = socket()?;
        net::bind(&socket, &SocketAddrUnix::new(door)?)?;
        net::listen(&socket, BACKLOG)?;
        Ok(Self { lock, door: listener(socket)?, successor: None })
    }

    /// Lets a process in that is to follow this one; completes when one came. The last that came is the one.
    pub(super) async fn attend(&mut self) -> io::Result<()> {
        let (accepted, _) = self.door.accept().await?;
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

    /// Gives everything to the process that follows, and returns once that serves. The sockets are still ours, too: they
    /// are to be dropped.
    ///
    /// # Errors
    /// Where it does not take them, or dies before it serves: then this process is in charge, and whoever comes next is
    /// given everything anew.
    pub(super) async fn give(&mut self, heirlooms: Vec<Heirloom>) -> io::Result<()> {
        let Some(successor) = self.successor.take() else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let given = time::timeout(TAKEN_WITHIN, self.hand(&successor, heirlooms)).await;
        given.map_err(|_elapsed| io::Error::from(io::ErrorKind::TimedOut)).flatten()?;
        match time::timeout(SERVED_WITHIN, successor.receive()).await {
            Ok(Ok(Some((Said::Serves, _)))) => Ok(()),
            // The lock is still ours, too, and so are all sockets.
            Ok(Ok(_)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(Err(error)) => Err(error),
            Err(_elapsed) => {
                debug!("the process that follows takes its time");
                Ok(())
            }
        }
    }

    async fn hand(&self, successor: &Link, heirlooms: Vec<Heirloom>) -> io::Result<()> {
        let charge = Said::Charge { version: VERSION };
        successor.send(&charge, &[self.lock.as_fd(), self.door.as_fd()]).await?;
        for Heirloom { network: NetworkId { device, inode }, port, slots, listener } in heirlooms {
            let slots = slots.iter().map(|slot| slot.get()).collect();
            let said = Said::Listener { device, inode, port, slots };
            successor.send(&said, &[listener.as_fd()]).await?;
        }
        successor.send(&Said::Last, &[]).await?;
        match successor.receive().await? {
            Some((Said::Taken, _)) => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

// === impl Predecessor ===

impl Predecessor {
    /// Waits until everything is given; gives whether it was, and not that the process has ended. What has arrived before
    /// this is dropped is not lost.
    pub(super) async fn gives(&mut self) -> io::Result<bool> {
        loop {
            let Some((said, mut sockets)) = self.link.receive().await? else { return Ok(false) };
            match (said, sockets.pop(), sockets.pop()) {
                (Said::Charge { version: VERSION }, Some(door), Some(lock)) => {
                    self.charge = Some((lock, door));
                }
                (Said::Listener { device, inode, port, slots }, Some(socket), None) => {
                    let network = NetworkId { device, inode };
                    let slots = slots.into_iter().map(Slot::new).collect();
                    let listener = TcpListener::from(socket);
                    self.heirlooms.push(Heirloom { network, port, slots, listener });
                }
                (Said::Last, None, None) if self.charge.is_some() => return Ok(true),
                (said, ..) => {
                    let unknown = format!("{said:?} is not understood");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, unknown));
                }
            }
        }
    }

    /// Takes what was given, and says so. Over the link it is to be said when the pods are served.
    pub(super) async fn take(self) -> io::Result<(Charge, Vec<Heirloom>, Link)> {
        let Self { link, charge, heirlooms } = self;
        let (lock, door) = charge.ok_or(io::ErrorKind::InvalidData)?;
        let charge = Charge { lock, door: listener(door)?, successor: None };
        link.send(&Said::Taken, &[]).await?;
        Ok((charge, heirlooms, link))
    }
}

// === impl Link ===

impl Link {
    /// Says to the process before this one that it is needed no more.
    pub(super) async fn serves(self) -> io::Result<()> {
        self.send(&Said::Serves, &[]).await
    }

    async fn send(&self, said: &Said, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(said)?;
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SOCKETS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !sockets.is_empty() && !control.push(SendAncillaryMessage::ScmRights(sockets)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let parts = [IoSlice::new(&bytes)];
            net::sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL)?;
            Ok(())
        };
        self.0.async_io(Interest::WRITABLE, send).await
    }

    /// The next packet; nothing where the other process has closed the connection, or is gone.
    async fn receive(&self) -> io::Result<Option<(Said, Vec<OwnedFd>)>> {
        match self.0.async_io(Interest::READABLE, || receive(&self.0)).await {
            // It never got to let us in.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            received => received,
        }
    }
}

fn receive(socket: &UnixStream) -> io::Result<Option<(Said, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SOCKETS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let message = net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let sockets = control.drain().filter_map(|one| match one {
        RecvAncillaryMessage::ScmRights(sockets) => Some(sockets),
        _ => None,
    });
    let sockets: Vec<OwnedFd> = sockets.flatten().collect();
    match bytes.get(..message.bytes) {
        None | Some([]) => Ok(None),
        Some(said) => Ok(Some((serde_json::from_slice(said)?, sockets))),
    }
}

fn listener(socket: OwnedFd) -> io::Result<UnixListener> {
    UnixListener::from_std(socket.into())
}

fn knock(door: &PathBuf) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    net::connect(&socket, &SocketAddrUnix::new(door)?)?;
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

    fn ours(folder: &Path) -> Charge {
        match claim(folder).unwrap() {
            Claim::Ours(charge) => charge,
            Claim::Theirs(_) | Claim::Later => panic!("it is another's"),
        }
    }

    fn theirs(folder: &Path) -> Predecessor {
        match claim(folder).unwrap() {
            Claim::Theirs(before) => before,
            Claim::Ours(_) | Claim::Later => panic!("nobody has it"),
        }
    }

    fn heirloom(slots: &[u16]) -> Heirloom {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let network = NetworkId { device: 1, inode: u64::from(port) };
        Heirloom { network, port, slots: slots.iter().copied().map(Slot::new).collect(), listener }
    }

    #[tokio::test]
    async fn everything_goes_from_one_to_the_next_and_on_to_a_third() {
        let folder = TempDir::new().unwrap();
        let mut charge = ours(folder.path());
        // As many as a node may have.
        let slots: Vec<u16> = (0..4096).collect();
        let mut heirlooms: Vec<_> = (0..300).map(|_| heirloom(&[7])).collect();
        heirlooms.push(heirloom(&slots));
        for _ in 0..2 {
            let mut next = theirs(folder.path());
            charge.attend().await.unwrap();
            let ports: Vec<u16> = heirlooms.iter().map(|one| one.port).collect();
            let (given, taken) = tokio::join!(charge.give(heirlooms), async {
                assert!(next.gives().await.unwrap());
                let (charge, sockets, link) = next.take().await.unwrap();
                link.serves().await.unwrap();
                (charge, sockets)
            });
            given.unwrap();
            let (received, sockets) = taken;
            charge = received;
            for (socket, port) in sockets.iter().zip(&ports) {
                assert_eq!(socket.listener.local_addr().unwrap().port(), *port);
            }
            assert_eq!(sockets.len(), ports.len());
            assert_eq!(sockets.last().unwrap().slots.len(), slots.len());
            heirlooms = sockets;
        }
    }

    #[tokio::test]
    async fn who_does_not_take_it_leaves_it_and_who_is_gone_leaves_nothing() {
        let folder = TempDir::new().unwrap();
        let mut charge = ours(folder.path());
        drop(theirs(folder.path()));
        charge.attend().await.unwrap();
        assert!(charge.give(vec![heirloom(&[1])]).await.is_err());
        assert!(!charge.has_successor());
        let mut next = theirs(folder.path());
        drop(charge);
        assert!(!next.gives().await.unwrap());
        drop(ours(folder.path()));
    }

    #[tokio::test]
    async fn who_takes_everything_and_dies_before_it_serves_leaves_the_one_before_in_charge() {
        let folder = TempDir::new().unwrap();
        let mut charge = ours(folder.path());
        let mut next = theirs(folder.path());
        charge.attend().await.unwrap();
        let (given, ()) = tokio::join!(charge.give(vec![heirloom(&[1])]), async {
            assert!(next.gives().await.unwrap());
            drop(next.take().await.unwrap());
        });
        assert!(given.is_err());
        // Whoever comes after it is let in by the same door, and given everything.
        let mut last = theirs(folder.path());
        charge.attend().await.unwrap();
        let (given, received) = tokio::join!(charge.give(vec![heirloom(&[1])]), async {
            assert!(last.gives().await.unwrap());
            let (charge, sockets, link) = last.take().await.unwrap();
            link.serves().await.unwrap();
            assert_eq!(sockets.len(), 1);
            charge
        });
        given.unwrap();
        drop(charge);
        assert!(matches!(claim(folder.path()).unwrap(), Claim::Theirs(_)));
        drop(received);
        drop(ours(folder.path()));
    }

    #[tokio::test]
    async fn a_version_that_is_not_known_is_not_taken() {
        let folder = TempDir::new().unwrap();
        let charge = ours(folder.path());
        let mut next = theirs(folder.path());
        let (accepted, _) = charge.door.accept().await.unwrap();
        let said = Said::Charge { version: VERSION + 1 };
        Link(accepted).send(&said, &[charge.lock.as_fd(), charge.door.as_fd()]).await.unwrap();
        assert!(next.gives().await.unwrap_err().to_string().contains("not understood"));
        assert!(next.take().await.is_err());
    }
}
