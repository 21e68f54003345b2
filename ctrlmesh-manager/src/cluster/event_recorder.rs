//! Publishes events, each with its own text.
//!
//! kube's recorder counts events that differ in their note only as one, and keeps the first note. So people would read
//! what was true before. This one counts only events with the same note.

use std::collections::BTreeMap;
use std::sync::Mutex;

use ctrlmesh_runtime::sync::lock;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, Recorder, Reporter};

/// By object and reason, the last note and the recorder that counts it.
type Recorders = BTreeMap<(String, String), (Option<String>, Recorder)>;

/// Events whose repetitions are counted. Of more, all are forgotten.
const MOST: usize = 1000;

pub struct EventRecorder {
    client: Client,
    reporter: Reporter,
    last: Mutex<Recorders>,
}

impl EventRecorder {
    pub fn new(client: Client, reporter: Reporter) -> Self {
        Self { client, reporter, last: Mutex::default() }
    }

    /// # Errors
    /// Where the API server refuses the event.
    pub async fn publish(&self, event: &Event, regarding: &ObjectReference) -> kube::Result<()> {
        let recorder = self.recorder(event, regarding);
        Box::pin(recorder.publish(event, regarding)).await
    }

    /// The recorder that counts this event; a new one for another note.
    fn recorder(&self, event: &Event, regarding: &ObjectReference) -> Recorder {
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        let object = [&regarding.kind, &regarding.namespace, &regarding.name, &regarding.uid].map(part).join("/");
        let related = event.secondary.as_ref().map(|one| part(&one.kind)).unwrap_or_default();
        let key = (object, format!("{}/{related}", event.reason));
        let mut last = lock(&self.last);
        let known = last.get(&key).filter(|(note, _)| *note == event.note).map(|(_, recorder)| recorder.clone());
        let recorder = known.unwrap_or_else(|| Recorder::new(self.client.clone(), self.reporter.clone()));
        if last.len() >= MOST {
            last.clear();
        }
        last.insert(key, (event.note.clone(), recorder.clone()));
        drop(last);
        recorder
    }
}
