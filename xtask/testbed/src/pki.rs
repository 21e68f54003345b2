//! The certificates of one control plane, made anew for each.

use std::path::{Path, PathBuf};
use std::{fs, io};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

/// The names and addresses that the API server answers to.
const SERVER_NAMES: [&str; 7] = [
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "127.0.0.1",
    "10.96.0.1",
];

/// Files, in PEM.
#[derive(Clone, Debug)]
pub(crate) struct Pki {
    /// The certificate that everybody trusts.
    pub(crate) ca: PathBuf,
    /// The API server's certificate and key.
    pub(crate) server: Pair,
    /// The certificate and key of a member of `system:masters`.
    pub(crate) admin: Pair,
    /// The key that service-account tokens are signed with.
    pub(crate) service_account_key: PathBuf,
    /// Its public half, which the API server does not find by itself.
    pub(crate) service_account_public_key: PathBuf,
}

/// A certificate and its key.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

// === impl Pki ===

impl Pki {
    /// Makes all certificates in `folder`.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub(crate) fn make(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let ca = authority()?;
        let ca_file = folder.join("ca.crt");
        fs::write(&ca_file, ca.pem())?;
        let mut server =
            CertificateParams::new(SERVER_NAMES.map(String::from)).map_err(io::Error::other)?;
        server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let mut admin = CertificateParams::default();
        admin.distinguished_name.push(DnType::CommonName, "admin");
        admin.distinguished_name.push(DnType::OrganizationName, "system:masters");
        admin.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let (service_account_key, service_account_public_key) =
            (folder.join("service-account.key"), folder.join("service-account.pub"));
        let signer = key()?;
        fs::write(&service_account_key, signer.serialize_pem())?;
        fs::write(&service_account_public_key, signer.public_key_pem())?;
        Ok(Self {
            ca: ca_file,
            server: issue(folder, "server", &server, &ca)?,
            admin: issue(folder, "admin", &admin, &ca)?,
            service_account_key,
            service_account_public_key,
        })
    }
}

fn key() -> io::Result<KeyPair> {
    KeyPair::generate().map_err(io::Error::other)
}

fn authority() -> io::Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, "testbed");
    CertifiedIssuer::self_signed(params, key()?).map_err(io::Error::other)
}

fn issue(
    folder: &Path,
    name: &str,
    params: &CertificateParams,
    ca: &CertifiedIssuer<'static, KeyPair>,
) -> io::Result<Pair> {
    let key = key()?;
    let certificate = params.signed_by(&key, ca).map_err(io::Error::other)?;
    let pair = Pair {
        certificate: folder.join(format!("{name}.crt")),
        key: folder.join(format!("{name}.key")),
    };
    fs::write(&pair.certificate, certificate.pem())?;
    fs::write(&pair.key, key.serialize_pem())?;
    Ok(pair)
}
