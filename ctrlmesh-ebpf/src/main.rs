//! The programs that run in the kernel.
//!
//! Outbound: `connect4` and `connect6` send connections to the targets of an enrolled cgroup to its proxy, by writing
//! an address that says which pod and which target it was. `getpeername4`, `getpeername6` and `getsockopt` answer with
//! the original address; `sock_release` notes that such a connection is over. Inbound: `inbound` gives a webhook's
//! connections to the proxy.
//!
//! What happens on an error is said at each entry point, and every outcome is counted.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod connections;
mod inbound;
mod load;
mod maps;
mod original;
mod redirect;

use aya_ebpf::macros::{cgroup_sock, cgroup_sock_addr, cgroup_sockopt, sk_lookup};
use aya_ebpf::programs::{SkLookupContext, SockAddrContext, SockContext, SockoptContext};

/// `connect()` of an IPv4 socket. Where the proxy cannot take the connection the pod's flag decides; a caller that no
/// table knows is refused.
#[cgroup_sock_addr(connect4)]
fn connect4(ctx: SockAddrContext) -> i32 {
    redirect::connect::<false>(&ctx)
}

/// `connect()` of an IPv6 socket, to IPv4-mapped addresses too. Fails as `connect4` does. Where our prefix is not local
/// the proxy is reached over IPv4, which a socket with `IPV6_V6ONLY` cannot: it fails as if nothing listened.
#[cgroup_sock_addr(connect6)]
fn connect6(ctx: SockAddrContext) -> i32 {
    redirect::connect::<true>(&ctx)
}

/// `getpeername()` of an IPv4 socket. Where the original is not known the answer stays as it is.
#[cgroup_sock_addr(getpeername4)]
fn getpeername4(ctx: SockAddrContext) -> i32 {
    original::peer::<false>(&ctx)
}

/// `getpeername()` of an IPv6 socket. Where the original is not known the answer stays as it is.
#[cgroup_sock_addr(getpeername6)]
fn getpeername6(ctx: SockAddrContext) -> i32 {
    original::peer::<true>(&ctx)
}

/// The end of a socket. Nothing can fail: a connection that is not stored is none to a port at any address.
#[cgroup_sock(sock_release)]
fn sock_release(ctx: SockContext) -> i32 {
    connections::release(&ctx)
}

/// `getsockopt(SO_ORIGINAL_DST)` of a connection that the proxy accepted. Where the original is not known the kernel's
/// own answer stays.
#[cgroup_sockopt(getsockopt)]
fn getsockopt(ctx: SockoptContext) -> i32 {
    original::original_destination(&ctx)
}

/// A connection that arrives in a pod's network namespace. Where no proxy listens the port's flag decides.
#[sk_lookup]
fn inbound(ctx: SkLookupContext) -> u32 {
    inbound::take(&ctx)
}

/// Never reached: the verifier would refuse a program that can loop.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// `bpf_bind`, `bpf_sk_lookup_tcp` and others are for GPL-compatible programs.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";
