//! The maps of the programs, with their writers and byte orders.
//!
//! All keys and values are `ctrlmesh_common::kernel`'s. Addresses and ports are in network byte order unless said
//! otherwise. Of maps on the path of a connection only counters, events and `CONNECTIONS` are written.

use core::arch::asm;
use core::ptr;

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::helpers;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, LpmTrie, PerCpuArray, RingBuf, SockMap};
use ctrlmesh_common::kernel::{
    CHECK_HEARTBEAT, Connection, Destination, EVENTS_BYTES, Inbound, InboundKey, MAX_CGROUP_DEPTH, MAX_CGROUPS,
    MAX_CONNECTIONS, MAX_INBOUND, MAX_PODS, MAX_TABLES, MAX_TARGETS, Member, Outcome, Pod, TABLE_ENTRIES, Table,
    TargetKey, TargetMatch,
};

/// How often an entry is looked up that is given to another key meanwhile. Then it counts as absent.
const ATTEMPTS: u32 = 2;

/// Cgroup id → pod. Written by the loader before it attaches and after it detached.
#[map]
pub(crate) static MEMBERS: HashMap<u64, Member> = HashMap::with_max_entries(MAX_CGROUPS, 0);

/// Slot → pod. Written by the loader.
#[map]
pub(crate) static PODS: Array<Pod> = Array::with_max_entries(MAX_PODS, 0);

/// Table, port and address → index. Written by the loader.
#[map]
pub(crate) static TARGETS: LpmTrie<TargetKey, TargetMatch> = LpmTrie::with_max_entries(MAX_TARGETS, BPF_F_NO_PREALLOC);

/// Table and index → original address. Written by the loader; an entry outlives its target, for older connections.
#[map]
pub(crate) static DESTINATIONS: Array<Destination> = Array::with_max_entries(MAX_TABLES * TABLE_ENTRIES, 0);

/// Table → its name. Written and read by the loader only: it lies here so that the next loader finds it.
#[map]
pub(crate) static TABLES: Array<Table> = Array::with_max_entries(MAX_TABLES, 0);

/// Slot → the proxy's listening socket. Set by the proxy's process; an entry vanishes with its socket.
#[map]
pub(crate) static LISTENERS: SockMap = SockMap::with_max_entries(MAX_PODS, 0);

/// Number of a proxy → nanoseconds of the monotonic clock at its last beat. Written by the proxy.
#[map]
pub(crate) static HEARTBEATS: Array<u64> = Array::with_max_entries(MAX_PODS, 0);

/// A pod's address and port (host byte order) → who takes the connection. Written by the loader.
#[map]
pub(crate) static INBOUND: HashMap<InboundKey, Inbound> = HashMap::with_max_entries(MAX_INBOUND, BPF_F_NO_PREALLOC);

/// Twice the slot, plus one for IPv6 → the proxy's socket for inbound connections. Set by the proxy's process; vanishes
/// with its socket.
#[map]
pub(crate) static INBOUND_LISTENERS: SockMap = SockMap::with_max_entries(2 * MAX_PODS, 0);

/// Number → where a connection to a port at any address was meant to go. Written by `connect`, marked when the client's
/// socket closes, and removed by the loader some time after that.
#[map]
pub(crate) static CONNECTIONS: HashMap<u32, Connection> = HashMap::with_max_entries(MAX_CONNECTIONS, BPF_F_NO_PREALLOC);

/// Outcome → how often, per CPU.
#[map]
pub(crate) static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(32, 0);

/// Events of pods that ask for them.
#[map]
pub(crate) static EVENTS: RingBuf = RingBuf::with_byte_size(EVENTS_BYTES, 0);

/// Counts one outcome. At once, because a program may be interrupted by another one of the same CPU; in assembly,
/// because the compiler has no read-modify-write for this target.
#[inline(always)]
pub(crate) fn count(outcome: Outcome) {
    if let Some(counter) = COUNTERS.get_ptr_mut(outcome as u32) {
        // SAFETY: the kernel gave a valid pointer to this CPU's own counter, which has 8 aligned bytes.
        unsafe {
            asm!(
                "lock *(u64 *)({0} + 0) += {1}",
                in(reg) counter,
                in(reg) 1u64,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// The caller's entry: of its own cgroup, or of the nearest enrolled one above it.
#[inline(always)]
pub(crate) fn member() -> Option<Member> {
    // SAFETY: the helper has no arguments.
    let own = unsafe { helpers::generated::bpf_get_current_cgroup_id() };
    if let Some(member) = lookup(own) {
        return Some(member);
    }
    let mut nearest = None;
    let mut level = 1;
    while level <= MAX_CGROUP_DEPTH {
        // SAFETY: the helper takes any number.
        let id = unsafe { helpers::generated::bpf_get_current_ancestor_cgroup_id(level) };
        if id == 0 {
            break;
        }
        if let Some(member) = lookup(id) {
            nearest = Some(member);
        }
        level += 1;
    }
    nearest
}

#[inline(always)]
fn lookup(cgroup: u64) -> Option<Member> {
    let mut attempt = 0;
    while attempt < ATTEMPTS {
        let word = MEMBERS.get_ptr(cgroup)?.cast::<u64>();
        // SAFETY: the kernel gave a pointer to 8 aligned bytes that stay the map's for as long as a program runs. The
        // loader may give them to another cgroup meanwhile, which is why they are loaded at once, and checked.
        let member = Member::of_word(unsafe { ptr::read_volatile(word) });
        if member.is_of(cgroup) {
            return Some(member);
        }
        attempt += 1;
    }
    None
}

/// Whether the proxy's last beat is young enough, where the pod wants to know.
#[inline(always)]
pub(crate) fn beats(pod: &Pod) -> bool {
    if pod.flags & CHECK_HEARTBEAT == 0 {
        return true;
    }
    let Some(beat) = HEARTBEATS.get_ptr(pod.heartbeat) else {
        return false;
    };
    // SAFETY: the kernel gave a valid pointer; another process may write at the same time.
    let beat = unsafe { ptr::read_volatile(beat) };
    // SAFETY: the helper has no arguments.
    let now = unsafe { helpers::generated::bpf_ktime_get_coarse_ns() };
    // Zero is a proxy that never beat. The coarse clock may lag behind the beat.
    beat != 0 && (now < beat || now - beat < pod.max_age_ns)
}

/// Who takes connections to an address and port.
#[inline(always)]
pub(crate) fn inbound(key: &InboundKey) -> Option<Inbound> {
    let mut attempt = 0;
    while attempt < ATTEMPTS {
        let word = INBOUND.get_ptr(key)?.cast::<u64>();
        // SAFETY: as for members.
        let inbound = Inbound::of_word(unsafe { ptr::read_volatile(word) });
        if inbound.is_of(key) {
            return Some(inbound);
        }
        attempt += 1;
    }
    None
}
