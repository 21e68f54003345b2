//! Sends an outbound connection to the proxy or to its target, or refuses it.

use core::mem::{offset_of, size_of};
use core::ptr;

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{BPF_F_CURRENT_NETNS, bpf_sock, bpf_sock_addr, bpf_sock_tuple};
use aya_ebpf::helpers::generated as helpers;
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::programs::SockAddrContext;
use ctrlmesh_common::kernel::{
    self, ANY_ADDRESS, Address, CHECK_LISTENER, CHECK_PORT, Code, EVENT_SAMPLE, Event, FAIL_OPEN, Member, NATIVE_IPV6,
    Outcome, Pod, REPORT, TargetKey, TargetMatch,
};

use crate::load::{pointer, store, word, words};
use crate::{connections, maps};

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
const IPPROTO_TCP: u32 = 6;
const ECONNREFUSED: i32 = 111;
/// Bytes of the part of the tuple that names an IPv4 connection.
const TUPLE_BYTES: u32 = 12;
/// Every bit of a negative 32-bit number, as the helper wants it.
const CURRENT_NETNS: u64 = (BPF_F_CURRENT_NETNS as i64).cast_unsigned();
/// 127.0.0.1 in network byte order.
const LOCALHOST: u32 = u32::from_ne_bytes([127, 0, 0, 1]);
/// `::1`.
const LOCALHOST_V6: Address = Address([0, 0, 0, 1u32.to_be()]);
/// `::`.
const UNSPECIFIED_V6: Address = Address([0; 4]);
/// Index of `lo` in every network namespace.
const LOOPBACK_DEVICE: u32 = 1;

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
    // SAFETY: the helper has no arguments.
    if unsafe { helpers::bpf_get_retval() } < 0 {
        return Outcome::Decided;
    }
    let Some(member) = maps::member() else {
        return Outcome::NotEnrolled;
    };
    if member.passes() {
        return Outcome::OwnConnection;
    }
    let Some(pod) = maps::PODS.get(u32::from(member.slot())) else {
        return Outcome::NotEnrolled;
    };
    if pod.port == 0 {
        return Outcome::NotEnrolled;
    }
    let (named, port) = named::<V6>(ctx);
    let meant = resolve::<V6>(ctx, named, port);
    let outcome = if let Some(address) = meant {
        let target = TargetKey { table: member.table(), port, address };
        let Some(&target) = maps::TARGETS.get(Key::new(kernel::prefix_bits(0), target)) else {
            return untouched(address);
        };
        // A port at any address is none at those that we send connections to.
        if target.host_bits == ANY_ADDRESS && kernel::is_reserved(address) {
            return untouched(address);
        }
        redirect::<V6>(ctx, member, pod, target, (address, port))
    } else {
        device_outcome(pod)
    };
    if pod.flags & REPORT != 0 {
        report(outcome, member.slot(), meant.unwrap_or(named), port);
    }
    outcome
}

/// Not a target any more where another link has sent it to the proxy already.
#[inline(always)]
fn untouched(address: Address) -> Outcome {
    if kernel::is_encoded(address) { Outcome::Decided } else { Outcome::OtherTarget }
}

/// The address that a connection to this one goes to, if anybody but the kernel can know it. Where it is not the one
/// that is named it is named then: what we look up is what the kernel connects to, whatever it would have made of it.
#[inline(always)]
fn resolve<const V6: bool>(ctx: &SockAddrContext, named: Address, port: u16) -> Option<Address> {
    if !unspecified(named) {
        return Some(named);
    }
    let local = local(ctx, named)?;
    write::<V6>(ctx, local, port);
    Some(local)
}

/// Whether the kernel chooses an address of this host itself, after us: 0.0.0.0 in either spelling, and ::.
#[inline(always)]
fn unspecified(address: Address) -> bool {
    address.ipv4() == Some(0) || address == UNSPECIFIED_V6
}

/// The address of this host that the kernel takes for an unspecified one: the socket's own where it is bound to one,
/// which for :: counts only by its family, else loopback. Where the socket is bound to another device than `lo` it is
/// the first one of that device, which no program can see.
#[inline(always)]
fn local(ctx: &SockAddrContext, address: Address) -> Option<Address> {
    let socket = pointer!(ctx.sock_addr, __bindgen_anon_1.sk);
    if socket.is_null() {
        return None;
    }
    if address == UNSPECIFIED_V6 {
        let mapped = Address(words!(bpf_sock, socket, src_ip6)).ipv4().is_some();
        return Some(if mapped { Address::mapped(LOCALHOST) } else { LOCALHOST_V6 });
    }
    match word!(bpf_sock, socket, src_ip4) {
        0 if elsewhere(socket) => None,
        0 => Some(Address::mapped(LOCALHOST)),
        source => Some(Address::mapped(source)),
    }
}

/// Whether the socket is bound to a device by which nothing of the loopback gets anywhere.
#[inline(always)]
fn elsewhere(socket: *mut bpf_sock) -> bool {
    let device = word!(bpf_sock, socket, bound_dev_if);
    device != 0 && device != LOOPBACK_DEVICE
}

#[inline(always)]
fn device_outcome(pod: &Pod) -> Outcome {
    if pod.flags & FAIL_OPEN != 0 { Outcome::DevicePassed } else { Outcome::DeviceRefused }
}

#[inline(always)]
fn redirect<const V6: bool>(
    ctx: &SockAddrContext,
    member: Member,
    pod: &Pod,
    target: TargetMatch,
    (address, port): (Address, u16),
) -> Outcome {
    let open = pod.flags & FAIL_OPEN != 0;
    let socket = pointer!(ctx.sock_addr, __bindgen_anon_1.sk);
    if socket.is_null() || elsewhere(socket) {
        return device_outcome(pod);
    }
    if !maps::beats(pod) {
        return if open { Outcome::NoHeartbeatPassed } else { Outcome::NoHeartbeatRefused };
    }
    if !listens(ctx, member.slot(), pod) {
        return if open { Outcome::NoListenerPassed } else { Outcome::NoListenerRefused };
    }
    let (generation, slot) = (member.generation(), member.slot());
    let any = target.host_bits == ANY_ADDRESS;
    let code = Code { generation, slot, index: target.index };
    let native = V6 && address.ipv4().is_none();
    let ours = native && pod.flags & NATIVE_IPV6 != 0;
    if native && !ours && v6only(ctx, socket) {
        return if open { Outcome::V6OnlyPassed } else { Outcome::V6OnlyRefused };
    }
    // Before it is stored: a socket that cannot carry the number leaves nothing behind.
    if any && !ours && !source::<V6>(ctx, LOCALHOST) {
        return if open { Outcome::BoundPassed } else { Outcome::BoundRefused };
    }
    let host = if any {
        let Some(number) = connections::store(ctx, slot, address, port) else {
            if open && (ours || unbind::<V6>(ctx)) {
                return Outcome::ConnectionsFullPassed;
            }
            return Outcome::ConnectionsFullRefused;
        };
        number
    } else {
        address.host(target.host_bits)
    };
    if ours {
        write::<V6>(ctx, code.ipv6(host), pod.port);
        return Outcome::Redirected;
    }
    if target.host_bits != 0 && !source::<V6>(ctx, kernel::encode_host(host)) {
        return if open { Outcome::BoundPassed } else { Outcome::BoundRefused };
    }
    write::<V6>(ctx, Address::mapped(code.ipv4()), pod.port);
    Outcome::Redirected
}

/// Whether the socket cannot reach the proxy over IPv4. The kernel shows no program the option itself, but lets no such
/// socket have an IPv4 source. A socket that is bound to a port cannot be asked: the kernel ends its `connect()` with
/// `ENETUNREACH` if it is for IPv6 only.
#[inline(always)]
fn v6only(ctx: &SockAddrContext, socket: *mut bpf_sock) -> bool {
    word!(bpf_sock, socket, src_port) == 0 && !source::<true>(ctx, LOCALHOST)
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
        let socket = unsafe { helpers::bpf_sk_lookup_tcp(ctx.as_ptr(), &raw mut tuple, TUPLE_BYTES, CURRENT_NETNS, 0) };
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

/// Gives the socket this IPv4 source, which can carry the open bits of a prefix. Fails if it is bound to a port
/// already.
#[inline(always)]
fn source<const V6: bool>(ctx: &SockAddrContext, source: u32) -> bool {
    let base = ctx.sock_addr;
    // A `sockaddr_in6` or a `sockaddr_in`, with port 0: the kernel chooses one when it connects.
    if V6 {
        let [a, b, c, d] = Address::mapped(source).0;
        return bind(base, [AF_INET6, 0, a, b, c, d, 0]);
    }
    bind(base, [AF_INET, source, 0, 0])
}

/// Takes the source away again that [`source`] gave.
#[inline(always)]
fn unbind<const V6: bool>(ctx: &SockAddrContext) -> bool {
    let base = ctx.sock_addr;
    if V6 {
        return bind(base, [AF_INET6, 0, 0, 0, 0, 0, 0]);
    }
    bind(base, [AF_INET, 0, 0, 0])
}

#[inline(always)]
fn bind<const N: usize>(base: *mut bpf_sock_addr, mut name: [u32; N]) -> bool {
    let bytes = const { (size_of::<[u32; N]>() as u32).cast_signed() };
    // SAFETY: the address is as long as said.
    unsafe { helpers::bpf_bind(base, name.as_mut_ptr().cast(), bytes) == 0 }
}

/// The address and port that the context names.
#[inline(always)]
pub(crate) fn named<const V6: bool>(ctx: &SockAddrContext) -> (Address, u16) {
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
pub(crate) fn write<const V6: bool>(ctx: &SockAddrContext, address: Address, port: u16) {
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
