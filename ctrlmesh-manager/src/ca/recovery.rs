//! Decides whether a replica may create authorities in place of a lost Secret.
//!
//! Pure. The Secret may be gone, or be restored late, while pods trust the published bundle and a leader lives that has
//! the keys. An authority that is created at once would be one that those pods do not trust. So a replica waits for as
//! long as the leader renews its Lease. If it must create authorities at last, clients keep trusting the old ones until
//! they expire.

use std::time::{Duration, SystemTime};

use ctrlmesh_common::names::root_ca;
use k8s_openapi::api::core::v1::ConfigMap;

use crate::ca::rotation::{self, AuthorityKind};

/// A leader that had no connection to the API server either has renewed its Lease by then.
pub const LOOKS_EVERY: Duration = Duration::from_secs(5);

/// After so many unchanged reads, 30 s, no leader is waited for. A successor leads 15 s after its predecessor died, and
/// reads the Secret every 10 s.
const LOOKS: u32 = 6;

/// Our authorities that pods trust, in PEM, one certificate each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedAuthorities {
    pub mesh: Vec<String>,
    pub manager: Vec<String>,
}

/// Observes whether a leader renews its Lease.
#[derive(Clone, Debug)]
pub struct LeaseWatch {
    /// The name of its Lease.
    pub lease: String,
    /// resourceVersion at the last read; none where there was no Lease.
    version: Option<String>,
    /// How many reads in a row found this version.
    idle: u32,
}

impl TrustedAuthorities {
    /// The authorities in `map` that are ours and have not expired at `now`.
    pub fn of(map: &ConfigMap, now: SystemTime) -> Self {
        let of = |key: &str, kind| {
            let text = map.data.as_ref().and_then(|data| data.get(key));
            text.map(|text| rotation::authorities(text, kind, now)).unwrap_or_default()
        };
        Self { mesh: of(root_ca::KEY, AuthorityKind::Mesh), manager: of(root_ca::MANAGER_KEY, AuthorityKind::Manager) }
    }

    /// True before the first start.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl LeaseWatch {
    pub fn of(lease: String) -> Self {
        Self { lease, version: None, idle: 0 }
    }

    /// Takes the version that was read. Returns whether nobody has renewed the Lease for so long that nobody leads.
    ///
    /// Failed reads do not count: the leader could not renew it either.
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
        BasicConstraints, CertificateParams, CidrSubnet, DnType, GeneralSubtree, IsCa, KeyPair, NameConstraints,
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
    fn a_leader_is_gone_when_its_lease_stays_unrenewed() {
        let mut lease_watch = LeaseWatch::of("ctrlmesh-manager".to_owned());
        for version in 0..100 {
            assert!(!lease_watch.is_gone(Some(version.to_string())), "it was renewed");
        }
        for look in 1..=LOOKS {
            assert_eq!(lease_watch.is_gone(Some("99".to_owned())), look == LOOKS);
        }
        assert!(!lease_watch.is_gone(Some("100".to_owned())), "another leads");
        assert!(!lease_watch.is_gone(None), "somebody deleted it");
        for look in 1..=LOOKS {
            assert_eq!(lease_watch.is_gone(None), look == LOOKS);
        }
    }

    fn made(kind: AuthorityKind, at: SystemTime) -> Authority {
        Authority::generate(kind.common_name(), &Names::of(["kubernetes"]), LIFE, at).unwrap()
    }

    fn contents(pem: &str) -> Vec<u8> {
        pem::parse(pem).unwrap().into_contents()
    }

    fn all(pems: &[String]) -> Vec<Vec<u8>> {
        pems.iter().map(|pem| contents(pem)).collect()
    }

    #[test]
    fn only_our_unexpired_authorities_stay_trusted() {
        let now = SystemTime::now();
        let [old, new, ended] = [now - LIFE / 2, now, now - LIFE * 2].map(|at| made(AuthorityKind::Mesh, at));
        let manager = made(AuthorityKind::Manager, now);
        let foreign = rcgen::generate_simple_self_signed(["other".to_owned()]).unwrap().cert.pem();
        let text = [new.pem(), ended.pem(), manager.pem(), &foreign, "nonsense\n", old.pem()];
        let text = text.concat();
        let published = TrustedAuthorities::of(&map(&text, manager.pem()), now);
        assert_eq!(all(&published.mesh), [contents(new.pem()), contents(old.pem())]);
        assert_eq!(all(&published.manager), [contents(manager.pem())]);
        assert!(TrustedAuthorities::of(&ConfigMap::default(), now).is_empty());
        assert!(TrustedAuthorities::of(&map("", "nonsense"), now).is_empty());
    }

    #[test]
    fn a_truncated_certificate_does_not_hide_the_next() {
        let now = SystemTime::now();
        let (cut, next) = (made(AuthorityKind::Mesh, now), made(AuthorityKind::Mesh, now));
        let text = format!("{}\n{}", &cut.pem()[..200], next.pem());
        assert_eq!(all(&TrustedAuthorities::of(&map(&text, ""), now).mesh), [contents(next.pem())]);
    }

    #[test]
    fn another_name_or_missing_constraints_are_not_ours() {
        let now = SystemTime::now();
        let addresses = CidrSubnet::from_addr_prefix(Ipv4Addr::UNSPECIFIED.into(), 0);
        let dns = || GeneralSubtree::DnsName("kubernetes".to_owned());
        let ours = AuthorityKind::Mesh.common_name();
        for (called, permitted_subtrees, is_ours) in
            [(ours, vec![dns()], true), (ours, Vec::new(), false), ("other", vec![dns()], false)]
        {
            let excluded_subtrees = vec![GeneralSubtree::IpAddress(addresses)];
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, called);
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            params.name_constraints = Some(NameConstraints { permitted_subtrees, excluded_subtrees });
            params.not_after = (now + LIFE).into();
            let pem = params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
            assert_eq!(!TrustedAuthorities::of(&map(&pem, ""), now).is_empty(), is_ours, "{called}");
        }
    }
}
