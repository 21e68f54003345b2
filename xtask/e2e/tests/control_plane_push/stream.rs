//! A simulated proxy, which sends the manager what the test says.

use std::collections::BTreeMap;

use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::wire::{Content, Hello, PodEntry, Report, Update, Verdict};
use ctrlmesh_proxy::manager_client::Connection;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::bed::soon;

/// A stream to the manager.
pub(crate) struct Stream {
    pub(crate) reports: mpsc::Sender<Report>,
    pub(crate) updates: Streaming<Update>,
    _link: Connection,
}

impl Stream {
    /// Says hello over `link`, and shows what a manager gave before.
    pub(crate) async fn begin(mut link: Connection, hello: Hello, ticket: &[u8]) -> Result<Self, Status> {
        let (reports, outbound) = mpsc::channel(64);
        reports.try_send(Report { content: Some(Content::Hello(hello)) }).unwrap();
        let updates = link.follow(ReceiverStream::new(outbound), ticket).await?;
        Ok(Self { reports, updates, _link: link })
    }

    /// What it is told next.
    pub(crate) async fn update(&mut self) -> Update {
        soon("an update", self.updates.message()).await.unwrap().unwrap()
    }

    /// The next policies: by pod, the epoch.
    pub(crate) async fn epochs(&mut self) -> BTreeMap<String, u64> {
        let update = self.update().await;
        let policies = update.policies.iter().map(|entry| {
            let policy: Policy = serde_json::from_slice(&entry.policy).unwrap();
            (entry.pod.clone().unwrap().name, policy.epoch)
        });
        policies.collect()
    }

    /// Says that the policy is in force.
    pub(crate) async fn applies(&self, entry: &PodEntry, epoch: u64) {
        let (pod, digest) = (entry.pod.clone(), entry.digest);
        let verdict = Verdict { pod, digest, epoch, refused: String::new() };
        self.reports.send(Report { content: Some(Content::Verdict(verdict)) }).await.unwrap();
    }
}
