//! Reads and writes the data of the Secret.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;

use super::{AuthorityKind, CERTIFICATE_END, Rotation, blocks, joined};
use crate::ca::authority::{Authority, AuthorityError};
use crate::ca::predecessor::Predecessor;

const KEY_END: &str = "-----END PRIVATE KEY-----";

pub type Data = BTreeMap<String, ByteString>;

#[derive(Debug, thiserror::Error)]
pub enum RotationError {
    #[error("{key:?} is missing")]
    Missing { key: String },
    #[error("read {key:?}")]
    Authority { key: String, source: AuthorityError },
}

impl Rotation {
    ///
    /// # Errors
    /// Where a key is missing, or its value is not an authority of ours.
    pub fn read(kind: AuthorityKind, data: &Data) -> Result<Self, RotationError> {
        let text = |rest: &str| {
            let bytes = data.get(&kind.key(rest))?;
            Some(String::from_utf8_lossy(&bytes.0).into_owned())
        };
        let authority = |certificate: &str, key: &str| {
            let key = text(key).ok_or_else(|| RotationError::Missing { key: kind.key(key) })?;
            let pem = text(certificate).ok_or_else(|| RotationError::Missing { key: kind.key(certificate) })?;
            Authority::read(pem, key).map_err(|source| RotationError::Authority { key: kind.key(certificate), source })
        };
        let pems = |rest: &str, end| text(rest).map(|text| blocks(&text, end)).unwrap_or_default();
        let next = pems("-next.crt", CERTIFICATE_END);
        let next_keys = pems("-next.key", KEY_END);
        if next.len() != next_keys.len() {
            return Err(RotationError::Missing { key: kind.key("-next.key") });
        }
        let next = next.into_iter().zip(next_keys).map(|(pem, key)| {
            let key_of = |source| RotationError::Authority { key: kind.key("-next.crt"), source };
            Authority::read(pem, key).map_err(key_of)
        });
        let seeds = text("-previous.seeds").unwrap_or_default();
        let previous = pems("-previous.crt", CERTIFICATE_END).into_iter();
        let mut read = Self {
            current: authority(".crt", ".key")?,
            next: next.collect::<Result<_, _>>()?,
            previous: previous.map(|pem| Predecessor::read(pem, &seeds)).collect(),
        };
        // An earlier version may have kept more.
        read.bound_previous();
        Ok(read)
    }

    pub fn write(&self, kind: AuthorityKind, data: &mut Data) {
        let mut put = |rest: &str, text: Option<&str>| match text {
            Some(text) => {
                drop(data.insert(kind.key(rest), ByteString(text.as_bytes().to_vec())));
            }
            None => drop(data.remove(&kind.key(rest))),
        };
        put(".crt", Some(self.current.pem()));
        put(".key", Some(self.current.key()));
        let some = |text: String| (!text.is_empty()).then_some(text);
        put("-next.crt", some(joined(self.next.iter().map(Authority::pem))).as_deref());
        put("-next.key", some(joined(self.next.iter().map(Authority::key))).as_deref());
        put("-previous.crt", some(joined(self.previous.iter().map(Predecessor::pem))).as_deref());
        put("-previous.seeds", some(self.seeds()).as_deref());
    }
}
