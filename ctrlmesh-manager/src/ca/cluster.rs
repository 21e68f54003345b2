//! Who vouches for the API server itself?
//!
//! What operators that may get past their proxy believe beside the mesh. In a pod it is a file, which changes when the
//! cluster's authority is rotated.

use std::fs;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock};

use kube::Config;

/// The tag of a certificate in PEM.
const CERTIFICATE: &str = "CERTIFICATE";

/// The cluster's own certificate authority.
#[derive(Debug)]
pub struct Cluster {
    /// Where it stands, if in a file that is followed.
    file: Option<PathBuf>,
    /// What was read last, in PEM.
    known: RwLock<String>,
}

// === impl Cluster ===

impl Cluster {
    /// As `config` has it.
    pub fn of(config: &Config) -> Self {
        let encode = |der: &Vec<u8>| pem::encode(&pem::Pem::new(CERTIFICATE, der.clone()));
        let known = config.root_cert.iter().flatten().map(encode).collect::<String>();
        Self { file: config.root_cert_file.clone(), known: RwLock::new(known) }
    }

    /// In PEM, as it is now; where it cannot be read, as it was.
    pub fn pem(&self) -> String {
        if let Some(now) = self.read() {
            *self.known.write().unwrap_or_else(PoisonError::into_inner) = now;
        }
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A file that holds no certificate, such as one that is being written, says nothing.
    fn read(&self) -> Option<String> {
        let all = pem::parse_many(fs::read(self.file.as_ref()?).ok()?).ok()?;
        let certificates = all.iter().filter(|one| one.tag() == CERTIFICATE);
        let text = certificates.map(pem::encode).collect::<String>();
        (!text.is_empty()).then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(content: &[u8]) -> String {
        pem::encode(&pem::Pem::new(CERTIFICATE, content))
    }

    #[test]
    fn a_file_is_followed_and_one_without_a_certificate_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.crt");
        let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
        config.root_cert = Some(vec![b"one".to_vec()]);
        assert_eq!(Cluster::of(&config).pem(), certificate(b"one"), "there is no file");
        config.root_cert_file = Some(file.clone());
        let cluster = Cluster::of(&config);
        assert_eq!(cluster.pem(), certificate(b"one"), "it is not there yet");
        let both = certificate(b"one") + &certificate(b"two");
        fs::write(&file, format!("# ours\n{both}")).unwrap();
        assert_eq!(cluster.pem(), both);
        for wrong in ["", "-----BEGIN CERT"] {
            fs::write(&file, wrong).unwrap();
            assert_eq!(cluster.pem(), both, "{wrong:?}");
        }
        fs::write(&file, certificate(b"two")).unwrap();
        assert_eq!(cluster.pem(), certificate(b"two"));
    }
}
