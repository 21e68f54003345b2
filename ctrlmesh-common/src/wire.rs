//! The messages between manager and proxies, generated from `proto/mesh.proto`.

mod message {
    include!(concat!(env!("OUT_DIR"), "/ctrlmesh.v1.rs"));
}

use crate::pod_name::PodName;
use crate::slots::fnv1a;

pub use crate::policy::FIRST_WRITE_BOUNDS;
pub use message::report::Content;
pub use message::*;

/// The call of a proxy that wants policies: [`Report`]s go up, [`Update`]s come down.
pub const FOLLOW: &str = "/ctrlmesh.v1.Mesh/Follow";

/// The call of a proxy that wants a certificate: one [`SignRequest`], one [`Signed`].
pub const SIGN: &str = "/ctrlmesh.v1.Mesh/Sign";

/// The call of a proxy with policies that lapse: one [`RenewRequest`], one [`Renewed`]. A replica that does not lead
/// asks the leader by the same call.
pub const RENEW: &str = "/ctrlmesh.v1.Mesh/Renew";

/// The call of a replica that relays its proxies' receipts to the leader: [`Receipts`] go up, one [`Relayed`] comes
/// down.
pub const RELAY: &str = "/ctrlmesh.v1.Mesh/Relay";

/// The call of a replica that asks the leader for the shard of a pod: one [`ShardRequest`], one [`ShardReply`].
pub const ASSIGN_SHARD: &str = "/ctrlmesh.v1.Mesh/AssignShard";

/// Metadata of [`FOLLOW`] and [`RENEW`] in which a proxy shows the last [`Update::ticket`].
pub const REVIEW_TICKET: &str = "ctrlmesh-review-ticket-bin";

/// Longest ticket that is shown, in bytes: one for the longest names that there are.
pub const MAX_REVIEW_TICKET_BYTES: usize = 2048;

/// Largest message that goes up, in bytes: a [`Hello`] with [`MAX_KNOWN`] pods of the longest names there are.
pub const MAX_REPORT_BYTES: usize = 1024 * 1024;

/// Pods that a [`Hello`] may know: more than a node has. Policies of further pods are sent again.
pub const MAX_KNOWN: usize = 1024;

/// Largest message that comes down, in bytes: one that is nearly full, and one more policy.
pub const MAX_UPDATE_BYTES: usize = 4 * 1024 * 1024;

/// Largest policy, in bytes of its JSON.
pub const MAX_POLICY_BYTES: usize = 2 * 1024 * 1024;

/// Longest reason for a refusal that is sent, in bytes.
pub const MAX_REASON_BYTES: usize = 1024;

/// Rules of one pod of which the state is reported.
pub const MAX_GUARD_STATES: usize = 1024;

/// Longest [`WebhookState::error`], in bytes. A [`Hello`] has one for each of its pods.
pub const MAX_WEBHOOK_ERROR_BYTES: usize = 256;

/// Kinds that a [`Watched`] names.
pub const MAX_WATCHED_KINDS: usize = 256;

/// Most containers of a pod that are reported as ended.
pub const MAX_ENDED: usize = 16;

/// Namespaces that all kinds of a [`Watched`] name together.
pub const MAX_WATCHED_NAMESPACES: usize = 2000;

/// Objects that a [`Shadow`] names.
pub const MAX_SHADOW_DIFFERENCES: usize = 20;

/// Fields that a [`ShadowDifference`] names.
pub const MAX_SHADOW_FIELDS: usize = 10;

/// Longest text of such a field, in bytes.
pub const MAX_SHADOW_FIELD_BYTES: usize = 512;

/// FNV-1a of 64 bits. It detects changes and damage, not forgery.
pub fn digest(text: &[u8]) -> u64 {
    fnv1a(text)
}

impl PodId {
    /// Names the incarnation of a pod that has this UID; empty for any.
    pub fn of(pod: &PodName, uid: &str) -> Self {
        Self { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: uid.to_owned() }
    }

    /// Without the UID.
    pub fn pod_name(&self) -> PodName {
        PodName { namespace: self.namespace.clone(), name: self.name.clone() }
    }
}

impl WebhookState {
    /// Bounds the text.
    #[must_use]
    pub fn truncated(mut self) -> Self {
        self.error.truncate(self.error.floor_char_boundary(MAX_WEBHOOK_ERROR_BYTES));
        self
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use prost::Message as _;

    use super::*;

    #[test]
    fn what_a_newer_peer_says_beside_is_passed_over() {
        let newer = [0x78, 1, 0x0a, 1, b'n'];
        let read = PodId::decode(&newer[..]).unwrap();
        assert_eq!(read.namespace, "n");
    }

    fn pod() -> PodId {
        PodId { namespace: "n".into(), name: "p".into(), uid: "u".into() }
    }

    fn guard_state() -> GuardState {
        GuardState {
            breaker: "n/b".into(),
            rule: "r".into(),
            open: true,
            changed_at: 300,
            allowed: 5,
            refused: 6,
            last_refused: "h:1".into(),
        }
    }

    fn webhook_state() -> WebhookState {
        WebhookState { port_taken: true, certificate_read: true, error: "no".into() }
    }

    fn traffic_report() -> TrafficReport {
        let traffic = Traffic {
            since: 300,
            requests: 2,
            conflicts: 3,
            invalid: 4,
            client_errors: 5,
            server_errors: 6,
            writes: 7,
            deletes: 8,
            watches: 9,
            latency_micros: 10,
            timed: 11,
            first_writes: vec![1, 0, 300],
            lock_losses: 13,
            slots: vec![SlotLoad { slot: 7, requests: 300 }],
            shadow: Some(Shadow {
                intended: 15,
                equal: 1,
                different: 2,
                refused: 3,
                unknown: 4,
                differences: vec![ShadowDifference {
                    verb: "v".into(),
                    resource: "r".into(),
                    namespace: "n".into(),
                    name: "o".into(),
                    fields: vec!["f".into()],
                }],
            }),
        };
        TrafficReport { pod: Some(pod()), traffic: Some(traffic) }
    }

    fn watch_report() -> WatchReport {
        let kind = WatchedKind {
            group: "g".into(),
            resource: "r".into(),
            everywhere: true,
            namespaces: vec!["n".into()],
            more: true,
            last_watched: 300,
        };
        WatchReport { pod: Some(pod()), watched: Some(Watched { since: 300, kinds: vec![kind], more: true }) }
    }

    fn ended_report() -> EndedReport {
        EndedReport { pod: Some(pod()), ended: Some(Ended { since: 300, containers: vec!["c1".into()] }) }
    }

    fn lock_report() -> LockReport {
        LockReport { pod: Some(pod()), lock: Some(LockState { since: 300, waits: true, changes: 4 }) }
    }

    fn hello() -> Hello {
        let known = PolicySummary {
            pod: Some(pod()),
            digest: 1,
            epoch: 2,
            operator: "n/s".into(),
            version: 300,
            webhook: Some(webhook_state()),
        };
        Hello { node: "node".into(), pod: Some(pod()), version: "0.1".into(), known: vec![known] }
    }

    fn update() -> Update {
        let entry = PodEntry {
            pod: Some(pod()),
            digest: 1,
            policy: Bytes::from_static(b"{}"),
            operator: "n/s".into(),
            version: 300,
        };
        Update {
            policies: vec![entry],
            gone: vec![pod()],
            more: true,
            ticket: Bytes::from_static(b"v"),
            servers: vec!["10.0.0.1:443".into()],
            guard_reports: true,
        }
    }

    /// The messages of the stream of policies, with every field set, and their bytes.
    fn stream_samples() -> [(Vec<u8>, &'static str); 10] {
        let verdict = Verdict { pod: Some(pod()), digest: 1, epoch: 2, refused: "no".into() };
        let guards = GuardReport { pod: Some(pod()), states: vec![guard_state()] };
        let webhook = WebhookReport { pod: Some(pod()), state: Some(webhook_state()) };
        let bypass = BypassReport { pod: Some(pod()), bypass: Some(Bypass { packets: 300 }) };
        [
            (
                Report { content: Some(Content::Hello(hello())) }.encode_to_vec(),
                "0a400a046e6f646512090a016e1201701a01751a03302e3122280a090a016e1201701a0175110100000000000000180222036e2f7328ac023208080110011a026e6f",
            ),
            (
                Report { content: Some(Content::Verdict(verdict)) }.encode_to_vec(),
                "121a0a090a016e1201701a0175110100000000000000180222026e6f",
            ),
            (
                Report { content: Some(Content::Guards(guards)) }.encode_to_vec(),
                "1a230a090a016e1201701a017512160a036e2f62120172180120ac02280530063a03683a31",
            ),
            (
                Report { content: Some(Content::Webhook(webhook)) }.encode_to_vec(),
                "22150a090a016e1201701a01751208080110011a026e6f",
            ),
            (
                Report { content: Some(Content::Traffic(traffic_report())) }.encode_to_vec(),
                "2a500a090a016e1201701a0175124308ac0210021803200428053006380740084809500a580b621b080f1001180220032804320f0a01761201721a016e22016f2a01666a040100ac02700d7a05080710ac02",
            ),
            (
                Report { content: Some(Content::Watches(watch_report())) }.encode_to_vec(),
                "32240a090a016e1201701a0175121708ac0212100a0167120172180122016e280130ac021801",
            ),
            (Report { content: Some(Content::Bypass(bypass)) }.encode_to_vec(), "3a100a090a016e1201701a0175120308ac02"),
            (
                Report { content: Some(Content::Ended(ended_report())) }.encode_to_vec(),
                "42140a090a016e1201701a0175120708ac0212026331",
            ),
            (
                Report { content: Some(Content::Lock(lock_report())) }.encode_to_vec(),
                "4a140a090a016e1201701a0175120708ac0210011804",
            ),
            (
                update().encode_to_vec(),
                "0a200a090a016e1201701a01751101000000000000001a027b7d22036e2f7328ac0212090a016e1201701a017518012201762a0c31302e302e302e313a3434333001",
            ),
        ]
    }

    /// The same of all other messages.
    fn call_samples() -> [(Vec<u8>, &'static str); 8] {
        let receipt = Receipt {
            pod: Some(pod()),
            epoch: 2,
            refused: "no".into(),
            connected: true,
            last_contact: 300,
            digest: 1,
            guards: vec![guard_state()],
            webhook: Some(webhook_state()),
        };
        let webhook_report = WebhookReport { pod: Some(pod()), state: Some(webhook_state()) };
        let receipts = Receipts {
            receipts: vec![receipt],
            webhooks: vec![webhook_report],
            traffic: vec![traffic_report()],
            watches: vec![watch_report()],
            ended: vec![ended_report()],
            locks: vec![lock_report()],
        };
        let labels = [("a", "b"), ("c", "d")].map(|(key, value)| (key.into(), value.into()));
        let request = ShardRequest { namespace: "n".into(), labels: labels.into(), replica_set: "r".into() };
        [
            (SignRequest { request: Bytes::from_static(b"r") }.encode_to_vec(), "0a0172"),
            (Signed { chain: vec![Bytes::from_static(b"c")] }.encode_to_vec(), "0a0163"),
            (
                receipts.encode_to_vec(),
                "0a410a090a016e1201701a017510021a026e6f200128ac023101000000000000003a160a036e2f62120172180120ac02280530063a03683a314208080110011a026e6f12150a090a016e1201701a01751208080110011a026e6f1a500a090a016e1201701a0175124308ac0210021803200428053006380740084809500a580b621b080f1001180220032804320f0a01761201721a016e22016f2a01666a040100ac02700d7a05080710ac0222240a090a016e1201701a0175121708ac0212100a0167120172180122016e280130ac0218012a140a090a016e1201701a0175120708ac021202633132140a090a016e1201701a0175120708ac0210011804",
            ),
            (Relayed {}.encode_to_vec(), ""),
            (request.encode_to_vec(), "0a016e12060a016112016212060a01631201641a0172"),
            (ShardReply { shard: "s".into() }.encode_to_vec(), "0a0173"),
            (
                RenewRequest { policies: vec![PolicyInForce { pod: Some(pod()), digest: 1 }] }.encode_to_vec(),
                "0a140a090a016e1201701a0175110100000000000000",
            ),
            (Renewed { confirmed: vec![pod()] }.encode_to_vec(), "0a090a016e1201701a0175"),
        ]
    }

    #[test]
    fn the_largest_report_on_watches_fits() {
        let namespaces = |count| vec!["n".repeat(63); count];
        let kind = |at| WatchedKind {
            group: "g".repeat(253),
            resource: "r".repeat(253),
            namespaces: if at == 0 { namespaces(MAX_WATCHED_NAMESPACES) } else { Vec::new() },
            last_watched: u64::MAX,
            ..WatchedKind::default()
        };
        let watched = Watched { since: u64::MAX, kinds: (0..MAX_WATCHED_KINDS).map(kind).collect(), more: true };
        let pod = PodId { namespace: "n".repeat(63), name: "p".repeat(253), uid: "u".repeat(36) };
        let report = WatchReport { pod: Some(pod), watched: Some(watched) };
        assert!(Report { content: Some(Content::Watches(report)) }.encoded_len() <= MAX_REPORT_BYTES);
    }

    #[test]
    fn the_largest_hello_fits() {
        let pod = PodId { namespace: "n".repeat(63), name: "p".repeat(253), uid: "u".repeat(36) };
        let known = PolicySummary {
            pod: Some(pod.clone()),
            digest: u64::MAX,
            epoch: u64::MAX,
            operator: "o".repeat(63 + 1 + 253),
            version: u64::MAX,
            webhook: Some(WebhookState { error: "e".repeat(1000), ..webhook_state() }.truncated()),
        };
        let known = vec![known; MAX_KNOWN];
        let hello = Hello { node: "n".repeat(253), pod: Some(pod), version: "0.1".into(), known };
        let bytes = Report { content: Some(Content::Hello(hello)) }.encoded_len();
        assert!(bytes <= MAX_REPORT_BYTES, "{bytes}");
    }

    #[test]
    fn every_field_keeps_its_number_and_type() {
        for (bytes, expected) in stream_samples().into_iter().chain(call_samples()) {
            let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
            let hex: String = digits.filter_map(|digit| char::from_digit(digit.into(), 16)).collect();
            assert_eq!(hex, expected);
        }
    }
}
