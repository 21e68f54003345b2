//! Messages of netlink, and the socket that they go by.
//!
//! A message is `nlmsghdr`, a header of its subsystem, and attributes (`nlattr`), which may hold others. Everything is
//! aligned to four bytes (`linux/netlink.h`).

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, setsockopt, sockopt};
use nix::sys::time::TimeVal;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
pub(super) const NLM_F_DUMP: u16 = 0x300;
pub(super) const NLM_F_CREATE: u16 = 0x400;
pub(super) const NLM_F_APPEND: u16 = 0x800;
pub(super) const NLM_F_EXCL: u16 = 0x200;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// On the kind of an attribute that holds others.
const NLA_F_NESTED: u16 = 0x8000;

/// `nlmsghdr`, in bytes.
const HEADER: usize = 16;

/// Enough for one datagram of a dump, which has a page or 32 KiB at most.
const BUFFER: usize = 64 * 1024;

/// How long the kernel may take, in seconds: it answers at once, unless it never does.
const TIMEOUT_SECONDS: i64 = 2;

/// Messages that are sent at once.
#[derive(Debug, Default)]
pub(super) struct Messages {
    bytes: Vec<u8>,
    count: u32,
    /// Where the last one begins.
    last: usize,
    /// The number of the one that asks for an answer.
    acknowledged: u32,
}

/// The attributes of a message, or of another attribute.
#[derive(Debug)]
pub(super) struct Attributes<'a>(&'a mut Vec<u8>);

/// A message that came, without its header.
pub(super) struct Received<'a> {
    kind: u16,
    sequence: u32,
    body: &'a [u8],
}

/// A socket of one netlink protocol, in the network namespace of the thread that opens it.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Messages {
    /// Adds a message whose attributes `fill` adds after `header`, that of the subsystem.
    pub(super) fn add(&mut self, kind: u16, flags: u16, header: &[u8], fill: impl FnOnce(&mut Attributes<'_>)) {
        let start = self.bytes.len();
        (self.count, self.last) = (self.count + 1, start);
        self.bytes.extend(0_u32.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        self.bytes.extend(self.count.to_ne_bytes());
        self.bytes.extend(0_u32.to_ne_bytes());
        self.bytes.extend(header);
        fill(&mut Attributes(&mut self.bytes));
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    /// Has the kernel acknowledge the last message so far.
    pub(super) fn acknowledge(&mut self) {
        let flags = self.last + 6;
        if let Some([low, high]) = self.bytes.get_mut(flags..flags + 2) {
            [*low, *high] = (u16::from_ne_bytes([*low, *high]) | NLM_F_ACK).to_ne_bytes();
            self.acknowledged = self.count;
        }
    }
}

impl Attributes<'_> {
    pub(super) fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.put(kind, |bytes| bytes.extend(value));
    }

    /// A text, with the zero that ends it.
    pub(super) fn text(&mut self, kind: u16, value: &str) {
        self.put(kind, |bytes| bytes.extend(value.bytes().chain([0])));
    }

    /// A number, in the order of networks.
    pub(super) fn number(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// An attribute that holds those that `fill` adds.
    pub(super) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Attributes<'_>)) {
        self.put(kind | NLA_F_NESTED, |bytes| fill(&mut Attributes(bytes)));
    }

    fn put(&mut self, kind: u16, fill: impl FnOnce(&mut Vec<u8>)) {
        let start = self.0.len();
        self.0.extend(0_u16.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        fill(self.0);
        // No attribute of ours comes near to 64 KiB: long lists are split into messages.
        let length = u16::try_from(self.0.len() - start).unwrap_or(u16::MAX);
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

impl Socket {
    pub(super) fn open(protocol: SockProtocol) -> io::Result<Self> {
        let socket = socket::socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(TIMEOUT_SECONDS, 0))?;
        Ok(Self(socket))
    }

    /// Sends messages, and waits until the kernel has acknowledged the one that asks for that.
    ///
    /// # Errors
    /// The first that the kernel answers.
    pub(super) fn acknowledged(&self, messages: &Messages) -> io::Result<()> {
        self.send(messages)?;
        self.receive(|received| Ok(received.kind == NLMSG_ERROR && received.sequence == messages.acknowledged))
    }

    /// Sends a message that asks for a list, and has `each` read the body of each entry.
    ///
    /// # Errors
    /// The first that the kernel answers, and those of `each`.
    pub(super) fn listed(&self, messages: &Messages, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        self.send(messages)?;
        self.receive(|received| match received.kind {
            NLMSG_DONE => received.check().map(|()| true),
            _ => each(received.body).map(|()| false),
        })
    }

    fn send(&self, messages: &Messages) -> io::Result<()> {
        socket::send(self.0.as_raw_fd(), &messages.bytes, MsgFlags::empty())?;
        Ok(())
    }

    /// Receives until `is_last`.
    fn receive(&self, mut is_last: impl FnMut(&Received<'_>) -> io::Result<bool>) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER];
        loop {
            let length = socket::recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut rest = buffer.get(..length).ok_or_else(malformed)?;
            while !rest.is_empty() {
                let received;
                (received, rest) = Received::split(rest)?;
                if received.kind == NLMSG_ERROR {
                    received.check()?;
                }
                if is_last(&received)? {
                    return Ok(());
                }
            }
        }
    }
}

impl<'a> Received<'a> {
    /// The first message, and what follows.
    fn split(bytes: &'a [u8]) -> io::Result<(Self, &'a [u8])> {
        let header = bytes.first_chunk::<HEADER>().ok_or_else(malformed)?;
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let length = usize::try_from(word(0)).map_err(|_unfit| malformed())?;
        let body = bytes.get(HEADER..length).ok_or_else(malformed)?;
        let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Ok((Self { kind: u16::from_ne_bytes([header[4], header[5]]), sequence: word(8), body }, rest))
    }

    /// The error that a message of this kind tells; 0 is success.
    fn check(&self) -> io::Result<()> {
        match i32::from_ne_bytes(*self.body.first_chunk().ok_or_else(malformed)?) {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error.saturating_neg())),
        }
    }
}

/// The attributes in `bytes`, each by its kind. What is cut off is passed over.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let &[l0, l1, k0, k1] = bytes.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([k0, k1]) & !NLA_F_NESTED, value))
    })
}

/// The first attribute of a kind.
pub(super) fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(one, _)| *one == kind).map(|(_, value)| value)
}

pub(super) fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not an answer of netlink")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        let mut written = Attributes(&mut bytes);
        written.text(1, "abc");
        written.nest(2, |inner| {
            inner.number(3, 7);
            inner.bytes(4, &[1]);
        });
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(attribute(&bytes, 1), Some(&b"abc\0"[..]));
        let inner = attribute(&bytes, 2).unwrap();
        assert_eq!(attribute(inner, 3), Some(&[0, 0, 0, 7][..]));
        assert_eq!(attribute(inner, 4), Some(&[1][..]));
        assert_eq!(attribute(&bytes, 5), None);
        // Cut anywhere, nothing is read beyond the end.
        for end in 0..bytes.len() {
            let _read: Vec<_> = attributes(&bytes[..end]).collect();
        }
    }

    #[test]
    fn a_message_is_as_long_as_it_says_and_an_error_is_told() {
        let mut messages = Messages::default();
        messages.add(NLMSG_ERROR, 0, &(-2_i32).to_ne_bytes(), |_| {});
        messages.add(NLMSG_ERROR, 0, &0_i32.to_ne_bytes(), |attributes| attributes.bytes(1, &[1, 2, 3]));
        messages.acknowledge();
        assert_eq!((messages.acknowledged, messages.bytes[messages.last + 6]), (2, 5));
        let (first, rest) = Received::split(&messages.bytes).unwrap();
        assert_eq!(first.check().unwrap_err().raw_os_error(), Some(2));
        let (second, rest) = Received::split(rest).unwrap();
        assert!(second.check().is_ok() && second.sequence == 2 && rest.is_empty());
        assert!(Received::split(&messages.bytes[..10]).is_err());
        assert!(Received::split(&messages.bytes[..18]).is_err());
    }
}
