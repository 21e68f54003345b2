//! The admission webhook in a `ShardingConfig`.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules;

/// The admission webhook of an operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(has(self.certName) ? self.certName : 'tls.crt') != (has(self.keyName) ? self.keyName : 'tls.key')")
        .message("keyName: must be another file than certName")
)]
pub struct Webhook {
    /// The folder in the operator's container that holds certificate and key.
    #[schemars(length(min = 1, max = 4096))]
    pub cert_dir: String,
    /// The TCP port on which the operator serves its webhook, 1 to 65535.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
    /// The name of the certificate's file in that folder. Absent: `tls.crt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = rules::FILE_NAME))]
    pub cert_name: Option<String>,
    /// The name of the key's file in that folder. Absent: `tls.key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = rules::FILE_NAME))]
    pub key_name: Option<String>,
    /// Absent: `Local`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_unowned: Option<OnUnowned>,
}

impl Webhook {
    /// The file of the certificate, in the operator's container.
    pub fn certificate(&self) -> String {
        self.file(self.cert_name.as_deref().unwrap_or("tls.crt"))
    }

    /// The file of the certificate's key, in the operator's container.
    pub fn key(&self) -> String {
        self.file(self.key_name.as_deref().unwrap_or("tls.key"))
    }

    fn file(&self, name: &str) -> String {
        format!("{}/{name}", self.cert_dir.trim_end_matches('/'))
    }
}

/// Who answers a review of an object that belongs to nobody now, or whose owner cannot be asked: `Local` the replica
/// that was called, `Fail` nobody, so that the `failurePolicy` of the webhook's configuration decides. Default `Local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnUnowned {
    /// The replica that was called.
    Local,
    /// Nobody.
    Fail,
}
