//! Remembers what namespaces are to hold: the authority of a namespace takes a fraction of a millisecond to
//! derive, and every one is compared twice a minute.

use std::collections::HashMap;
use std::sync::Mutex;

use ctrlmesh_runtime::sync::lock;

/// Pods may be created in many namespaces that do not stay.
const MAX_NAMESPACES: usize = 16 * 1024;

#[derive(Debug, Default)]
pub(super) struct Digests(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Of what all namespaces have in common.
    common: u64,
    by_namespace: HashMap<String, u64>,
}

impl Digests {
    /// The digest for `namespace` where all have `common` in common, by `make` where it is not known.
    pub(super) fn of<E>(&self, common: u64, namespace: &str, make: impl FnOnce() -> Result<u64, E>) -> Result<u64, E> {
        let known = |known: &Known| known.by_namespace.get(namespace).copied().filter(|_| known.common == common);
        if let Some(digest) = known(&lock(&self.0)) {
            return Ok(digest);
        }
        let digest = make()?;
        let mut known = lock(&self.0);
        if known.common != common || known.by_namespace.len() >= MAX_NAMESPACES {
            *known = Known { common, by_namespace: HashMap::new() };
        }
        known.by_namespace.insert(namespace.to_owned(), digest);
        drop(known);
        Ok(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_made_once_until_what_is_common_changes() {
        let digests = Digests::default();
        let of = |common, namespace, made: Option<u64>| digests.of(common, namespace, || made.ok_or("made again"));
        assert_eq!(of(1, "a", Some(10)), Ok(10));
        assert_eq!(of(1, "b", Some(20)), Ok(20));
        assert_eq!((of(1, "a", None), of(1, "b", None)), (Ok(10), Ok(20)));
        assert_eq!(of(2, "a", Some(11)), Ok(11));
        assert_eq!((of(2, "a", None), of(2, "b", None)), (Ok(11), Err("made again")));
    }
}
