//! Two certificate authorities, the API server's and the mesh's, and their files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::TempDir;

pub(crate) struct Pki {
    pub(crate) dir: TempDir,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let pki = Self { dir: TempDir::new().unwrap() };
        let (real, mesh) = (authority("real"), authority("mesh"));
        let key = KeyPair::generate().unwrap();
        let names = ["127.0.0.1", "localhost"].map(str::to_owned);
        let leaf = CertificateParams::new(names).unwrap().signed_by(&key, &real).unwrap();
        let files = [
            ("real.crt", real.pem()),
            ("mesh.crt", mesh.pem()),
            ("mesh.key", mesh.key().serialize_pem()),
            ("leaf.crt", leaf.pem()),
            ("leaf.key", key.serialize_pem()),
        ];
        for (name, text) in files {
            fs::write(pki.path(name), text).unwrap();
        }
        pki
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A certificate for the API server's name and its key, signed by the mesh CA.
    pub(crate) fn issue(&self, certificate: &Path, key: &Path) {
        let text = |name: &str| fs::read_to_string(self.path(name)).unwrap();
        let mesh = KeyPair::from_pem(&text("mesh.key")).unwrap();
        let mesh = Issuer::from_ca_cert_pem(&text("mesh.crt"), mesh).unwrap();
        let own = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(["kubernetes.default.svc".to_owned()]).unwrap();
        fs::write(certificate, leaf.signed_by(&own, &mesh).unwrap().pem()).unwrap();
        fs::write(key, own.serialize_pem()).unwrap();
    }

    /// TLS of the scripted API server; `protocols` in the order of its preference.
    pub(crate) fn server(&self, protocols: &[&str]) -> Arc<ServerConfig> {
        server_of(self.dir.path(), protocols)
    }

    /// TLS of a client that trusts the mesh CA only.
    pub(crate) fn client(&self, protocols: &[&str]) -> Arc<ClientConfig> {
        client_of(&[self.path("mesh.crt")], protocols)
    }

    /// TLS of a client that also trusts the API server's CA.
    pub(crate) fn client_of_both(&self, protocols: &[&str]) -> Arc<ClientConfig> {
        client_of(&[self.path("mesh.crt"), self.path("real.crt")], protocols)
    }
}

/// TLS of a server whose certificate the API server's CA signed.
pub(crate) fn server_of(dir: &Path, protocols: &[&str]) -> Arc<ServerConfig> {
    let chain = vec![CertificateDer::from_pem_file(dir.join("leaf.crt")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(dir.join("leaf.key")).unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    Arc::new(config)
}

/// TLS of a client that trusts these CAs.
pub(crate) fn client_of(authorities: &[PathBuf], protocols: &[&str]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(CertificateDer::from_pem_file(authority).unwrap()).unwrap();
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    Arc::new(config)
}

fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}
