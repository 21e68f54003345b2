//! Publishes an event on each pod that sends packets to the API server past its proxy, as its node proxy reports.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType};
use tokio::sync::mpsc;
use tokio::time::{self, Instant};
use tracing::warn;

use crate::cluster::event_recorder::EventRecorder;
use crate::drain::Drain;
use crate::rules::pod::PodName;

const REPORTER: &str = "ctrlmesh-manager";

/// Between two events on one pod.
const AGAIN: Duration = Duration::from_mins(10);

/// Pods whose last event is remembered. Of more, all are forgotten.
const MOST: usize = 1000;

/// Reports that wait to be published. More are lost: a pod that goes on is reported again.
const QUEUE: usize = 64;

/// For one event.
const DEADLINE: Duration = Duration::from_secs(10);

/// What a node has dropped of one incarnation of a pod.
#[derive(Debug)]
struct Dropped {
    pod: PodName,
    uid: String,
    packets: u64,
}

/// Takes reports, and publishes them in the background.
#[derive(Clone, Debug)]
pub struct BypassEvents(mpsc::Sender<Dropped>);

impl BypassEvents {
    pub fn start(client: Client, drain: &Drain) -> Self {
        let (sender, receiver) = mpsc::channel(QUEUE);
        drain.spawn_until_started(publish(EventRecorder::new(client, REPORTER.into()), receiver));
        Self(sender)
    }

    pub(super) fn tell(&self, pod: &PodName, uid: &str, packets: u64) {
        let _lost = self.0.try_send(Dropped { pod: pod.clone(), uid: uid.to_owned(), packets });
    }
}

async fn publish(recorder: EventRecorder, mut reports: mpsc::Receiver<Dropped>) {
    let mut last: BTreeMap<(PodName, String), (Instant, u64)> = BTreeMap::new();
    while let Some(Dropped { pod, uid, packets }) = reports.recv().await {
        let key = (pod, uid);
        // A proxy that connects anew reports what it has reported before.
        if last.get(&key).is_some_and(|(published, before)| published.elapsed() < AGAIN || *before == packets) {
            continue;
        }
        if last.len() >= MOST {
            last.clear();
        }
        let (pod, uid) = &key;
        let event = Event {
            type_: EventType::Warning,
            reason: "BypassDropped".to_owned(),
            note: Some(format!(
                "the pod sent {packets} packets to the API server past its proxy, and its node dropped them"
            )),
            action: "Drop".to_owned(),
            secondary: None,
        };
        let published = time::timeout(DEADLINE, Box::pin(recorder.publish(&event, &reference(pod, uid)))).await;
        match published.map_err(anyhow::Error::from).and_then(|done| Ok(done?)) {
            Ok(()) => drop(last.insert(key, (Instant::now(), packets))),
            Err(error) => warn!(%pod, packets, error = format!("{error:#}"), "packets past the proxy, and no event"),
        }
    }
}

fn reference(pod: &PodName, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.name.clone()),
        namespace: Some(pod.namespace.clone()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}
