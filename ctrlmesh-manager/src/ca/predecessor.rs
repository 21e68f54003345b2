//! An authority that signs no more, and is trusted until it ends.

use crate::ca::authority::{Authority, AuthorityError};
use crate::ca::namespace::Seed;
use ctrlmesh_common::wire;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Predecessor {
    pem: String,
    /// What authorities of namespaces follow from. `None` where there never were any, or where only the certificate was
    /// found.
    seed: Option<Seed>,
}

impl Predecessor {
    /// Its key is forgotten.
    ///
    /// # Errors
    /// Where that is no PEM.
    pub fn of(authority: &Authority) -> Result<Self, AuthorityError> {
        Ok(Self { pem: authority.pem().to_owned(), seed: authority.seed()? })
    }

    /// With what `seeds` has of it, as [`Predecessor::seed_line`] wrote that.
    pub fn read(pem: String, seeds: &str) -> Self {
        let lines = seeds.lines().filter_map(|line| line.split_once(' '));
        let digest = digest(&pem);
        let mut seed = lines.filter(|(of, _)| *of == digest).filter_map(|(_, seed)| seed.parse().ok());
        Self { seed: seed.next(), pem }
    }

    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A line that says whose seed it is, and the seed. So an earlier version that knows no seeds may add certificates
    /// and take some away.
    pub fn seed_line(&self) -> Option<String> {
        Some(format!("{} {}\n", digest(&self.pem), self.seed.as_ref()?))
    }

    /// The authority of `namespace` under it, where there is one.
    ///
    /// # Errors
    /// Where the certificate is not one of ours.
    pub fn of_namespace(&self, namespace: &str) -> Result<Option<Authority>, AuthorityError> {
        self.seed.as_ref().map(|seed| seed.authority(&self.pem, namespace)).transpose()
    }
}

fn digest(pem: &str) -> String {
    format!("{:016x}", wire::digest(pem.trim().as_bytes()))
}

impl From<String> for Predecessor {
    fn from(pem: String) -> Self {
        Self { pem, seed: None }
    }
}
