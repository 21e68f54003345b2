//! Asks every endpoint of the API server what it enforces.
//!
//! The question is a dry run that the policy always refuses. The refusal says the policy's revision and the epoch of
//! the table that this server sees. An answer without a refusal proves that there is no fence.

use std::net::SocketAddr;
use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::annotation;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time;

use super::fence_policy::SAYS;
use super::fence_state::Proof;

/// Limit for one answer.
const DEADLINE: Duration = Duration::from_secs(2);

/// What a probe is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Question {
    pub(super) namespace: String,
    pub(super) root: String,
    /// Of the policy that is to be in force.
    pub(super) revision: String,
}

/// What one endpoint says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It enforces this revision by a table of this epoch.
    Enforces { revision: String, epoch: u64 },
    /// It let the probe pass: it does not enforce any policy.
    Passed,
    /// It said something else, or nothing.
    Unclear { why: String },
}

/// Asks one endpoint.
pub(super) async fn ask(client: &Client, question: &Question) -> Answer {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), &question.namespace);
    let params = PatchParams { dry_run: true, ..PatchParams::default() };
    let patch = Patch::Merge(json!({"metadata": {"annotations": {annotation::FENCE_PROBE: question.revision}}}));
    let asked = roots.patch_metadata(&question.root, &params, &patch);
    match time::timeout(DEADLINE, asked).await {
        Ok(Ok(_)) => Answer::Passed,
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => read(&status.message),
        Ok(Err(error)) => Answer::Unclear { why: ctrlmesh_runtime::telemetry::chain(&error) },
        Err(_elapsed) => Answer::Unclear { why: format!("no answer within {DEADLINE:?}") },
    }
}

/// Reads a refusal. The API server writes the policy's name before what the policy says.
fn read(message: &str) -> Answer {
    let mut said = message.rsplit(": ").next().unwrap_or_default().split(' ');
    match (said.next(), said.next(), said.next(), said.next().and_then(|epoch| epoch.parse().ok()), said.next()) {
        (Some(SAYS), Some(revision), Some("epoch"), Some(epoch), None) => {
            Answer::Enforces { revision: revision.to_owned(), epoch }
        }
        _ => Answer::Unclear { why: message.to_owned() },
    }
}

/// What all answers prove.
///
/// # Errors
/// Why they prove nothing: the first endpoint that does not enforce this revision.
pub(super) fn proof(revision: &str, answers: &[(SocketAddr, Answer)]) -> Result<Proof, String> {
    let shown = |(address, answer): &(SocketAddr, Answer)| match answer {
        Answer::Enforces { revision: shown, epoch } if shown == revision => Ok(*epoch),
        Answer::Enforces { .. } => Err(format!("{address} still enforces another revision")),
        Answer::Passed => Err(format!("{address} does not enforce the policy yet")),
        Answer::Unclear { why } => Err(format!("{address}: {why}")),
    };
    let epochs = answers.iter().map(shown).collect::<Result<Vec<u64>, String>>()?;
    let epoch = epochs.iter().copied().min().ok_or_else(|| "the API server has no endpoint".to_owned())?;
    Ok(Proof { revision: revision.to_owned(), epoch, endpoints: epochs.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enforces(revision: &str, epoch: u64) -> Answer {
        Answer::Enforces { revision: revision.to_owned(), epoch }
    }

    fn all(answers: impl IntoIterator<Item = Answer>) -> Vec<(SocketAddr, Answer)> {
        let address = |at: usize| SocketAddr::from(([192, 0, 2, 1], u16::try_from(at).unwrap()));
        answers.into_iter().enumerate().map(|(at, answer)| (address(at + 1), answer)).collect()
    }

    #[test]
    fn a_refusal_is_read_by_its_last_part() {
        let refused = "shardingconfigs.ctrlmesh.kusionstack.io \"op\" is forbidden: ValidatingAdmissionPolicy 'x' with binding 'x' denied request: ";
        assert_eq!(read(&format!("{refused}fence 0a1b epoch 12")), enforces("0a1b", 12));
        let others = [
            "shardingconfigs \"op\" is forbidden: User \"a\" cannot patch resource \"shardingconfigs\"".to_owned(),
            format!("{refused}fence 0a1b epoch"),
            format!("{refused}fence 0a1b epoch -1"),
            format!("{refused}fence 0a1b epoch 1 more"),
            format!("{refused}failed expression"),
            String::new(),
        ];
        for other in others {
            assert_eq!(read(&other), Answer::Unclear { why: other });
        }
    }

    #[test]
    fn the_least_epoch_of_all_endpoints_counts() {
        let proof = proof("r", &all([enforces("r", 9), enforces("r", 7), enforces("r", 8)]));
        assert_eq!(proof, Ok(Proof { revision: "r".to_owned(), epoch: 7, endpoints: 3 }));
    }

    #[test]
    fn nothing_is_proved_where_one_endpoint_shows_nothing() {
        let unclear = Answer::Unclear { why: "silent".to_owned() };
        for (other, why) in [
            (Answer::Passed, "192.0.2.1:2 does not enforce the policy yet"),
            (enforces("old", 99), "192.0.2.1:2 still enforces another revision"),
            (unclear, "192.0.2.1:2: silent"),
        ] {
            assert_eq!(proof("r", &all([enforces("r", 9), other])), Err(why.to_owned()));
        }
        assert!(proof("r", &[]).is_err(), "nobody was asked");
    }
}
