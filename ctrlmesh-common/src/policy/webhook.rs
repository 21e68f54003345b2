//! The admission webhook of a pod's operator, and whose the objects are that it is asked about.

use std::net::IpAddr;
use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

use super::Limit;

/// The admission webhook that the pod serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Webhook {
    /// The TCP port on which the operator serves it.
    pub port: NonZeroU16,
    /// The file of its certificate, in the operator's container.
    pub certificate: String,
    /// The file of the certificate's key, in the operator's container.
    pub key: String,
    /// What happens to reviews of objects that no pod can be asked about.
    #[serde(default)]
    pub on_unowned: OnUnowned,
    /// The operator's other shards, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<Peer>,
}

/// Who answers a review of an object whose owner is away, moving or unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OnUnowned {
    /// The pod that was asked.
    #[default]
    Local,
    /// Nobody: it fails, and the webhook's `failurePolicy` decides.
    Fail,
}

/// Another shard of the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Peer {
    /// Its name, as the fence has it.
    pub shard: String,
    /// The addresses of its pods that are ready. They serve the webhook at the same port.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// Which objects it has, by their labels. Empty where the policy has a fence, which tells it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<Limit>,
}
