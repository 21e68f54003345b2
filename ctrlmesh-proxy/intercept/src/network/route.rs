//! Makes our IPv6 prefix local on `lo` of a network namespace, as all of 127/8 is.
//!
//! One route, made by netlink (`linux/rtnetlink.h`). It lives as long as the namespace, or until `lo` is set down.
//! Needs `CAP_NET_ADMIN` in the user namespace that owns the network namespace.

use std::io;

use ctrlmesh_common::kernel::{PREFIX, PREFIX_BITS};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockProtocol};

use super::netlink::{Messages, NLM_F_CREATE, NLM_F_EXCL, Socket};

/// Index of `lo` in every namespace.
const LOOPBACK: u32 = 1;

const RTM_NEWROUTE: u16 = 24;
const RT_TABLE_LOCAL: u8 = 255;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;

/// Makes the prefix local in the namespace of the calling thread, unless it is.
pub(crate) fn make_local() -> io::Result<()> {
    let mut destination = [0; 16];
    destination[..PREFIX.len()].copy_from_slice(&PREFIX);
    // `rtmsg`: the family, bits of destination and source, the service; table, protocol, scope and kind; flags.
    let family = AddressFamily::Inet6 as u8;
    let header = [family, PREFIX_BITS, 0, 0, RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0];
    let mut messages = Messages::default();
    messages.add(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &header, |attributes| {
        attributes.bytes(RTA_DST, &destination);
        attributes.bytes(RTA_OIF, &LOOPBACK.to_ne_bytes());
    });
    messages.acknowledge();
    match Socket::open(SockProtocol::NetlinkRoute)?.acknowledged(&messages) {
        Err(error) if error.raw_os_error() == Some(Errno::EEXIST as i32) => Ok(()),
        made => made,
    }
}
