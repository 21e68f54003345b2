//! The certificate authority of the cluster's API server, as the kubeconfig or the pod's file has it.
//!
//! Operators that may fail open trust it beside the mesh. In a pod it is a file, which changes when the cluster rotates
//! its authority.

use std::fs;
use std::path::PathBuf;
use std::sync::RwLock;

use ctrlmesh_runtime::sync::{read, write};
use kube::Config;

const CERTIFICATE: &str = "CERTIFICATE";

#[derive(Debug)]
pub struct ClusterCa {
    file: Option<PathBuf>,
    /// PEM, as last read.
    known: RwLock<String>,
}

impl ClusterCa {
    pub fn of(config: &Config) -> Self {
        let encode = |der: &Vec<u8>| pem::encode(&pem::Pem::new(CERTIFICATE, der.clone()));
        let known = config.root_cert.iter().flatten().map(encode).collect::<String>();
        Self { file: config.root_cert_file.clone(), known: RwLock::new(known) }
    }

    /// PEM. Where the file cannot be read, the last text that was read.
    pub fn pem(&self) -> String {
        if let Some(now) = self.read() {
            *write(&self.known) = now;
        }
        read(&self.known).clone()
    }

    /// A file without a certificate, such as one that is being written, yields nothing.
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
    fn a_file_is_followed_unless_it_has_no_certificate() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.crt");
        let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
        config.root_cert = Some(vec![b"one".to_vec()]);
        assert_eq!(ClusterCa::of(&config).pem(), certificate(b"one"), "there is no file");
        config.root_cert_file = Some(file.clone());
        let cluster = ClusterCa::of(&config);
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
