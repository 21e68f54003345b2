//! Answers with the original address of a redirected connection: to clients (`getpeername`), and to proxies that are
//! not ours.

use core::mem::{offset_of, size_of};
use core::{hint, ptr};

use aya_ebpf::bindings::{bpf_sock, bpf_sockopt};
use aya_ebpf::programs::{SockAddrContext, SockoptContext};
use ctrlmesh_common::kernel::{self, ANY_ADDRESS, Address, BY_PORT, Decoded, Destination, Outcome};

use crate::load::{pointer, store, word, words};
use crate::maps;
use crate::redirect::{named, write};

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
const SOL_IP: u32 = 0;
const SOL_IPV6: u32 = 41;
/// `SO_ORIGINAL_DST` and `IP6T_SO_ORIGINAL_DST` have the same number.
const SO_ORIGINAL_DST: u32 = 80;

/// Go on with the system call: these programs refuse nothing.
const PASS: i32 = 1;

/// Answers `getpeername()` with the original address, and counts.
#[inline(always)]
pub(crate) fn peer<const V6: bool>(ctx: &SockAddrContext) -> i32 {
    maps::count(explain_peer::<V6>(ctx));
    PASS
}

#[inline(always)]
fn explain_peer<const V6: bool>(ctx: &SockAddrContext) -> Outcome {
    let (address, port) = named::<V6>(ctx);
    // Before anything else: of most connections the answer stays.
    if !kernel::is_encoded(address) {
        return Outcome::PeerOther;
    }
    let socket = pointer!(ctx.sock_addr, __bindgen_anon_1.sk);
    if socket.is_null() {
        return Outcome::PeerUnknown;
    }
    let source = address_of(
        word!(bpf_sock, socket, family),
        word!(bpf_sock, socket, src_ip4),
        words!(bpf_sock, socket, src_ip6),
    );
    let Some((original, port, _)) = explain(address, port, source) else {
        return Outcome::PeerUnknown;
    };
    write::<V6>(ctx, original, port);
    Outcome::PeerAnswered
}

/// Answers `getsockopt(SO_ORIGINAL_DST)` on the proxy's side, and counts.
#[inline(always)]
pub(crate) fn original_destination(ctx: &SockoptContext) -> i32 {
    maps::count(explain_destination(ctx));
    PASS
}

/// The accepted socket's own address says who is meant.
#[inline(always)]
fn explain_destination(ctx: &SockoptContext) -> Outcome {
    let base = ctx.sockopt;
    let level = word!(bpf_sockopt, base, level);
    if word!(bpf_sockopt, base, optname) != SO_ORIGINAL_DST || (level != SOL_IP && level != SOL_IPV6) {
        return Outcome::OptionOther;
    }
    let socket = pointer!(base, __bindgen_anon_1.sk);
    if socket.is_null() {
        return Outcome::OriginalUnknown;
    }
    let family = word!(bpf_sock, socket, family);
    let local = address_of(family, word!(bpf_sock, socket, src_ip4), words!(bpf_sock, socket, src_ip6));
    let source = address_of(family, word!(bpf_sock, socket, dst_ip4), words!(bpf_sock, socket, dst_ip6));
    let port = (word!(bpf_sock, socket, src_port) as u16).to_be();
    match explain(local, port, source) {
        Some((original, port, by_port)) if answer(base, original, port, by_port) => Outcome::OriginalAnswered,
        _ => Outcome::OriginalUnknown,
    }
}

/// The original address and port of a connection that was sent to `address` and `port` of a proxy, and whether it was
/// sent there for its port alone.
#[inline(always)]
fn explain(address: Address, port: u16, source: Address) -> Option<(Address, u16, bool)> {
    let Decoded { code, host } = Decoded::read(address, source)?;
    let pod = maps::PODS.get(u32::from(code.slot)).filter(|pod| pod.port == port)?;
    // The compiler knows that it is small and would leave the mask out; the verifier does not.
    let table = pod.table(hint::black_box(code.generation))?;
    let entry: &Destination = maps::DESTINATIONS.get(kernel::entry(table, code.index))?;
    if entry.host_bits == ANY_ADDRESS {
        let connection = maps::CONNECTIONS.get_ptr(host?)?;
        // SAFETY: the kernel gave a valid pointer. An entry is not changed before its socket has been closed for long.
        let original = unsafe { (*connection).original(code.slot, entry.port) };
        return Some((original?, entry.port, true));
    }
    Some((kernel::original(entry, host)?, entry.port, false))
}

/// Fills the answer of `SO_ORIGINAL_DST`: a `sockaddr_in` or a `sockaddr_in6`. One that is too short stays as it is.
///
/// [`BY_PORT`] stands where programs look at nothing: behind an IPv4 address (`sin_zero`), and as the flow of IPv6.
#[inline(always)]
fn answer(base: *mut bpf_sockopt, original: Address, port: u16, by_port: bool) -> bool {
    let value = pointer!(base, __bindgen_anon_2.optval).cast::<u32>();
    let end = pointer!(base, __bindgen_anon_3.optval_end) as usize;
    let port = u32::from(port) << 16;
    let [a, b, c, d] = original.0;
    let mark = if by_port { BY_PORT } else { 0 };
    let bytes = if original.ipv4().is_some() {
        if value as usize + size_of::<[u32; 4]>() > end {
            return false;
        }
        // SAFETY: four words lie before the end.
        unsafe { fill(value, [AF_INET | port, d, mark, 0]) };
        size_of::<[u32; 4]>()
    } else {
        if value as usize + size_of::<[u32; 7]>() > end {
            return false;
        }
        // SAFETY: seven words lie before the end.
        unsafe { fill(value, [AF_INET6 | port, mark, a, b, c, d, 0]) };
        size_of::<[u32; 7]>()
    };
    store!(bpf_sockopt, base, offset_of!(bpf_sockopt, optlen), bytes as u32);
    store!(bpf_sockopt, base, offset_of!(bpf_sockopt, retval), 0u32);
    true
}

/// Writes word by word: a copy of the whole would call `memmove`, which the verifier refuses without `CAP_PERFMON`.
///
/// # Safety
/// `N` words are writable from `to` on.
#[inline(always)]
unsafe fn fill<const N: usize>(to: *mut u32, words: [u32; N]) {
    let mut at = 0;
    while at < N {
        // SAFETY: the caller promises `N` words.
        let word = unsafe { to.add(at) };
        // SAFETY: the caller promises that they are writable.
        unsafe { ptr::write_volatile(word, words[at]) };
        at += 1;
    }
}

/// The address of a socket of either family.
#[inline(always)]
fn address_of(family: u32, ipv4: u32, ipv6: [u32; 4]) -> Address {
    if family == AF_INET { Address::mapped(ipv4) } else { Address(ipv6) }
}
