//! What do the manager and the proxies say to each other?
//!
//! Messages of gRPC (protobuf), kept by hand: a field keeps its number for ever, and one that has gone leaves its number
//! unused. The version is in the service's name; what an older peer does not know it passes over. A policy travels as
//! the JSON that it is everywhere else, and is refused by a proxy that does not understand all of it.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Oneof;

/// The call of a proxy that wants to be told policies: [`Report`]s go up, [`Update`]s come down.
pub const FOLLOW: &str = "/ctrlmesh.v1.Mesh/Follow";

/// The call of a proxy that wants a certificate: one [`SignRequest`], one [`Signed`].
pub const SIGN: &str = "/ctrlmesh.v1.Mesh/Sign";

/// The call of a replica that tells the leader what its proxies said: [`Receipts`] go up, one [`Relayed`] comes down.
pub const RELAY: &str = "/ctrlmesh.v1.Mesh/Relay";

/// The call of a replica that is asked about a pod of a Deployment, and asks the leader for its shard: one [`Seat`], one
/// [`Seated`].
pub const SEAT: &str = "/ctrlmesh.v1.Mesh/Seat";

/// Metadata of [`FOLLOW`] in which a proxy shows the last [`Update::voucher`].
pub const VOUCHER: &str = "ctrlmesh-voucher-bin";

/// Longest voucher that is shown, in bytes: one for the longest names that there are.
pub const MAX_VOUCHER_BYTES: usize = 2048;

/// Largest message that goes up, in bytes: a [`Hello`] with [`MAX_KNOWN`] pods of the longest names there are.
pub const MAX_REPORT_BYTES: usize = 1024 * 1024;

/// Pods that a [`Hello`] may know: more than a node has. What it does not say it is told again.
pub const MAX_KNOWN: usize = 1024;

/// Largest message that comes down, in bytes: one that is nearly full, and one more policy.
pub const MAX_UPDATE_BYTES: usize = 4 * 1024 * 1024;

/// Largest policy, in bytes of its JSON.
pub const MAX_POLICY_BYTES: usize = 2 * 1024 * 1024;

/// Longest reason for a refusal that is sent, in bytes.
pub const MAX_REASON_BYTES: usize = 1024;

/// One incarnation of a pod.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Message)]
pub struct PodId {
    /// Its namespace.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// Its name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Its UID; a proxy that does not know it leaves it empty.
    #[prost(string, tag = "3")]
    pub uid: String,
}

/// From a proxy.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Report {
    /// What it says.
    #[prost(oneof = "Said", tags = "1, 2")]
    pub said: Option<Said>,
}

/// What a proxy says.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum Said {
    /// Whom it serves; comes first, and once.
    #[prost(message, tag = "1")]
    Hello(Hello),
    /// What it did with a policy.
    #[prost(message, tag = "2")]
    Verdict(Verdict),
}

/// Whom a proxy serves: a node or a pod.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Hello {
    /// The node whose pods it serves; empty where it serves one pod.
    #[prost(string, tag = "1")]
    pub node: String,
    /// The pod that it serves.
    #[prost(message, optional, tag = "2")]
    pub pod: Option<PodId>,
    /// The proxy's version, for people.
    #[prost(string, tag = "3")]
    pub version: String,
    /// What it has already, and need not be told again.
    #[prost(message, repeated, tag = "4")]
    pub known: Vec<Known>,
}

/// A policy that a proxy has.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Known {
    /// Whose it is.
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodId>,
    /// Its [`digest`].
    #[prost(fixed64, tag = "2")]
    pub digest: u64,
    /// Its epoch.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// The [`Entry::operator`] that came with it.
    #[prost(string, tag = "4")]
    pub operator: String,
    /// The [`Entry::version`] that came with it.
    #[prost(uint64, tag = "5")]
    pub version: u64,
}

/// What a proxy did with a policy.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Verdict {
    /// Whose policy.
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodId>,
    /// Its [`digest`].
    #[prost(fixed64, tag = "2")]
    pub digest: u64,
    /// The epoch that is in force now: the policy's, or, where it was refused, that of the last good one.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// Why it was refused; empty where it is in force.
    #[prost(string, tag = "4")]
    pub refused: String,
}

/// To a proxy: what has changed since the last one. The first one says everything that the proxy does not know.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Update {
    /// Policies, each to be answered with a [`Verdict`].
    #[prost(message, repeated, tag = "1")]
    pub policies: Vec<Entry>,
    /// Pods of which the proxy is told nothing any more.
    #[prost(message, repeated, tag = "2")]
    pub gone: Vec<PodId>,
    /// Whether what the proxy does not know yet goes on in the next one.
    #[prost(bool, tag = "3")]
    pub more: bool,
    /// What the proxy may show, beside the same token, when it comes back soon: its token need not be reviewed for that.
    /// It is for managers to read. Empty where it stays the one before.
    #[prost(bytes = "bytes", tag = "4")]
    pub voucher: Bytes,
    /// Where the API server is, as `ADDRESS:PORT`, IPv6 in brackets: what its pods dial there a node redirects, too. All of
    /// it; empty where it stays what it was, and to proxies inside pods.
    #[prost(string, repeated, tag = "5")]
    pub servers: Vec<String>,
}

/// One pod's policy.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Entry {
    /// Whose it is.
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodId>,
    /// Its [`digest`].
    #[prost(fixed64, tag = "2")]
    pub digest: u64,
    /// The policy, in JSON.
    #[prost(bytes = "bytes", tag = "3")]
    pub policy: Bytes,
    /// The ShardingConfig that says which epoch it is, as `NAMESPACE/NAME`; empty where none speaks of the pod.
    #[prost(string, tag = "4")]
    pub operator: String,
    /// Its resourceVersion: of two policies from one ShardingConfig the greater is newer. 0 where it is not known.
    #[prost(uint64, tag = "5")]
    pub version: u64,
}

/// A request for a certificate.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SignRequest {
    /// A certificate signing request (PKCS #10) in DER: key and names count, whatever else it asks for does not.
    #[prost(bytes = "bytes", tag = "1")]
    pub request: Bytes,
}

/// A certificate.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Signed {
    /// The chain in DER, leaf first.
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub chain: Vec<Bytes>,
}

/// What the proxies of one replica said, to the leader.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Receipts {
    /// What has changed since the last message.
    #[prost(message, repeated, tag = "1")]
    pub receipts: Vec<Receipt>,
}

/// What one pod's proxy said last.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Receipt {
    /// Whose policy.
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodId>,
    /// The epoch in force.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Why the newest policy was refused; empty where it is in force.
    #[prost(string, tag = "3")]
    pub refused: String,
    /// Whether the proxy is connected.
    #[prost(bool, tag = "4")]
    pub connected: bool,
    /// When it was last heard of, in milliseconds since 1970.
    #[prost(uint64, tag = "5")]
    pub last_contact: u64,
    /// The [`digest`] of the policy that it speaks of.
    #[prost(fixed64, tag = "6")]
    pub digest: u64,
}

/// The answer to [`Receipts`], at the end.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Relayed {}

/// A pod of a Deployment that is being made, has no name yet, and is to have a shard.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Seat {
    /// Its namespace.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// Its labels.
    #[prost(btree_map = "string, string", tag = "2")]
    pub labels: BTreeMap<String, String>,
    /// The name of the `ReplicaSet` that makes it.
    #[prost(string, tag = "3")]
    pub replica_set: String,
}

/// The shard that a pod was given.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Seated {
    /// The name of its ShardingConfig, which is the pod's; empty where there is not exactly one for it.
    #[prost(string, tag = "1")]
    pub shard: String,
}

/// Tells one text from another: FNV-1a of 64 bits. It finds what changed or broke, not what somebody forged.
pub fn digest(text: &[u8]) -> u64 {
    text.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    #[test]
    fn a_message_is_read_by_its_numbers() {
        let report = Report {
            said: Some(Said::Verdict(Verdict {
                pod: Some(PodId { namespace: "n".into(), name: "p".into(), uid: "u".into() }),
                digest: 1,
                epoch: 3,
                refused: String::new(),
            })),
        };
        let bytes = report.encode_to_vec();
        let expected = [
            0x12, 22, 0x0a, 9, 0x0a, 1, b'n', 0x12, 1, b'p', 0x1a, 1, b'u', 0x11, 1, 0, 0, 0, 0, 0,
            0, 0, 0x18, 3,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(Report::decode(&expected[..]).unwrap(), report);
    }

    #[test]
    fn what_a_newer_peer_says_beside_is_passed_over() {
        let newer = [0x78, 1, 0x0a, 1, b'n'];
        let read = PodId::decode(&newer[..]).unwrap();
        assert_eq!(read.namespace, "n");
    }

    #[test]
    fn the_digest_is_fnv() {
        assert_eq!(digest(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(digest(b"a"), 0xaf63_dc4c_8601_ec8c);
    }
}
