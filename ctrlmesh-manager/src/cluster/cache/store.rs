//! Holds the watched objects of one kind.

use std::collections::BTreeMap;

use kube::runtime::watcher::Event;

/// By `NAMESPACE/NAME`.
#[derive(Debug)]
pub(super) struct ObjectStore<V> {
    pub(super) current: BTreeMap<String, V>,
    /// Collects a list until it is complete; then it replaces `current`.
    listed: Option<BTreeMap<String, V>>,
    pub(super) synced: bool,
}

impl<V> Default for ObjectStore<V> {
    fn default() -> Self {
        Self { current: BTreeMap::new(), listed: None, synced: false }
    }
}

impl<V: PartialEq> ObjectStore<V> {
    /// Applies an event; returns whether the content changed.
    pub(super) fn take<K>(&mut self, event: Event<K>, read: fn(K) -> (String, V)) -> bool {
        match event {
            Event::Init => {
                self.listed = Some(BTreeMap::new());
                false
            }
            Event::InitApply(object) => {
                self.listed.get_or_insert_default().extend([read(object)]);
                false
            }
            Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                let changed = !self.synced || listed != self.current;
                (self.current, self.synced) = (listed, true);
                changed
            }
            Event::Apply(object) => {
                let (name, value) = read(object);
                let same = self.current.get(&name) == Some(&value);
                self.current.insert(name, value);
                !same
            }
            Event::Delete(object) => self.current.remove(&read(object).0).is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;
    use crate::cluster::cache::NamespaceInfo;

    fn read((name, value): (&str, u8)) -> (String, u8) {
        (name.to_owned(), value)
    }

    #[test]
    fn a_list_replaces_the_content_only_when_complete() {
        let mut store = ObjectStore::<u8>::default();
        let mut take = |event| {
            let changed = store.take(event, read);
            (changed, store.current.clone().into_iter().collect::<Vec<_>>())
        };
        let is = |pairs: &[(&str, u8)]| pairs.iter().map(|pair| read(*pair)).collect::<Vec<_>>();
        take(Event::Init);
        take(Event::InitApply(("a", 1)));
        assert_eq!(take(Event::InitApply(("b", 2))), (false, vec![]));
        assert_eq!(take(Event::InitDone), (true, is(&[("a", 1), ("b", 2)])));
        assert_eq!(take(Event::Apply(("a", 1))), (false, is(&[("a", 1), ("b", 2)])));
        assert_eq!(take(Event::Apply(("a", 3))), (true, is(&[("a", 3), ("b", 2)])));
        take(Event::Init);
        assert_eq!(take(Event::InitApply(("b", 2))), (false, is(&[("a", 3), ("b", 2)])));
        assert_eq!(take(Event::InitDone), (true, is(&[("b", 2)])), "what is not listed is gone");
        assert_eq!(take(Event::Delete(("b", 2))), (true, vec![]));
        assert_eq!(take(Event::Delete(("b", 2))), (false, vec![]));
    }

    #[test]
    fn another_version_of_a_namespace_is_kept_and_is_no_change() {
        let read = |meta: ObjectMeta| ("a".to_owned(), NamespaceInfo::from(meta));
        let seen = |uid: &str, version: &str| ObjectMeta {
            uid: Some(uid.to_owned()),
            resource_version: Some(version.to_owned()),
            ..ObjectMeta::default()
        };
        let mut store = ObjectStore::default();
        assert!(store.take(Event::Apply(seen("1", "5")), read));
        assert!(!store.take(Event::Apply(seen("2", "6")), read));
        let known = &store.current["a"];
        assert_eq!((known.uid.as_deref(), known.version.as_deref()), (Some("2"), Some("6")));
    }

    #[test]
    fn an_empty_list_is_a_list() {
        let mut store = ObjectStore::<u8>::default();
        store.take(Event::Init, read);
        assert!(store.take(Event::InitDone, read) && store.synced);
    }
}
