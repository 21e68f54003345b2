//! Sends messages with sockets between a process and its successor.
//!
//! Sockets are sent by `SCM_RIGHTS`, each in a packet that says in JSON what it is.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    self, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// The longest packet, in bytes: a network namespace that every pod of a node shares.
const MAX_PACKET_BYTES: usize = 64 * 1024;

/// The most sockets in a packet.
const MAX_SOCKETS: usize = 2;

/// The connection between a process and its successor.
pub(crate) struct Link(pub(super) UnixStream);

#[derive(Debug, Deserialize, Serialize)]
#[serde(tag = "is", rename_all = "camelCase")]
pub(super) enum Message {
    /// Carries the lock and the handover socket.
    #[serde(rename = "charge")]
    Lock {
        version: u32,
    },
    /// Carries the listener of the pods in these slots.
    Listener {
        device: u64,
        inode: u64,
        port: u16,
        slots: Vec<u16>,
    },
    Last,
    /// Everything arrived.
    Taken,
    /// The successor serves.
    Serves,
}

impl Link {
    /// Tells the process before this one that it is needed no more.
    pub(crate) async fn confirm_serving(self) -> io::Result<()> {
        self.send(&Message::Serves, &[]).await
    }

    pub(super) async fn send(&self, message: &Message, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
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

    /// The next packet; `None` where the other process has closed the connection, or is gone.
    pub(super) async fn receive(&self) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        match self.0.async_io(Interest::READABLE, || receive(&self.0)).await {
            // The process ended before it accepted this connection.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            received => received,
        }
    }
}

fn receive(socket: &UnixStream) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
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
        Some(message) => Ok(Some((serde_json::from_slice(message)?, sockets))),
    }
}
