//! Whom does everybody believe already, and is there somebody who writes the Secret again where it is gone?
//!
//! Pure. The Secret may have been removed, or be restored late, while pods believe what was published and a leader lives
//! who knows the keys and writes them again. Whoever made an authority at once would have a second one, whom those pods
//! do not believe. So it waits, for as long as the Lease is renewed; and who has to make one at last has everybody
//! believe the old ones until they end.

use std::time::{Duration, SystemTime};

use ctrlmesh_common::names::root_ca;
use k8s_openapi::api::core::v1::ConfigMap;

use crate::ca::rotation::{self, Kind};

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
        let of = |key: &str, kind| {
            let text = map.data.as_ref().and_then(|data| data.get(key));
            text.map(|text| rotation::authorities(text, kind, now)).unwrap_or_default()
        };
        Self {
            mesh: of(root_ca::KEY, Kind::Mesh),
            manager: of(root_ca::MANAGER_KEY, Kind::Manager),
        }
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
    use std::net::Ipv4Addr;

    use rcgen::{
        BasicConstraints, CertificateParams, CidrSubnet, DnType, GeneralSubtree, IsCa, KeyPair,
        NameConstraints,
    };

    use super::*;
    use crate::ca::authority::{Authority, Names};

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

    fn made(kind: Kind, at: SystemTime) -> Authority {
        Authority::make(kind.called(), &Names::of(["kubernetes"]), LIFE, at).unwrap()
    }

    fn contents(pem: &str) -> Vec<u8> {
        pem::parse(pem).unwrap().into_contents()
    }

    fn all(pems: &[String]) -> Vec<Vec<u8>> {
        pems.iter().map(|pem| contents(pem)).collect()
    }

    #[test]
    fn what_is_believed_on_is_ours_and_has_not_ended() {
        let now = SystemTime::now();
        let [old, new, ended] =
            [now - LIFE / 2, now, now - LIFE * 2].map(|at| made(Kind::Mesh, at));
        let manager = made(Kind::Manager, now);
        let foreign = rcgen::generate_simple_self_signed(["other".to_owned()]).unwrap().cert.pem();
        let text = [new.pem(), ended.pem(), manager.pem(), &foreign, "nonsense\n", old.pem()];
        let text = text.concat();
        let published = Published::of(&map(&text, manager.pem()), now);
        assert_eq!(all(&published.mesh), [contents(new.pem()), contents(old.pem())]);
        assert_eq!(all(&published.manager), [contents(manager.pem())]);
        assert!(Published::of(&ConfigMap::default(), now).is_empty());
        assert!(Published::of(&map("", "nonsense"), now).is_empty());
    }

    #[test]
    fn one_that_is_cut_off_takes_nothing_from_the_next() {
        let now = SystemTime::now();
        let (cut, next) = (made(Kind::Mesh, now), made(Kind::Mesh, now));
        let text = format!("{}\n{}", &cut.pem()[..200], next.pem());
        assert_eq!(all(&Published::of(&map(&text, ""), now).mesh), [contents(next.pem())]);
    }

    #[test]
    fn one_that_is_called_otherwise_or_may_speak_for_anybody_is_not_ours() {
        let now = SystemTime::now();
        let addresses = CidrSubnet::from_addr_prefix(Ipv4Addr::UNSPECIFIED.into(), 0);
        let dns = || GeneralSubtree::DnsName("kubernetes".to_owned());
        let ours = Kind::Mesh.called();
        for (called, permitted_subtrees, is_ours) in
            [(ours, vec![dns()], true), (ours, Vec::new(), false), ("other", vec![dns()], false)]
        {
            let excluded_subtrees = vec![GeneralSubtree::IpAddress(addresses)];
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, called);
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            params.name_constraints =
                Some(NameConstraints { permitted_subtrees, excluded_subtrees });
            params.not_after = (now + LIFE).into();
            let pem = params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
            assert_eq!(!Published::of(&map(&pem, ""), now).is_empty(), is_ours, "{called}");
        }
    }
}
