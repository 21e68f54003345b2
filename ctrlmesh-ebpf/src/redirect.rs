//! Where does a connection go: to the proxy, to its target, or nowhere?

use core::mem::{offset_of, size_of};
use core::ptr;

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{
    BPF_F_CURRENT_NETNS, bpf_sock, bpf_sock_addr, bpf_sock_tuple, bpf_sockopt,
};
use aya_ebpf::helpers::generated as helpers;
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::programs::{SockAddrContext, SockoptContext};
use ctrlmesh_common::kernel::{
    self, Address, CHECK_HEARTBEAT, CHECK_LISTENER, CHECK_PORT, Destination, EVENT_SAMPLE, Event,
    FAIL_OPEN, Outcome, Pod, REPORT, ROLE_PASS, TargetKey, TargetMatch,
};

use crate::load::{store, word, words};
use crate::maps;

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
const IPPROTO_TCP: u32 = 6;
const SOL_IP: u32 = 0;
const SOL_IPV6: u32 = 41;
/// `SO_ORIGINAL_DST` and `IP6T_SO_ORIGINAL_DST` have the same number.
const SO_ORIGINAL_DST: u32 = 80;
const ECONNREFUSED: i32 = 111;
/// Bytes of the part of the tuple that names an IPv4 connection.
const TUPLE_BYTES: u32 = 12;
/// 127.0.0.1 in network byte order.
const LOCALHOST: u32 = u32::from_ne_bytes([127, 0, 0, 1]);

/// Go on with the system call.
const PASS: i32 = 1;
/// Do not.
const REFUSE: i32 = 0;

/// Decides about one `connect()`, counts and reports it.
#[inline(always)]
pub(crate) fn connect<const V6: bool>(ctx: &SockAddrContext) -> i32 {
    let outcome = decide::<V6>(ctx);
    maps::count(outcome);
    if outcome.refuses() {
        // SAFETY: the helper takes any error number.
        unsafe { helpers::bpf_set_retval(-ECONNREFUSED) };
        return REFUSE;
    }
    PASS
}

#[inline(always)]
fn decide<const V6: bool>(ctx: &SockAddrContext) -> Outcome {
    let base = ctx.sock_addr;
    if word!(bpf_sock_addr, base, protocol) != IPPROTO_TCP {
        return Outcome::OtherProtocol;
    }
    let Some(member) = maps::member() else {
        return Outcome::NotEnrolled;
    };
    if member.role == ROLE_PASS {
        return Outcome::OwnConnection;
    }
    let Some(pod) = maps::PODS.get(u32::from(member.slot)) else {
        return Outcome::NotEnrolled;
    };
    if pod.port == 0 {
        return Outcome::NotEnrolled;
    }
    let (address, port) = named::<V6>(ctx);
    let key = Key::new(kernel::prefix_bits(0), TargetKey { table: pod.table, port, address });
    let Some(&target) = maps::TARGETS.get(&key) else {
        return Outcome::OtherTarget;
    };
    let outcome = redirect::<V6>(ctx, member.slot, pod, target, address);
    if pod.flags & REPORT != 0 {
        report(outcome, member.slot, address, port);
    }
    outcome
}

#[inline(always)]
fn redirect<const V6: bool>(
    ctx: &SockAddrContext,
    slot: u16,
    pod: &Pod,
    target: TargetMatch,
    address: Address,
) -> Outcome {
    let open = pod.flags & FAIL_OPEN != 0;
    if pod.flags & CHECK_HEARTBEAT != 0 && !beats(pod) {
        return if open { Outcome::NoHeartbeatPassed } else { Outcome::NoHeartbeatRefused };
    }
    if !listens(ctx, slot, pod) {
        return if open { Outcome::NoListenerPassed } else { Outcome::NoListenerRefused };
    }
    if target.host_bits != 0 && !carry::<V6>(ctx, address.host(target.host_bits)) {
        return if open { Outcome::BoundPassed } else { Outcome::BoundRefused };
    }
    write::<V6>(ctx, Address::mapped(kernel::encode(slot, target.index)), pod.port);
    Outcome::Redirected
}

/// Whether the proxy's last beat is young enough.
#[inline(always)]
fn beats(pod: &Pod) -> bool {
    let Some(beat) = maps::HEARTBEATS.get_ptr(pod.heartbeat) else {
        return false;
    };
    // SAFETY: the kernel gave a valid pointer; another process may write at the same time.
    let beat = unsafe { ptr::read_volatile(beat) };
    // SAFETY: the helper has no arguments.
    let now = unsafe { helpers::bpf_ktime_get_coarse_ns() };
    // Zero is a proxy that never beat. The coarse clock may lag behind the beat.
    beat != 0 && (now < beat || now - beat < pod.max_age_ns)
}

/// Whether a proxy would accept the connection.
#[inline(always)]
fn listens(ctx: &SockAddrContext, slot: u16, pod: &Pod) -> bool {
    if pod.flags & CHECK_LISTENER != 0 {
        let slot = u32::from(slot);
        let map = ptr::from_ref(&maps::LISTENERS).cast_mut().cast();
        // SAFETY: a map and a key of its type.
        let socket = unsafe { helpers::bpf_map_lookup_elem(map, ptr::from_ref(&slot).cast()) };
        return release(socket.cast());
    }
    if pod.flags & CHECK_PORT != 0 {
        // SAFETY: the structure is plain numbers.
        let mut tuple: bpf_sock_tuple = unsafe { core::mem::zeroed() };
        tuple.__bindgen_anon_1.ipv4.daddr = LOCALHOST;
        tuple.__bindgen_anon_1.ipv4.dport = pod.port;
        // SAFETY: the tuple is as long as said.
        let socket = unsafe {
            helpers::bpf_sk_lookup_tcp(
                ctx.as_ptr(),
                &raw mut tuple,
                TUPLE_BYTES,
                BPF_F_CURRENT_NETNS as u64,
                0,
            )
        };
        return release(socket);
    }
    true
}

/// Gives a borrowed socket back; whether there was one.
#[inline(always)]
fn release(socket: *mut bpf_sock) -> bool {
    if socket.is_null() {
        return false;
    }
    // SAFETY: the socket was borrowed from the kernel and is used no more.
    unsafe { helpers::bpf_sk_release(socket.cast()) };
    true
}

/// Lets the source address carry the open bits of a prefix. Fails if the socket is bound to a port already.
#[inline(always)]
fn carry<const V6: bool>(ctx: &SockAddrContext, host: u32) -> bool {
    let source = kernel::encode_host(host);
    let base = ctx.sock_addr;
    // A `sockaddr_in6` or a `sockaddr_in`, with port 0: the kernel chooses one when it connects.
    if V6 {
        let [a, b, c, d] = Address::mapped(source).0;
        return bind(base, [AF_INET6, 0, a, b, c, d, 0]);
    }
    bind(base, [AF_INET, source, 0, 0])
}

#[inline(always)]
fn bind<const N: usize>(base: *mut bpf_sock_addr, mut name: [u32; N]) -> bool {
    // SAFETY: the address is as long as said.
    unsafe { helpers::bpf_bind(base, name.as_mut_ptr().cast(), size_of::<[u32; N]>() as i32) == 0 }
}

/// Answers `getpeername()` with the original address.
#[inline(always)]
pub(crate) fn peer<const V6: bool>(ctx: &SockAddrContext) -> i32 {
    let (address, port) = named::<V6>(ctx);
    let Some((slot, index)) = address.ipv4().and_then(kernel::decode) else {
        return PASS;
    };
    let Some(pod) = maps::PODS.get(u32::from(slot)) else {
        return PASS;
    };
    if pod.port != port {
        return PASS;
    }
    // SAFETY: the context is valid, and the kernel loads the field.
    let socket = unsafe { (*ctx.sock_addr).__bindgen_anon_1.sk };
    if socket.is_null() {
        return PASS;
    }
    let source = ipv4_of(
        word!(bpf_sock, socket, family),
        word!(bpf_sock, socket, src_ip4),
        words!(bpf_sock, socket, src_ip6),
    );
    if let Some((original, port)) = explain(pod.table, index, source) {
        write::<V6>(ctx, original, port);
    }
    PASS
}

/// Answers `getsockopt(SO_ORIGINAL_DST)` on the proxy's side: the accepted socket's own address says who is meant.
#[inline(always)]
pub(crate) fn original_destination(ctx: &SockoptContext) -> i32 {
    let base = ctx.sockopt;
    let level = word!(bpf_sockopt, base, level);
    if word!(bpf_sockopt, base, optname) != SO_ORIGINAL_DST
        || (level != SOL_IP && level != SOL_IPV6)
    {
        return PASS;
    }
    // SAFETY: the context is valid, and the kernel loads the field.
    let socket = unsafe { (*base).__bindgen_anon_1.sk };
    if socket.is_null() {
        return PASS;
    }
    let family = word!(bpf_sock, socket, family);
    let local =
        ipv4_of(family, word!(bpf_sock, socket, src_ip4), words!(bpf_sock, socket, src_ip6));
    let source =
        ipv4_of(family, word!(bpf_sock, socket, dst_ip4), words!(bpf_sock, socket, dst_ip6));
    let Some((slot, index)) = kernel::decode(local) else {
        return PASS;
    };
    let Some(pod) = maps::PODS.get(u32::from(slot)) else {
        return PASS;
    };
    let Some((original, port)) = explain(pod.table, index, source) else {
        return PASS;
    };
    answer(base, original, port);
    PASS
}

/// The original address and port behind an index.
#[inline(always)]
fn explain(table: u16, index: u8, source: u32) -> Option<(Address, u16)> {
    let entry: &Destination = maps::DESTINATIONS.get(kernel::entry(table, index))?;
    let original = kernel::original(entry, source)?;
    Some((original, entry.port))
}

/// Fills the answer of `SO_ORIGINAL_DST`: a `sockaddr_in` or a `sockaddr_in6`. One that is too short stays as it is.
#[inline(always)]
fn answer(base: *mut bpf_sockopt, original: Address, port: u16) {
    // SAFETY: the context is valid, and the kernel loads the field.
    let value = unsafe { (*base).__bindgen_anon_2.optval }.cast::<u32>();
    // SAFETY: the context is valid, and the kernel loads the field.
    let end = unsafe { (*base).__bindgen_anon_3.optval_end } as usize;
    let port = u32::from(port) << 16;
    let [a, b, c, d] = original.0;
    let bytes = if original.ipv4().is_some() {
        if value as usize + size_of::<[u32; 4]>() > end {
            return;
        }
        // SAFETY: four words lie before the end.
        unsafe { fill(value, [AF_INET | port, d, 0, 0]) };
        size_of::<[u32; 4]>()
    } else {
        if value as usize + size_of::<[u32; 7]>() > end {
            return;
        }
        // SAFETY: seven words lie before the end.
        unsafe { fill(value, [AF_INET6 | port, 0, a, b, c, d, 0]) };
        size_of::<[u32; 7]>()
    };
    store!(bpf_sockopt, base, offset_of!(bpf_sockopt, optlen), bytes as u32);
    store!(bpf_sockopt, base, offset_of!(bpf_sockopt, retval), 0u32);
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

/// The address and port that the context names.
#[inline(always)]
fn named<const V6: bool>(ctx: &SockAddrContext) -> (Address, u16) {
    let base = ctx.sock_addr;
    let address = if V6 {
        Address(words!(bpf_sock_addr, base, user_ip6))
    } else {
        Address::mapped(word!(bpf_sock_addr, base, user_ip4))
    };
    (address, word!(bpf_sock_addr, base, user_port) as u16)
}

/// Makes the context name another address and port.
#[inline(always)]
fn write<const V6: bool>(ctx: &SockAddrContext, address: Address, port: u16) {
    let base = ctx.sock_addr;
    let [a, b, c, d] = address.0;
    if V6 {
        store!(bpf_sock_addr, base, offset_of!(bpf_sock_addr, user_ip6), a);
        store!(bpf_sock_addr, base, offset_of!(bpf_sock_addr, user_ip6) + 4, b);
        store!(bpf_sock_addr, base, offset_of!(bpf_sock_addr, user_ip6) + 8, c);
        store!(bpf_sock_addr, base, offset_of!(bpf_sock_addr, user_ip6) + 12, d);
    } else {
        store!(bpf_sock_addr, base, offset_of!(bpf_sock_addr, user_ip4), d);
    }
    store!(bpf_sock_addr, base, offset_of!(bpf_sock_addr, user_port), port);
}

/// The IPv4 address of a socket of either family; nonsense, but no encoded address, for native IPv6.
#[inline(always)]
fn ipv4_of(family: u32, ipv4: u32, ipv6: [u32; 4]) -> u32 {
    if family == AF_INET { ipv4 } else { Address(ipv6).ipv4().unwrap_or_default() }
}

/// Reports refusals and passes always, redirected connections now and then.
#[inline(always)]
fn report(outcome: Outcome, slot: u16, address: Address, port: u16) {
    // SAFETY: the helper has no arguments.
    let dice = unsafe { helpers::bpf_get_prandom_u32() };
    if matches!(outcome, Outcome::Redirected) && dice & (EVENT_SAMPLE - 1) != 0 {
        return;
    }
    let Some(mut event) = maps::EVENTS.reserve::<Event>(0) else {
        maps::count(Outcome::EventLost);
        return;
    };
    // SAFETY: the helper has no arguments.
    let cgroup = unsafe { helpers::bpf_get_current_cgroup_id() };
    // SAFETY: the helper has no arguments.
    let pid = (unsafe { helpers::bpf_get_current_pid_tgid() } >> 32) as u32;
    event.write(Event { cgroup, address, pid, outcome: outcome as u32, port, slot, reserved: 0 });
    event.submit(0);
}
