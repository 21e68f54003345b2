//! Whom does everybody believe already, and how long is that waited for where the Secret is gone?
//!
//! Pure. The Secret may have been removed, or be restored late, while pods believe what was published and a leader lives
//! who knows the keys and writes them again. Whoever made an authority at once would have a second one, whom those pods
//! do not believe. So it waits; and who has to make one at last has everybody believe the old ones until they end.

use std::time::{Duration, SystemTime};

use ctrlmesh_common::names::root_ca;
use k8s_openapi::api::core::v1::ConfigMap;

use crate::certs::line;

/// How long the leader may take to write the Secret again: another leads 15 s after it died, and looks every 10 s.
const RESTORED_WITHIN: Duration = Duration::from_secs(30);

/// The authorities of ours that are believed, in PEM, one certificate each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Those that speak for the API server.
    pub mesh: Vec<String>,
    /// Those that speak for the manager.
    pub manager: Vec<String>,
}

// === impl Published ===

impl Published {
    /// What `map` says, but for what has ended at `now` and what is no authority of ours.
    pub fn of(map: &ConfigMap, now: SystemTime) -> Self {
        let of = |key: &str| {
            let text = map.data.as_ref().and_then(|data| data.get(key));
            text.map(|text| line::authorities(text, now)).unwrap_or_default()
        };
        Self { mesh: of(root_ca::KEY), manager: of(root_ca::MANAGER_KEY) }
    }

    /// Whether the keys may still come back, when it has been `waited` for them.
    pub fn is_waited_for(&self, waited: Duration) -> bool {
        *self != Self::default() && waited < RESTORED_WITHIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certs::authority::{Authority, Names};

    const LIFE: Duration = Duration::from_hours(24);

    fn map(mesh: &str, manager: &str) -> ConfigMap {
        let data = [(root_ca::KEY, mesh), (root_ca::MANAGER_KEY, manager)];
        let data = data.map(|(key, text)| (key.to_owned(), text.to_owned()));
        ConfigMap { data: Some(data.into()), ..ConfigMap::default() }
    }

    #[test]
    fn where_nobody_believes_anything_an_authority_is_made_at_once_and_else_it_is_waited() {
        assert!(!Published::default().is_waited_for(Duration::ZERO), "a first start");
        let published = Published { mesh: vec!["one".to_owned()], ..Published::default() };
        assert!(published.is_waited_for(Duration::ZERO));
        assert!(published.is_waited_for(RESTORED_WITHIN * 9 / 10));
        assert!(!published.is_waited_for(RESTORED_WITHIN), "not for ever");
    }

    #[test]
    fn what_is_believed_on_is_ours_and_has_not_ended() {
        let now = SystemTime::now();
        let made = |at| Authority::make("ours", &Names::of(["kubernetes"]), LIFE, at).unwrap();
        let (old, new, ended) = (made(now - LIFE / 2), made(now), made(now - LIFE * 2));
        let foreign = rcgen::generate_simple_self_signed(["other".to_owned()]).unwrap();
        let text = [new.pem(), ended.pem(), &foreign.cert.pem(), "nonsense\n", old.pem()].concat();
        let published = Published::of(&map(&text, new.pem()), now);
        let certificates = |texts: &[String]| -> Vec<_> {
            texts.iter().map(|text| pem::parse(text).unwrap().into_contents()).collect()
        };
        let of = |one: &Authority| pem::parse(one.pem()).unwrap().into_contents();
        assert_eq!(certificates(&published.mesh), [of(&new), of(&old)]);
        assert_eq!(certificates(&published.manager), [of(&new)]);
        assert_eq!(Published::of(&ConfigMap::default(), now), Published::default());
        assert_eq!(Published::of(&map("", "nonsense"), now), Published::default());
    }
}
