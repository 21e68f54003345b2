//! Which authorities follow each other, and when?
//!
//! Pure. Whoever must believe an authority is told of it long before it signs anything, and goes on being told of the
//! one before for as long as something that it signed could be shown: `current` signs, `next` are believed and sign only
//! what those before them may not, `previous` are believed until they end. Programs read their certificate authorities
//! once, at their start, so a change leaves them a quarter of an authority's life for that, and a name that is new (the
//! API server has another address) takes nothing from those who know the authorities before it: the oldest that may
//! sign does.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use rustls_pki_types::CertificateDer;

use crate::ca::authority::{self, Authority, AuthorityError, Names, SignError};

/// After which time whoever follows what is to be believed knows a new authority: volumes follow their ConfigMap in two
/// minutes, and what has to be restarted can be.
const KNOWN: Duration = Duration::from_hours(24);

/// How many authorities that do not sign in the usual course yet there may be: each is believed by everybody.
const MOST_NEXT: usize = 8;

/// How a certificate begins.
const CERTIFICATE_BEGIN: &str = "-----BEGIN CERTIFICATE-----";

/// How a certificate ends.
const CERTIFICATE_END: &str = "-----END CERTIFICATE-----";

/// How a key ends.
const KEY_END: &str = "-----END PRIVATE KEY-----";

/// Whom an authority speaks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The API server, to operators.
    Mesh,
    /// The manager, to proxies and to the API server.
    Manager,
}

/// An authority, the one before and the one after.
#[derive(Clone, Debug)]
pub struct Line {
    /// Signs, and is believed.
    pub current: Authority,
    /// Are believed, and will sign, oldest first. Until then they sign what those before them may not.
    pub next: Vec<Authority>,
    /// Are believed until they end. PEM, one certificate each.
    pub previous: Vec<String>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// A next authority is to be made.
    Prepare,
    /// The next one is to sign.
    Promote,
    /// One that has ended is to go.
    Forget,
}

/// The data of a Secret.
pub type Data = BTreeMap<String, ByteString>;

/// A Secret that holds no authority.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// A key is missing.
    #[error("{key:?} is missing")]
    Missing {
        /// Which.
        key: String,
    },
    /// What is there is none.
    #[error("read {key:?}")]
    Authority {
        /// Which.
        key: String,
        /// Why.
        #[source]
        source: AuthorityError,
    },
}

// === impl Kind ===

impl Kind {
    /// How its certificates call it.
    pub fn called(self) -> &'static str {
        match self {
            Self::Mesh => "ctrlmesh mesh CA",
            Self::Manager => "ctrlmesh manager CA",
        }
    }

    fn key(self, rest: &str) -> String {
        match self {
            Self::Mesh => format!("mesh{rest}"),
            Self::Manager => format!("manager{rest}"),
        }
    }
}

// === impl Line ===

impl Line {
    /// The first of its line, where `previous` are believed already, in PEM, one certificate each.
    ///
    /// # Errors
    /// Where one of the names cannot be in a certificate.
    pub fn begin(
        kind: Kind,
        names: &Names,
        validity: Duration,
        now: SystemTime,
        previous: Vec<String>,
    ) -> Result<Self, AuthorityError> {
        let current = Authority::make(kind.called(), names, validity, now)?;
        Ok(Self { current, next: Vec::new(), previous })
    }

    /// What is to be done, now that `names` must be spoken for.
    pub fn due(&self, names: &Names, now: SystemTime) -> Option<Due> {
        if self.signs().is_some_and(|signs| now >= signs) {
            return Some(Due::Promote);
        }
        let newest = self.believed().rfind(|one| one.names().cover(names));
        if newest.is_none_or(|newest| now >= newest.validity().0 + lives(newest) / 2) {
            return Some(Due::Prepare);
        }
        let gone = self.previous.iter().any(|pem| ended(pem, now))
            || self.next.iter().any(|next| next.validity().1 <= now);
        gone.then_some(Due::Forget)
    }

    /// From when on the oldest of the next signs, in turn; none where there is none.
    fn signs(&self) -> Option<SystemTime> {
        let next = self.next.first()?;
        let (begin, end) = self.current.validity();
        let life = lives(&self.current);
        let in_turn = (begin + life * 3 / 4).max(next.validity().0 + life / 4);
        // Not so late that nobody could follow.
        Some(in_turn.min(end - life / 8))
    }

    /// When the oldest of the next was made, and from when on it signs; none where there is none.
    pub fn follows(&self) -> Option<(SystemTime, SystemTime)> {
        Some((self.next.first()?.made(), self.signs()?))
    }

    /// What the authority that signs may speak for.
    pub fn spoken_for(&self) -> &Names {
        self.current.names()
    }

    /// Whether one of those that are believed may speak for all of `names`.
    pub fn covers(&self, names: &Names) -> bool {
        self.believed().any(|one| one.names().cover(names))
    }

    /// Does what is due.
    ///
    /// # Errors
    /// Where one of the names cannot be in a certificate.
    pub fn step(
        mut self,
        due: Due,
        kind: Kind,
        names: &Names,
        validity: Duration,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        match due {
            Due::Prepare => {
                // What comes and goes, as addresses in a rollout, is to be no new authority each time.
                let young = self.next.iter().filter(|next| !is_known(next, now));
                let names = young.fold(names.clone(), |names, next| names.and(next.names()));
                self.next.push(Authority::make(kind.called(), &names, validity, now)?);
                if self.next.len() > MOST_NEXT {
                    self.previous.push(self.next.remove(0).pem().to_owned());
                }
            }
            Due::Promote => {
                if !self.next.is_empty() {
                    let next = self.next.remove(0);
                    self.previous.push(self.current.pem().to_owned());
                    self.current = next;
                }
            }
            Due::Forget => {
                self.previous.retain(|pem| !ended(pem, now));
                self.next.retain(|next| next.validity().1 > now);
            }
        }
        Ok(self)
    }

    /// Signs a request (DER) by the oldest authority that may: it is the one that most believe.
    ///
    /// # Errors
    /// Where it asks for what none may speak for.
    pub fn sign(
        &self,
        request: &[u8],
        now: SystemTime,
    ) -> Result<Vec<CertificateDer<'static>>, SignError> {
        let mut signed = self.current.sign(request, now);
        for next in &self.next {
            if !matches!(signed, Err(SignError::Outside { .. })) {
                break;
            }
            signed = next.sign(request, now);
        }
        signed
    }

    /// By which authority, and for which of `names`, somebody presents himself: by the oldest that may speak for all of
    /// them and is known by now, else by the current one for those that it may speak for.
    pub fn presents(&self, names: &Names, now: SystemTime) -> (&Authority, Names) {
        let mut known = self.next.iter().filter(|next| is_known(next, now));
        if self.current.names().cover(names) {
            return (&self.current, names.clone());
        }
        match known.find(|next| next.names().cover(names)) {
            Some(next) => (next, names.clone()),
            None => (&self.current, names.both(self.current.names())),
        }
    }

    /// Those that sign, or will, oldest first.
    fn believed(&self) -> impl DoubleEndedIterator<Item = &Authority> {
        [&self.current].into_iter().chain(&self.next)
    }

    /// Whom to believe, in PEM.
    pub fn bundle(&self) -> String {
        let all = self.believed().map(Authority::pem);
        all.chain(self.previous.iter().map(String::as_str))
            .flat_map(|pem| [pem.trim_end(), "\n"])
            .collect()
    }

    /// Reads a line from the data of a Secret.
    ///
    /// # Errors
    /// Where something is missing there, or none of ours.
    pub fn read(kind: Kind, data: &Data) -> Result<Self, LineError> {
        let text = |rest: &str| {
            let bytes = data.get(&kind.key(rest))?;
            Some(String::from_utf8_lossy(&bytes.0).into_owned())
        };
        let authority = |certificate: &str, key: &str| {
            let key = text(key).ok_or_else(|| LineError::Missing { key: kind.key(key) })?;
            let pem = text(certificate)
                .ok_or_else(|| LineError::Missing { key: kind.key(certificate) })?;
            Authority::read(pem, key)
                .map_err(|source| LineError::Authority { key: kind.key(certificate), source })
        };
        let pems = |rest: &str, end| text(rest).map(|text| blocks(&text, end)).unwrap_or_default();
        let next = pems("-next.crt", CERTIFICATE_END);
        let next_keys = pems("-next.key", KEY_END);
        if next.len() != next_keys.len() {
            return Err(LineError::Missing { key: kind.key("-next.key") });
        }
        let next = next.into_iter().zip(next_keys).map(|(pem, key)| {
            let key_of = |source| LineError::Authority { key: kind.key("-next.crt"), source };
            Authority::read(pem, key).map_err(key_of)
        });
        Ok(Self {
            current: authority(".crt", ".key")?,
            next: next.collect::<Result<_, _>>()?,
            previous: pems("-previous.crt", CERTIFICATE_END),
        })
    }

    /// Writes it into the data of a Secret.
    pub fn write(&self, kind: Kind, data: &mut Data) {
        let mut put = |rest: &str, text: Option<&str>| match text {
            Some(text) => {
                drop(data.insert(kind.key(rest), ByteString(text.as_bytes().to_vec())));
            }
            None => drop(data.remove(&kind.key(rest))),
        };
        put(".crt", Some(self.current.pem()));
        put(".key", Some(self.current.key()));
        let all = |part: fn(&Authority) -> &str| {
            self.next.iter().flat_map(|next| [part(next).trim_end(), "\n"]).collect::<String>()
        };
        let some = |text: String| (!text.is_empty()).then_some(text);
        put("-next.crt", some(all(Authority::pem)).as_deref());
        put("-next.key", some(all(Authority::key)).as_deref());
        put("-previous.crt", some(self.previous.concat()).as_deref());
    }
}

/// The authorities of our `kind` in a bundle, in PEM, one certificate each, but for those that have ended.
pub fn authorities(bundle: &str, kind: Kind, now: SystemTime) -> Vec<String> {
    let blocks = blocks(bundle, CERTIFICATE_END).into_iter();
    // Before the last there may be one without an end.
    let certificates =
        blocks.filter_map(|block| Some(block[block.rfind(CERTIFICATE_BEGIN)?..].to_owned()));
    let is_ours = |pem: &str| authority::is_ours(pem.as_bytes(), kind.called());
    certificates.filter(|pem| is_ours(pem) && !ended(pem, now)).collect()
}

/// Whether the certificate has ended; one that cannot be read has.
fn ended(pem: &str, now: SystemTime) -> bool {
    authority::end_of(pem.as_bytes()).is_none_or(|end| end <= now)
}

/// How long it lives.
fn lives(authority: &Authority) -> Duration {
    let (begin, end) = authority.validity();
    end.duration_since(begin).unwrap_or_default()
}

/// Whether those who follow what is to be believed know it by now.
fn is_known(authority: &Authority, now: SystemTime) -> bool {
    now >= authority.validity().0 + KNOWN.min(lives(authority) / 4)
}

/// What follows each other in a text, one by one, each with its `end`.
fn blocks(text: &str, end: &str) -> Vec<String> {
    let blocks = text.split_inclusive(end).filter(|block| block.contains(end));
    blocks.map(|block| format!("{}\n", block.trim())).collect()
}

#[cfg(test)]
mod tests;
