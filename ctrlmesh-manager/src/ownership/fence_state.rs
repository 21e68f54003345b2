//! What the fence of each root has been shown to enforce.
//!
//! The prober of the leader writes it. Ownership moves by it, and the condition `Fenced` of a root says it.

use std::collections::BTreeMap;
use std::sync::Arc;

use ctrlmesh_common::handover::Server;
use tokio::sync::watch;

/// What is known of the fence of one root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FenceState {
    /// Every endpoint of the API server refuses by this policy, and by a table that is no older than `epoch`.
    Enforced(Proof),
    /// Not so, or not known.
    Open(Unfenced),
}

/// What all endpoints of the API server have shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Of the policy. It ends with a dot and the UID of the root.
    pub revision: String,
    /// The least over all endpoints.
    pub epoch: u64,
    /// How many endpoints there are. Several servers behind one address count as one.
    pub endpoints: usize,
}

impl Proof {
    fn is_of(&self, uid: &str) -> bool {
        self.revision.rsplit('.').next() == Some(uid)
    }
}

/// Why the API server does not fence a root, or is not known to do so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfenced {
    /// The API server has no `ValidatingAdmissionPolicy`: it is older than Kubernetes 1.30, or the API is switched off.
    Unsupported,
    /// The policy is not written.
    NotWritten { why: String },
    /// Not every endpoint has shown that it enforces the policy.
    NotProved { why: String },
    /// The root is being deleted and has handed everything back, and its policy is gone.
    Removed,
}

/// By `NAMESPACE/NAME` of the root. A root whose fence is not `Server` is missing. Empty where another replica leads.
pub type States = BTreeMap<String, FenceState>;

/// Follows what the prober knows.
pub type FenceStates = watch::Receiver<Arc<States>>;

impl FenceState {
    /// Whether the API server could fence, and is not known to do so.
    pub fn is_missing(&self) -> bool {
        !matches!(self, Self::Enforced(_) | Self::Open(Unfenced::Unsupported))
    }

    /// The epoch that every endpoint of the API server enforces at least for the root with this UID; none where that is
    /// not proved. A former root of the same name had epochs of its own.
    pub fn enforced_epoch(&self, uid: &str) -> Option<u64> {
        match self {
            Self::Enforced(proof) => proof.is_of(uid).then_some(proof.epoch),
            Self::Open(_) => None,
        }
    }
}

/// The epoch that every endpoint of the API server enforces at least for `root`, which has this UID; none where that is
/// not proved.
pub fn enforced_epoch(states: &States, root: &str, uid: &str) -> Option<u64> {
    states.get(root)?.enforced_epoch(uid)
}

/// How far the fence of `root`, which has this UID, is proved, for a move of ownership. Where nothing is known of it,
/// it is not proved: then no move is granted.
pub fn server(states: &States, root: &str, uid: &str) -> Server {
    match states.get(root) {
        Some(FenceState::Open(Unfenced::Unsupported | Unfenced::Removed)) => Server::None,
        state => Server::Enforces(state.and_then(|state| state.enforced_epoch(uid)).unwrap_or_default()),
    }
}

/// Whether it is known that the API server has no fence for `root`.
pub fn is_gone(states: &States, root: &str) -> bool {
    matches!(states.get(root), Some(FenceState::Open(Unfenced::Unsupported | Unfenced::Removed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_every_endpoint_has_shown_is_enforced() {
        let proof = Proof { revision: "r.u".to_owned(), epoch: 7, endpoints: 2 };
        let open = Unfenced::NotProved { why: "one is silent".to_owned() };
        let states = States::from([
            ("ns/a".to_owned(), FenceState::Enforced(proof)),
            ("ns/b".to_owned(), FenceState::Open(open)),
        ]);
        assert_eq!(enforced_epoch(&states, "ns/a", "u"), Some(7));
        assert_eq!(enforced_epoch(&states, "ns/a", "later"), None, "another root of this name");
        assert_eq!(enforced_epoch(&states, "ns/b", "u"), None);
        assert_eq!(enforced_epoch(&states, "ns/c", "u"), None, "it has no fence");
    }

    #[test]
    fn a_move_waits_where_nothing_is_known_of_the_fence() {
        let open = |why| FenceState::Open(why);
        let proof = Proof { revision: "r.u".to_owned(), epoch: 7, endpoints: 2 };
        let not_proved = open(Unfenced::NotProved { why: "one is silent".to_owned() });
        for (state, expected, gone) in [
            (None, Server::Enforces(0), false),
            (Some(not_proved), Server::Enforces(0), false),
            (Some(FenceState::Enforced(proof)), Server::Enforces(7), false),
            (Some(open(Unfenced::Unsupported)), Server::None, true),
            (Some(open(Unfenced::Removed)), Server::None, true),
        ] {
            let states: States = state.into_iter().map(|state| ("ns/a".to_owned(), state)).collect();
            assert_ne!(server(&states, "ns/a", "later"), Server::Enforces(7));
            assert_eq!((server(&states, "ns/a", "u"), is_gone(&states, "ns/a")), (expected, gone), "{states:?}");
        }
    }
}
