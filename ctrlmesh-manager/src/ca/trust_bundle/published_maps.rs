//! The content of the published `ConfigMaps`, as the watch reports it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::watcher::Event;

use super::digest;

/// Digests of the data, by namespace.
#[derive(Debug, Default)]
pub(super) struct PublishedMaps {
    digests: BTreeMap<String, u64>,
    /// The list in progress.
    listed: Option<BTreeMap<String, u64>>,
    is_whole: bool,
}

impl PublishedMaps {
    /// Returns the namespace that changed, if it was one.
    pub(super) fn take(&mut self, event: Event<ConfigMap>) -> Option<String> {
        let read = |map: ConfigMap| {
            let digest = digest(&map.data.unwrap_or_default());
            (map.metadata.namespace.unwrap_or_default(), digest)
        };
        match event {
            Event::Init => self.listed = Some(BTreeMap::new()),
            Event::InitApply(map) => self.listed.get_or_insert_default().extend([read(map)]),
            Event::InitDone => {
                self.digests = self.listed.take().unwrap_or_default();
                self.is_whole = true;
            }
            Event::Apply(map) => {
                let (namespace, digest) = read(map);
                self.digests.insert(namespace.clone(), digest);
                return Some(namespace);
            }
            Event::Delete(map) => {
                let namespace = read(map).0;
                self.digests.remove(&namespace);
                return Some(namespace);
            }
        }
        None
    }

    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    pub(super) fn has(&self, namespace: &str) -> bool {
        self.digests.contains_key(namespace)
    }

    pub(super) fn digest(&self, namespace: &str) -> Option<u64> {
        self.digests.get(namespace).copied()
    }

    pub(super) fn namespaces(&self) -> Vec<String> {
        self.digests.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(namespace: &str, text: &str) -> ConfigMap {
        let data = json!({"metadata": {"namespace": namespace}, "data": {"ca.crt": text}});
        serde_json::from_value(data).unwrap()
    }

    #[test]
    fn a_list_counts_when_complete_and_later_events_at_once() {
        let mut there = PublishedMaps::default();
        let of = |text: &str| digest(&map("", text).data.unwrap());
        there.take(Event::Init);
        there.take(Event::InitApply(map("a", "1")));
        assert_eq!((there.is_whole(), there.digest("a")), (false, None));
        there.take(Event::InitDone);
        assert_eq!((there.is_whole(), there.digest("a")), (true, Some(of("1"))));
        assert_eq!(there.take(Event::Apply(map("b", "2"))).as_deref(), Some("b"));
        assert_eq!(there.take(Event::Delete(map("a", "1"))).as_deref(), Some("a"));
        assert_eq!(there.namespaces(), ["b"]);
        there.take(Event::Init);
        assert_eq!(there.digest("b"), Some(of("2")));
        there.take(Event::InitDone);
        assert!(!there.has("b"), "it is not listed any more");
    }
}
