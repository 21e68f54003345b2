//! Why a proxy cannot apply a policy.

use super::MAX_SELECTOR_BYTES;
use super::egress::EgressError;
use super::fault::FaultError;
use super::guard::GuardError;
use super::members::MembersError;
use crate::resource::ResourceMatchError;

/// A policy that no proxy can apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// A resource match that cannot be matched against.
    #[error("limits[{limit}].relateResources[{at}]")]
    Resources {
        /// Which limit.
        limit: usize,
        /// Which of its resource matches.
        at: usize,
        /// What is wrong with it.
        source: ResourceMatchError,
    },
    /// A resource match of the fence that cannot be matched against.
    #[error("fence.resources[{at}]")]
    FencedResources {
        /// Which of its resource matches.
        at: usize,
        /// What is wrong with it.
        source: ResourceMatchError,
    },
    /// What limits some resource does not fit into a request.
    #[error(
        "limits[{limit}].selector: takes {bytes} bytes in a URL, together with what else limits the same resources; at most {MAX_SELECTOR_BYTES} have room there"
    )]
    SelectorTooLong {
        /// Which limit.
        limit: usize,
        /// How many bytes.
        bytes: usize,
    },
    /// Members that cannot be told apart.
    #[error("members")]
    Members {
        /// What is wrong with them.
        source: MembersError,
    },
    /// A guard that cannot be applied.
    #[error("guards[{at}]")]
    Guard {
        /// Which guard.
        at: usize,
        /// What is wrong with it.
        source: GuardError,
    },
    /// A fault that cannot be done.
    #[error("faults[{at}]")]
    Fault {
        /// Which fault.
        at: usize,
        /// What is wrong with it.
        source: FaultError,
    },
    /// Egress rules that cannot be applied.
    #[error("egress")]
    Egress {
        /// What is wrong with them.
        source: EgressError,
    },
    /// A part of the lock is empty or holds what no name may hold.
    #[error(
        "lock.{field}: {value:?} is no name: allowed are 1 to 253 of a-z 0-9 - . with an alphanumeric at both ends"
    )]
    LockName {
        /// `namespace`, `name` or `shard`.
        field: &'static str,
        /// What was given.
        value: String,
    },
    /// The name that the server would see is longer than a name may be.
    #[error("lock: the name {name:?} is longer than the 253 bytes a name may have")]
    LockTooLong {
        /// The lock's name on the server.
        name: String,
    },
}
