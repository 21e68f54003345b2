//! Makes our IPv6 prefix local on `lo` of a network namespace, as all of 127/8 is.
//!
//! One route, made by netlink. It lives as long as the namespace, or until `lo` is set down. Needs `CAP_NET_ADMIN` in
//! the user namespace that owns the network namespace.

use std::io;
use std::os::fd::AsRawFd as _;

use ctrlmesh_common::kernel::{PREFIX, PREFIX_BITS};
use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Index of `lo` in every namespace.
const LOOPBACK: u32 = 1;

const RTM_NEWROUTE: u16 = 24;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_EXCL: u16 = 0x200;
const RT_TABLE_LOCAL: u8 = 255;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;

/// `nlmsghdr`, `rtmsg` and two attributes, as they lie in memory.
#[repr(C)]
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout)]
struct Request {
    length: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    sender: u32,
    family: u8,
    destination_bits: u8,
    source_bits: u8,
    service: u8,
    table: u8,
    protocol: u8,
    scope: u8,
    route: u8,
    route_flags: u32,
    destination_length: u16,
    destination_kind: u16,
    destination: [u8; 16],
    device_length: u16,
    device_kind: u16,
    device: u32,
}

/// `nlmsghdr` and the number of the error, 0 for success; the request comes after.
#[repr(C)]
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout)]
struct Answer {
    length: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    sender: u32,
    error: i32,
}

/// Makes the prefix local in the namespace of the calling thread, unless it is.
pub(crate) fn make_local() -> io::Result<()> {
    match ask(&request()) {
        Err(error) if error.raw_os_error() == Some(Errno::EEXIST as i32) => Ok(()),
        made => made,
    }
}

fn ask(request: &Request) -> io::Result<()> {
    let socket =
        socket::socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    socket::send(socket.as_raw_fd(), request.as_bytes(), MsgFlags::empty())?;
    let mut buffer = [0; 256];
    let length = socket::recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "not an answer of netlink");
    let answer = buffer.get(..length).ok_or_else(malformed)?;
    let (answer, _) = Answer::read_from_prefix(answer).ok().ok_or_else(malformed)?;
    if answer.kind != NLMSG_ERROR {
        return Err(malformed());
    }
    match answer.error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

fn request() -> Request {
    let mut destination = [0; 16];
    destination[..PREFIX.len()].copy_from_slice(&PREFIX);
    Request {
        length: length::<Request>(),
        kind: RTM_NEWROUTE,
        flags: NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL,
        sequence: 1,
        sender: 0,
        family: AddressFamily::Inet6 as u8,
        destination_bits: PREFIX_BITS,
        source_bits: 0,
        service: 0,
        table: RT_TABLE_LOCAL,
        protocol: RTPROT_STATIC,
        scope: RT_SCOPE_HOST,
        route: RTN_LOCAL,
        route_flags: 0,
        destination_length: 20,
        destination_kind: RTA_DST,
        destination,
        device_length: 8,
        device_kind: RTA_OIF,
        device: LOOPBACK,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a few dozen bytes")]
const fn length<T>() -> u32 {
    size_of::<T>() as u32
}
