//! Whom does everybody believe already, and is there somebody who writes the Secret again where it is gone?
//!
//! Pure. The Secret may have been removed, or be restored late, while pods believe what was published and a leader lives
//! who knows the keys and writes them again. Whoever made an authority at once would have a second one, whom those pods
//! do not believe. So it waits, for as long as the Lease is renewed; and who has to make one at last has everybody
//! believe the old ones until they end.

use std::time::{Duration, SystemTime};

use ctrlmesh_common::names::root_ca;
use k8s_openapi::api::core::v1::ConfigMap;

use crate::certs::line;

/// How long it is waited from one look at the Lease to the next. A leader that could not reach the API server any more
/// than we has renewed it by then.
pub const LOOKS_EVERY: Duration = Duration::from_secs(5);

/// At how many looks in a row the Lease is as it was before nobody is waited for. It takes 30 s: another leads 15 s after
/// one died, and looks every 10 s.
const LOOKS: u32 = 6;

/// The authorities of ours that are believed, in PEM, one certificate each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Those that speak for the API server.
    pub mesh: Vec<String>,
    /// Those that speak for the manager.
    pub manager: Vec<String>,
}

/// The leader, who writes the Secret again.
#[derive(Clone, Debug)]
pub struct Restorer {
    /// The name of its Lease.
    pub lease: String,
    /// In which version the Lease was found last; none where it was not there.
    version: Option<String>,
    /// At how many looks since it was found so.
    idle: u32,
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

    /// Whether nobody believes anything, as before the first start.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

// === impl Restorer ===

impl Restorer {
    /// Who holds the Lease `lease`.
    pub fn of(lease: String) -> Self {
        Self { lease, version: None, idle: 0 }
    }

    /// Takes the version in which its Lease was found; returns whether it has not been renewed for so long that nobody
    /// leads. Looks that failed do not count: then nobody could renew it either.
    pub fn is_gone(&mut self, version: Option<String>) -> bool {
        self.idle = if self.version == version { self.idle + 1 } else { 0 };
        self.version = version;
        self.idle >= LOOKS
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
    fn a_leader_is_gone_when_its_lease_was_not_renewed_for_some_looks() {
        let mut restorer = Restorer::of("ctrlmesh-manager".to_owned());
        for version in 0..100 {
            assert!(!restorer.is_gone(Some(version.to_string())), "it was renewed");
        }
        for look in 1..=LOOKS {
            assert_eq!(restorer.is_gone(Some("99".to_owned())), look == LOOKS);
        }
        assert!(!restorer.is_gone(Some("100".to_owned())), "another leads");
        assert!(!restorer.is_gone(None), "somebody deleted it");
        for look in 1..=LOOKS {
            assert_eq!(restorer.is_gone(None), look == LOOKS);
        }
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
