//! What can happen to a connection? Each outcome is counted, under a name that users see.

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
    /// A webhook call, and no proxy listens: refused.
    InboundRefused = 13,
    /// A webhook call, and no proxy listens: passed, because the pod fails open.
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
}

impl Outcome {
    /// Every outcome, in the order of the counters.
    pub const ALL: [Self; 20] = [
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
            assert_eq!(
                Outcome::ALL.iter().filter(|other| other.name() == outcome.name()).count(),
                1
            );
        }
    }

    #[test]
    fn only_refusals_refuse() {
        for outcome in Outcome::ALL {
            let named = outcome.name().ends_with("refused") || outcome == Outcome::NotEnrolled;
            assert_eq!(
                outcome.refuses(),
                named && !outcome.name().starts_with("inbound"),
                "{}",
                outcome.name()
            );
        }
    }
}
