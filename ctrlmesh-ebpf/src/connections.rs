//! Remembers where connections to a port at any address were meant to go.

use core::ptr;

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST, bpf_sock};
use aya_ebpf::helpers::generated as helpers;
use aya_ebpf::programs::{SockAddrContext, SockContext};
use ctrlmesh_common::kernel::{Address, CONNECTION_NUMBERS, Connection, connection_number};

use crate::load::word;
use crate::maps;

const IPPROTO_TCP: u32 = 6;

/// Go on with the system call.
const PASS: i32 = 1;

/// Stores where the caller's socket wants to go, and returns the number that finds it. `None` where the table is full,
/// or others have all numbers of this socket.
#[inline(always)]
pub(crate) fn store(ctx: &SockAddrContext, slot: u16, address: Address, port: u16) -> Option<u32> {
    // SAFETY: the helper takes the context.
    let cookie = unsafe { helpers::bpf_get_socket_cookie(ctx.as_ptr()) };
    let connection = Connection { cookie, closed_ns: 0, address, port, slot, reserved: 0 };
    let mut attempt = 0;
    while attempt < CONNECTION_NUMBERS {
        let number = connection_number(cookie, attempt);
        // A socket may connect again where it was refused before.
        let flags = if is_of(number, cookie) { BPF_ANY } else { BPF_NOEXIST };
        if maps::CONNECTIONS.insert(number, connection, u64::from(flags)).is_ok() {
            return Some(number);
        }
        attempt += 1;
    }
    None
}

/// Notes that a socket is closed. The entry stays for a while: the proxy may not have accepted the connection yet.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) -> i32 {
    if word!(bpf_sock, ctx.sock, protocol) != IPPROTO_TCP {
        return PASS;
    }
    // SAFETY: the helper takes the context.
    let cookie = unsafe { helpers::bpf_get_socket_cookie(ctx.as_ptr()) };
    let mut attempt = 0;
    while attempt < CONNECTION_NUMBERS {
        let number = connection_number(cookie, attempt);
        if let Some(connection) = maps::CONNECTIONS.get_ptr_mut(number)
            // SAFETY: the kernel gave a valid pointer.
            && unsafe { (*connection).cookie } == cookie
        {
            // SAFETY: the helper has no arguments.
            let now = unsafe { helpers::bpf_ktime_get_ns() };
            // SAFETY: as above.
            let closed = unsafe { &raw mut (*connection).closed_ns };
            // SAFETY: eight aligned bytes, which the loader reads with one load.
            unsafe { ptr::write_volatile(closed, now) };
        }
        attempt += 1;
    }
    PASS
}

#[inline(always)]
fn is_of(number: u32, cookie: u64) -> bool {
    // SAFETY: the kernel gave a valid pointer.
    maps::CONNECTIONS.get_ptr(number).is_some_and(|connection| unsafe { (*connection).cookie } == cookie)
}
