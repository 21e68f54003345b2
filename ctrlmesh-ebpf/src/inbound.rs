//! Gives an inbound connection to the proxy or to the server that listens.

use aya_ebpf::bindings::{bpf_sk_lookup, sk_action};
use aya_ebpf::programs::SkLookupContext;
use ctrlmesh_common::kernel::{Address, FAIL_OPEN, InboundKey, Outcome};

use crate::load::{word, words};
use crate::maps;

const AF_INET: u32 = 2;
const IPPROTO_TCP: u32 = 6;
/// A socket was chosen already.
const EEXIST: i32 = -17;
/// The first byte of an IPv4 loopback address, as it lies in memory.
const LOOPBACK_MASK: u32 = u32::from_ne_bytes([255, 0, 0, 0]);
const LOOPBACK: u32 = u32::from_ne_bytes([127, 0, 0, 0]);
const LOOPBACK_V6: [u32; 4] = [0, 0, 0, 1u32.to_be()];

/// Decides about one connection, and counts it.
#[inline(always)]
pub(crate) fn take(ctx: &SkLookupContext) -> u32 {
    let outcome = decide(ctx);
    maps::count(outcome);
    if matches!(outcome, Outcome::InboundRefused) { sk_action::SK_DROP } else { sk_action::SK_PASS }
}

/// Gives the connection to the proxy if its port is taken over and it is not the proxy's own.
///
/// The proxy reaches the real server from a loopback source, which nobody outside can send.
#[inline(always)]
fn decide(ctx: &SkLookupContext) -> Outcome {
    let base = ctx.lookup;
    if word!(bpf_sk_lookup, base, protocol) != IPPROTO_TCP {
        return Outcome::InboundOtherProtocol;
    }
    let port = word!(bpf_sk_lookup, base, local_port);
    let (address, own) = if word!(bpf_sk_lookup, base, family) == AF_INET {
        let remote = word!(bpf_sk_lookup, base, remote_ip4);
        (Address::mapped(word!(bpf_sk_lookup, base, local_ip4)), remote & LOOPBACK_MASK == LOOPBACK)
    } else {
        (Address(words!(bpf_sk_lookup, base, local_ip6)), words!(bpf_sk_lookup, base, remote_ip6) == LOOPBACK_V6)
    };
    let Some(inbound) = maps::inbound(&InboundKey { address, port }) else {
        return Outcome::InboundOtherPort;
    };
    if own {
        return Outcome::InboundOwn;
    }
    // An entry goes before its slot is anybody else's.
    let Some(pod) = maps::PODS.get(u32::from(inbound.slot())) else {
        return Outcome::InboundRefused;
    };
    if maps::beats(pod) {
        match maps::INBOUND_LISTENERS.redirect_sk_lookup(ctx, inbound.listener(), 0) {
            Ok(()) => return Outcome::InboundTaken,
            // Another program has chosen a socket: ours, while it is replaced, or somebody's who came first.
            Err(EEXIST) => return Outcome::Decided,
            Err(_) => {}
        }
    }
    if pod.flags & FAIL_OPEN != 0 { Outcome::InboundPassed } else { Outcome::InboundRefused }
}
