// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

//! Outcomes of a connection. Each is counted, under a name that users see.

/// Everything that can happen to a connection. Each is counted, per CPU.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Sent to the proxy.
    Redirected = 0,
    /// Not to a target: untouched.
    OtherTarget = 1,
    /// The proxy's own: untouched.
    OwnConnection = 2,
    /// Not TCP: untouched.
    OtherProtocol = 3,
    /// The programs are attached, but no table knows the caller's cgroup: refused.
    NotEnrolled = 4,
    /// Nothing listens: refused.
    NoListenerRefused = 5,
    /// Nothing listens: passed, because the pod fails open.
    NoListenerPassed = 6,
    /// The proxy has not beaten for too long: refused.
    NoHeartbeatRefused = 7,
    /// The proxy has not beaten for too long: passed, because the pod fails open.
    NoHeartbeatPassed = 8,
    /// The socket is bound already, so its source cannot carry the rest of the address: refused.
    BoundRefused = 9,
    /// The socket is bound already: passed, because the pod fails open.
    BoundPassed = 10,
    /// A webhook call given to the proxy.
    InboundTaken = 11,
    /// The proxy's own call to the real server: untouched.
    InboundOwn = 12,
    /// A webhook call, and no proxy listens, or it has not beaten for too long: refused.
    InboundRefused = 13,
    /// The same: passed, because the pod fails open.
    InboundPassed = 14,
    /// An event that did not fit into the ring buffer.
    EventLost = 15,
    /// The loader found a table full; counted by the loader, not per connection.
    TableFull = 16,
    /// An `IPV6_V6ONLY` socket, and our IPv6 prefix is not local in its namespace: refused.
    V6OnlyRefused = 17,
    /// An `IPV6_V6ONLY` socket, and our IPv6 prefix is not local: passed, because the pod fails open.
    V6OnlyPassed = 18,
    /// Decided already by another link, at a cgroup below or during an upgrade: left as it is.
    Decided = 19,
    /// The socket is bound to a device other than `lo`, by which the proxy is not reached: refused.
    DeviceRefused = 20,
    /// The socket is bound to a device other than `lo`: passed, because the pod fails open.
    DevicePassed = 21,
    /// `getpeername()` of a redirected connection, answered with the original address.
    PeerAnswered = 22,
    /// `getpeername()` of an address of ours that nothing explains: the answer stays.
    PeerUnknown = 23,
    /// `getpeername()` of another connection: the answer stays.
    PeerOther = 24,
    /// `SO_ORIGINAL_DST` of a redirected connection, answered with the original address.
    OriginalAnswered = 25,
    /// `SO_ORIGINAL_DST` of another connection, or with too little room: the kernel's answer stays.
    OriginalUnknown = 26,
    /// Another socket option: the kernel's answer stays.
    OptionOther = 27,
    /// A connection to an address and port that nobody took over: untouched.
    InboundOtherPort = 28,
    /// Arrives in a pod whose webhook calls are taken, and is not TCP: untouched.
    InboundOtherProtocol = 29,
    /// To a port at any address, and there is no room to remember where: refused.
    ConnectionsFullRefused = 30,
    /// The same: passed, because the pod fails open.
    ConnectionsFullPassed = 31,
}

impl Outcome {
    /// Every outcome, in the order of the counters.
    pub const ALL: [Self; 32] = [
        Self::Redirected,
        Self::OtherTarget,
        Self::OwnConnection,
        Self::OtherProtocol,
        Self::NotEnrolled,
        Self::NoListenerRefused,
        Self::NoListenerPassed,
        Self::NoHeartbeatRefused,
        Self::NoHeartbeatPassed,
        Self::BoundRefused,
        Self::BoundPassed,
        Self::InboundTaken,
        Self::InboundOwn,
        Self::InboundRefused,
        Self::InboundPassed,
        Self::EventLost,
        Self::TableFull,
        Self::V6OnlyRefused,
        Self::V6OnlyPassed,
        Self::Decided,
        Self::DeviceRefused,
        Self::DevicePassed,
        Self::PeerAnswered,
        Self::PeerUnknown,
        Self::PeerOther,
        Self::OriginalAnswered,
        Self::OriginalUnknown,
        Self::OptionOther,
        Self::InboundOtherPort,
        Self::InboundOtherProtocol,
        Self::ConnectionsFullRefused,
        Self::ConnectionsFullPassed,
    ];

    /// Name in the status and in the metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Redirected => "redirected",
            Self::OtherTarget => "other_target",
            Self::OwnConnection => "own_connection",
            Self::OtherProtocol => "other_protocol",
            Self::NotEnrolled => "not_enrolled",
            Self::NoListenerRefused => "no_listener_refused",
            Self::NoListenerPassed => "no_listener_passed",
            Self::NoHeartbeatRefused => "no_heartbeat_refused",
            Self::NoHeartbeatPassed => "no_heartbeat_passed",
            Self::BoundRefused => "bound_refused",
            Self::BoundPassed => "bound_passed",
            Self::InboundTaken => "inbound_taken",
            Self::InboundOwn => "inbound_own",
            Self::InboundRefused => "inbound_refused",
            Self::InboundPassed => "inbound_passed",
            Self::EventLost => "event_lost",
            Self::TableFull => "table_full",
            Self::V6OnlyRefused => "v6only_refused",
            Self::V6OnlyPassed => "v6only_passed",
            Self::Decided => "decided",
            Self::DeviceRefused => "device_refused",
            Self::DevicePassed => "device_passed",
            Self::PeerAnswered => "peer_answered",
            Self::PeerUnknown => "peer_unknown",
            Self::PeerOther => "peer_other",
            Self::OriginalAnswered => "original_answered",
            Self::OriginalUnknown => "original_unknown",
            Self::OptionOther => "option_other",
            Self::InboundOtherPort => "inbound_other_port",
            Self::InboundOtherProtocol => "inbound_other_protocol",
            Self::ConnectionsFullRefused => "connections_full_refused",
            Self::ConnectionsFullPassed => "connections_full_passed",
        }
    }

    /// Whether `connect()` fails with `ECONNREFUSED`.
    #[inline]
    pub const fn refuses(self) -> bool {
        matches!(
            self,
            Self::NotEnrolled
                | Self::NoListenerRefused
                | Self::NoHeartbeatRefused
                | Self::BoundRefused
                | Self::V6OnlyRefused
                | Self::DeviceRefused
                | Self::ConnectionsFullRefused
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_count_at_their_own_place_under_their_own_name() {
        for (at, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, at);
            assert_eq!(Outcome::ALL.iter().filter(|other| other.name() == outcome.name()).count(), 1);
        }
    }

    #[test]
    fn only_refusals_refuse() {
        for outcome in Outcome::ALL {
            let named = outcome.name().ends_with("refused") || outcome == Outcome::NotEnrolled;
            assert_eq!(outcome.refuses(), named && !outcome.name().starts_with("inbound"), "{}", outcome.name());
        }
    }
}
