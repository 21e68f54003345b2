//! The certificates of one control plane, made anew for each.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// The names and addresses that every API server of ours answers to.
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
#[derive(Debug)]
pub(crate) struct Pki {
    folder: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
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

impl Pki {
    /// Makes what every control plane needs in `folder`; its API servers also answer to `addresses`.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub(crate) fn make(folder: &Path, addresses: &[Ipv4Addr]) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let authority = authority()?;
        let ca = folder.join("ca.crt");
        fs::write(&ca, authority.pem())?;
        let mut names = SERVER_NAMES.map(String::from).to_vec();
        names.extend(addresses.iter().map(ToString::to_string));
        let (service_account_key, service_account_public_key) =
            (folder.join("service-account.key"), folder.join("service-account.pub"));
        let signer = key()?;
        fs::write(&service_account_key, signer.serialize_pem())?;
        fs::write(&service_account_public_key, signer.public_key_pem())?;
        Ok(Self {
            ca,
            server: server(folder, &authority, "kube-apiserver", names)?,
            admin: client(folder, &authority, "admin", "system:masters")?,
            service_account_key,
            service_account_public_key,
            folder: folder.to_owned(),
            authority,
        })
    }

    /// The certificate and key of a user, who is a member of one group.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub(crate) fn client(&self, user: &str, group: &str) -> io::Result<Pair> {
        client(&self.folder, &self.authority, user, group)
    }

    /// The certificate and key of a server.
    ///
    /// # Errors
    /// Where a file cannot be written.
    pub(crate) fn server(&self, name: &str, address: Ipv4Addr) -> io::Result<Pair> {
        server(&self.folder, &self.authority, name, vec![address.to_string()])
    }
}

fn server(
    folder: &Path,
    ca: &CertifiedIssuer<'static, KeyPair>,
    name: &str,
    answers_to: Vec<String>,
) -> io::Result<Pair> {
    let mut params = CertificateParams::new(answers_to).map_err(io::Error::other)?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    issue(folder, name, &params, ca)
}

fn client(folder: &Path, ca: &CertifiedIssuer<'static, KeyPair>, user: &str, group: &str) -> io::Result<Pair> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, user);
    params.distinguished_name.push(DnType::OrganizationName, group);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    issue(folder, &user.replace(':', "-"), &params, ca)
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
    let pair = Pair { certificate: folder.join(format!("{name}.crt")), key: folder.join(format!("{name}.key")) };
    fs::write(&pair.certificate, certificate.pem())?;
    fs::write(&pair.key, key.serialize_pem())?;
    Ok(pair)
}
