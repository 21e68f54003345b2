//! Two certificate authorities, the API server's and the mesh's, and their files.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, KeyUsagePurpose};
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::PrivatePkcs8KeyDer;
use tempfile::TempDir;

pub(crate) struct Pki {
    pub(crate) dir: TempDir,
    real: CertifiedIssuer<'static, KeyPair>,
    mesh: CertifiedIssuer<'static, KeyPair>,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let pki =
            Self { dir: TempDir::new().unwrap(), real: authority("real"), mesh: authority("mesh") };
        fs::write(pki.path("real.crt"), pki.real.pem()).unwrap();
        fs::write(pki.path("mesh.crt"), pki.mesh.pem()).unwrap();
        fs::write(pki.path("mesh.key"), pki.mesh.key().serialize_pem()).unwrap();
        pki
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What the scripted API server presents; `protocols` in the order it likes them.
    pub(crate) fn server(&self, protocols: &[&str]) -> Arc<ServerConfig> {
        let key = KeyPair::generate().unwrap();
        let params =
            CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
        let leaf = params.signed_by(&key, &self.real).unwrap();
        let mut config =
            ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_no_client_auth()
                .with_single_cert(
                    vec![leaf.der().clone()],
                    PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
                )
                .unwrap();
        config.alpn_protocols =
            protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }

    /// How a client believes the proxy: it knows the mesh CA only.
    pub(crate) fn client(&self, protocols: &[&str]) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(self.mesh.der().clone()).unwrap();
        let mut config =
            ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
        config.alpn_protocols =
            protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}
