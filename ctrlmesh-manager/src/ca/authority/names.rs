//! The names for which an authority may sign.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rcgen::string::Ia5String;
use rcgen::{CidrSubnet, GeneralSubtree, NameConstraints, SanType};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;

use super::AuthorityError;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Exact names. A constraint also permits names below them, which we never sign.
    pub dns: BTreeSet<String>,
    pub addresses: BTreeSet<IpAddr>,
}

impl Names {
    pub fn of<T: AsRef<str>>(names: impl IntoIterator<Item = T>) -> Self {
        let mut these = Self::default();
        for name in names {
            match name.as_ref().parse() {
                Ok(address) => drop(these.addresses.insert(address)),
                Err(_) => drop(these.dns.insert(name.as_ref().to_ascii_lowercase())),
            }
        }
        these
    }

    pub fn count(&self) -> usize {
        self.dns.len() + self.addresses.len()
    }

    pub fn contains_all(&self, others: &Self) -> bool {
        self.dns.is_superset(&others.dns) && self.addresses.is_superset(&others.addresses)
    }

    #[must_use]
    pub fn union(&self, others: &Self) -> Self {
        Self { dns: &self.dns | &others.dns, addresses: &self.addresses | &others.addresses }
    }

    #[must_use]
    pub fn intersection(&self, others: &Self) -> Self {
        Self { dns: &self.dns & &others.dns, addresses: &self.addresses & &others.addresses }
    }

    /// Names that `others` lack, printed.
    pub fn missing_from(&self, others: &Self) -> String {
        let dns = self.dns.difference(&others.dns).cloned();
        let addresses = self.addresses.difference(&others.addresses).map(ToString::to_string);
        dns.chain(addresses).collect::<Vec<_>>().join(", ")
    }

    pub(super) fn permit(&self, name: &SanType) -> bool {
        match name {
            SanType::DnsName(name) => self.dns.contains(&name.as_str().to_ascii_lowercase()),
            SanType::IpAddress(address) => self.addresses.contains(address),
            _ => false,
        }
    }

    pub(super) fn alternative(&self) -> Result<Vec<SanType>, AuthorityError> {
        let dns = self.dns.iter().map(|name| Ok(SanType::DnsName(ia5(name)?)));
        dns.chain(self.addresses.iter().map(|address| Ok(SanType::IpAddress(*address)))).collect()
    }

    /// Where no address is permitted, all are excluded: a type without constraints is permitted.
    pub(super) fn constraints(&self) -> NameConstraints {
        let one = |address: &IpAddr| {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(*address, bits))
        };
        let every = |address| GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(address, 0));
        let dns = self.dns.iter().cloned().map(GeneralSubtree::DnsName);
        let excluded = if self.addresses.is_empty() {
            vec![every(Ipv4Addr::UNSPECIFIED.into()), every(Ipv6Addr::UNSPECIFIED.into())]
        } else {
            Vec::new()
        };
        NameConstraints {
            permitted_subtrees: dns.chain(self.addresses.iter().map(one)).collect(),
            excluded_subtrees: excluded,
        }
    }

    pub(super) fn constrained(certificate: &X509Certificate<'_>) -> Option<Self> {
        let extension = certificate.name_constraints().ok()??;
        let mut names = Self::default();
        for subtree in extension.value.permitted_subtrees.iter().flatten() {
            match &subtree.base {
                GeneralName::DNSName(name) => drop(names.dns.insert((*name).to_owned())),
                GeneralName::IPAddress(bytes) => drop(names.addresses.insert(address(bytes)?)),
                _ => return None,
            }
        }
        extension.critical.then_some(names)
    }
}

/// The address of a constraint that permits a single one.
fn address(constraint: &[u8]) -> Option<IpAddr> {
    let (address, mask) = constraint.split_at_checked(constraint.len() / 2)?;
    if mask.iter().any(|byte| *byte != 0xff) {
        return None;
    }
    let v4 = <[u8; 4]>::try_from(address).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(address).map(IpAddr::from)).ok()
}

fn ia5(name: &str) -> Result<Ia5String, AuthorityError> {
    Ia5String::try_from(name).map_err(|_unfit| AuthorityError::Name { name: name.to_owned() })
}
