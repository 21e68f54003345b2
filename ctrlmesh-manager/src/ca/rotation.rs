//! Rotates a certificate authority without a gap in trust.
//!
//! Pure. Clients learn of an authority long before it signs, and trust its predecessor until that expires. `current`
//! signs. `next` are trusted already, and sign only for names that older ones may not. `previous` are only trusted.
//!
//! Programs read their trust bundle once, at start. So a rotation leaves them a quarter of an authority's life. For a
//! new name, such as another address of the API server, the oldest authority that covers it signs. So programs that
//! know only older authorities lose nothing.

use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;

use crate::ca::authority::{self, Authority, AuthorityError, Names, SignError};
use crate::ca::predecessor::Predecessor;

mod stored;

pub use stored::{Data, RotationError};

/// When clients that follow the trust bundle have a new authority. Volumes follow their ConfigMap in two minutes; the
/// rest is time to restart programs.
const DISTRIBUTION_TIME: Duration = Duration::from_hours(24);

/// Every client trusts each of them.
const MAX_NEXT: usize = 8;

/// So many names does an authority cover at most, besides those that the API server has now.
const MAX_RECENT_NAMES: usize = 128;

/// How many of them may be made for new names until the first one is distributed. Each waits four times as long as the
/// one before it: 84 s, 6 min, 23 min, 90 min, 6 h and 24 h for authorities that live longer than four days. So whoever
/// changes the API server's addresses all the time cannot fill the bundle.
const MAX_YOUNG: u32 = 6;

/// How exact the time is that a certificate says.
const CLOCK_STEP: Duration = Duration::from_secs(2);

/// Each is trusted for a day at least, by [`MAX_YOUNG`], and no leaf lives longer.
const MAX_PREVIOUS: usize = 32;

/// A `ConfigMap` holds 1 MiB, and each of the mesh's four times: for pods that fail open, too, and with an authority of
/// its namespace.
const MAX_PREVIOUS_BYTES: usize = 128 * 1024;

const CERTIFICATE_BEGIN: &str = "-----BEGIN CERTIFICATE-----";

const CERTIFICATE_END: &str = "-----END CERTIFICATE-----";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthorityKind {
    /// The API server, to operators.
    Mesh,
    /// The manager, to proxies and to the API server.
    Manager,
}

/// An authority with its predecessors and successors.
#[derive(Clone, Debug)]
pub struct Rotation {
    /// Signs.
    pub current: Authority,
    /// Trusted, oldest first. They sign only for names that older ones may not, until they become `current`.
    pub next: Vec<Authority>,
    /// Trusted until they expire, oldest first.
    pub previous: Vec<Predecessor>,
}

/// Whose proxy a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder<'a> {
    /// A node's. It is believed in all namespaces.
    Node,
    /// One inside a pod of this namespace. It is believed there only.
    Pod { namespace: &'a str },
}

/// The next change of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Create a successor.
    Prepare,
    /// Let the oldest successor sign.
    Promote,
    /// Remove expired authorities.
    Forget,
}

impl AuthorityKind {
    pub fn common_name(self) -> &'static str {
        match self {
            Self::Mesh => "ctrlmesh mesh CA",
            Self::Manager => "ctrlmesh manager CA",
        }
    }

    fn generate(self, names: &Names, validity: Duration, now: SystemTime) -> Result<Authority, AuthorityError> {
        match self {
            Self::Mesh => Authority::generate_with_namespaces(self.common_name(), names, validity, now),
            Self::Manager => Authority::generate(self.common_name(), names, validity, now),
        }
    }

    fn key(self, rest: &str) -> String {
        match self {
            Self::Mesh => format!("mesh{rest}"),
            Self::Manager => format!("manager{rest}"),
        }
    }
}

impl Rotation {
    /// Creates the first authority. `previous` are certificates that clients trust already, in PEM, one each.
    ///
    /// # Errors
    /// Where a certificate cannot carry one of the names.
    pub fn begin(
        kind: AuthorityKind,
        names: &Names,
        validity: Duration,
        now: SystemTime,
        previous: Vec<String>,
    ) -> Result<Self, AuthorityError> {
        let current = kind.generate(names, validity, now)?;
        let previous = previous.into_iter().map(Predecessor::from).collect();
        let mut begun = Self { current, next: Vec::new(), previous };
        // A bundle begins with those that signed last.
        begun.previous.sort_by_key(|one| authority::begin_of(one.pem().as_bytes()));
        begun.bound_previous();
        Ok(begun)
    }

    /// The next step, where the authority must cover `names`.
    pub fn due_step(&self, names: &Names, now: SystemTime) -> Option<Step> {
        if self.promotion_time().is_some_and(|signs| now >= signs) {
            return Some(Step::Promote);
        }
        let newest = self.trusted().rfind(|one| one.names().contains_all(names));
        let is_due = match newest {
            Some(newest) => now >= newest.validity().0 + lifetime(newest) / 2,
            None => self.new_names_time(now).is_none_or(|from| now >= from),
        };
        if is_due {
            return Some(Step::Prepare);
        }
        let gone = self.previous.iter().any(|one| is_expired(one.pem(), now))
            || self.next.iter().any(|next| next.validity().1 <= now);
        gone.then_some(Step::Forget)
    }

    /// When the oldest successor is to sign.
    fn promotion_time(&self) -> Option<SystemTime> {
        let next = self.next.first()?;
        let (begin, end) = self.current.validity();
        let life = lifetime(&self.current);
        let in_turn = (begin + life * 3 / 4).max(next.validity().0 + life / 4);
        // Early enough for clients to follow.
        Some(in_turn.min(end - life / 8))
    }

    /// When the next authority for new names may be made. `None` where no other one was lately.
    pub fn new_names_time(&self, now: SystemTime) -> Option<SystemTime> {
        // One that a clock ahead of ours made holds nothing up. `made` is exact to a second.
        let is_young = |next: &&Authority| next.made() <= now + CLOCK_STEP && !is_distributed(next, now);
        let mut young = self.next.iter().filter(is_young);
        let count = young.clone().count();
        let newest = young.next_back()?;
        let left = MAX_YOUNG.saturating_sub(u32::try_from(count).unwrap_or(MAX_YOUNG));
        Some(newest.made() + distribution_time(newest) / 4_u32.pow(left))
    }

    /// When the oldest successor was created, and when it is to sign.
    pub fn successor(&self) -> Option<(SystemTime, SystemTime)> {
        Some((self.next.first()?.made(), self.promotion_time()?))
    }

    pub fn current_names(&self) -> &Names {
        self.current.names()
    }

    /// Whether one trusted authority covers all of `names`.
    pub fn covers(&self, names: &Names) -> bool {
        self.trusted().any(|one| one.names().contains_all(names))
    }

    ///
    /// # Errors
    /// Where a certificate cannot carry one of the names.
    pub fn apply(
        mut self,
        step: Step,
        kind: AuthorityKind,
        names: &Names,
        validity: Duration,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        match step {
            Step::Prepare => {
                // Addresses come and go in a rollout. One authority covers all recent ones.
                let young = self.next.iter().rev().filter(|next| !is_distributed(next, now));
                let names = young.fold(names.clone(), |names, next| {
                    let union = names.union(next.names());
                    if union.count() <= MAX_RECENT_NAMES { union } else { names }
                });
                self.next.push(kind.generate(&names, validity, now)?);
                if self.next.len() > MAX_NEXT {
                    self.previous.push(Predecessor::of(&self.next.remove(0))?);
                }
            }
            Step::Promote => {
                if !self.next.is_empty() {
                    let next = self.next.remove(0);
                    self.previous.push(Predecessor::of(&self.current)?);
                    self.current = next;
                }
            }
            Step::Forget => {
                self.previous.retain(|one| !is_expired(one.pem(), now));
                self.next.retain(|next| next.validity().1 > now);
            }
        }
        self.bound_previous();
        Ok(self)
    }

    /// Drops the oldest that are only trusted, where there are too many.
    fn bound_previous(&mut self) {
        let mut bytes: usize = self.previous.iter().map(|one| one.pem().len()).sum();
        let mut count = self.previous.len();
        let dropped = self.previous.iter().take_while(|one| {
            let is_beyond = count > MAX_PREVIOUS || bytes > MAX_PREVIOUS_BYTES;
            count -= 1;
            bytes -= one.pem().len();
            is_beyond
        });
        let dropped = dropped.count();
        drop(self.previous.drain(..dropped));
    }

    /// How many unexpired authorities `later` no longer trusts.
    pub fn dropped_by(&self, later: &Self, now: SystemTime) -> usize {
        let kept = later.bundle();
        let before = blocks(&self.bundle(), CERTIFICATE_END);
        before.iter().filter(|pem| !is_expired(pem, now) && !kept.contains(pem.trim_end())).count()
    }

    /// Signs a request (DER) with the oldest authority that may: most clients trust it.
    ///
    /// # Errors
    /// Where no authority covers the requested names.
    pub fn sign(
        &self,
        holder: Holder<'_>,
        request: &[u8],
        now: SystemTime,
    ) -> Result<Vec<CertificateDer<'static>>, SignError> {
        let sign = |authority: &Authority| match holder {
            Holder::Node => authority.sign(request, now),
            Holder::Pod { namespace } => match authority.of_namespace(namespace)? {
                Some(own) => own.sign(request, now),
                None => authority.sign(request, now),
            },
        };
        let mut signed = sign(&self.current);
        for next in &self.next {
            if !matches!(signed, Err(SignError::Outside { .. })) {
                break;
            }
            signed = sign(next);
        }
        signed
    }

    /// The authority for a serving certificate, and the part of `names` that it covers.
    ///
    /// It is the oldest that covers all of them and that clients know by now, or else the current one.
    pub fn serving_authority(&self, names: &Names, now: SystemTime) -> (&Authority, Names) {
        let mut known = self.next.iter().filter(|next| is_distributed(next, now));
        if self.current.names().contains_all(names) {
            return (&self.current, names.clone());
        }
        match known.find(|next| next.names().contains_all(names)) {
            Some(next) => (next, names.clone()),
            None => (&self.current, names.intersection(self.current.names())),
        }
    }

    /// `current` and `next`, oldest first.
    fn trusted(&self) -> impl DoubleEndedIterator<Item = &Authority> {
        [&self.current].into_iter().chain(&self.next)
    }

    /// The trust bundle, in PEM, without authorities of namespaces.
    pub fn bundle(&self) -> String {
        let all = self.trusted().map(Authority::pem);
        joined(all.chain(self.previous.iter().map(Predecessor::pem)))
    }

    /// The secret part of what is only trusted, as the Secret has it.
    pub(super) fn seeds(&self) -> String {
        self.previous.iter().filter_map(Predecessor::seed_line).collect()
    }

    /// What pods of `namespace` trust, in PEM.
    ///
    /// # Errors
    /// Where the authority of the namespace cannot be derived.
    pub fn bundle_of(&self, namespace: &str) -> Result<String, AuthorityError> {
        let mut own = Vec::new();
        for authority in self.trusted() {
            own.extend(authority.of_namespace(namespace)?);
        }
        for one in &self.previous {
            own.extend(one.of_namespace(namespace)?);
        }
        Ok(self.bundle() + &joined(own.iter().map(Authority::pem)))
    }
}

/// The unexpired authorities of our `kind` in a bundle, in PEM, one certificate each.
pub fn authorities(bundle: &str, kind: AuthorityKind, now: SystemTime) -> Vec<String> {
    let blocks = blocks(bundle, CERTIFICATE_END).into_iter();
    // The block may begin with a truncated certificate.
    let certificates = blocks.filter_map(|block| Some(block[block.rfind(CERTIFICATE_BEGIN)?..].to_owned()));
    let is_ours = |pem: &str| authority::is_ours(pem.as_bytes(), kind.common_name());
    certificates.filter(|pem| is_ours(pem) && !is_expired(pem, now)).collect()
}

/// True also for a certificate that cannot be read.
fn is_expired(pem: &str, now: SystemTime) -> bool {
    authority::end_of(pem.as_bytes()).is_none_or(|end| end <= now)
}

fn lifetime(authority: &Authority) -> Duration {
    let (begin, end) = authority.validity();
    end.duration_since(begin).unwrap_or_default()
}

/// Whether clients that follow the trust bundle have it by now.
fn is_distributed(authority: &Authority, now: SystemTime) -> bool {
    now >= authority.validity().0 + distribution_time(authority)
}

fn distribution_time(authority: &Authority) -> Duration {
    DISTRIBUTION_TIME.min(lifetime(authority) / 4)
}

fn joined<'a>(pems: impl Iterator<Item = &'a str>) -> String {
    pems.flat_map(|pem| [pem.trim_end(), "\n"]).collect()
}

/// Splits PEM into blocks, each with its `end`.
fn blocks(text: &str, end: &str) -> Vec<String> {
    let blocks = text.split_inclusive(end).filter(|block| block.contains(end));
    blocks.map(|block| format!("{}\n", block.trim())).collect()
}

#[cfg(test)]
mod tests;
