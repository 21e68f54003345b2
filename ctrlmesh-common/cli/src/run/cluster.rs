//! The API server of a context: its address, whom it trusts, and which certificate it is shown.

use std::net::IpAddr;
use std::path::PathBuf;
use std::{env, fs};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls_pki_types::ServerName;

use crate::run::kubeconfig::{Chosen, Fields, text};
use ctrlmesh_proxy::config::Upstream;
use ctrlmesh_proxy::upstream::{Address, Target};

/// Where systems keep the authorities that they believe, in the order in which Go looks.
const SYSTEM_AUTHORITIES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// An API server, as a kubeconfig describes it.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    /// The URL as it was written.
    pub(crate) url: String,
    pub(crate) server: Upstream,
    pub(crate) target: Target,
    /// The names that clients expect in its certificate.
    pub(crate) names: Vec<String>,
    /// Who vouches for it.
    pub(crate) authority: Pem,
    /// An HTTP or SOCKS proxy on the way.
    pub(crate) proxy_url: Option<String>,
    /// The user's certificate and key.
    pub(crate) identity: Option<(Pem, Pem)>,
}

/// Where a PEM comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Pem {
    /// A file, read whenever it is needed.
    File(PathBuf),
    /// It stood in the kubeconfig itself.
    Data(Vec<u8>),
}

/// Why a cluster or a user cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClusterError {
    #[error("the cluster of context {context:?} has no server")]
    NoServer { context: String },
    #[error("the cluster's server {url:?} is not https://HOST:PORT: {why}")]
    Server { url: String, why: &'static str },
    #[error(
        "the cluster says insecure-skip-tls-verify, but the API server is always verified: give its CA with --certificate-authority FILE, or a kubeconfig that has it"
    )]
    Insecure,
    #[error(
        "the cluster names no certificate authority and this system keeps none: give the CA with --certificate-authority FILE"
    )]
    NoAuthority,
    #[error("decode {field} of the kubeconfig")]
    Data { field: String, source: base64::DecodeError },
    #[error("the user of context {context:?} has a client certificate or a key, but not both")]
    HalfIdentity { context: String },
}

impl Cluster {
    /// Reads the chosen context; `authority` stands in place of the kubeconfig's.
    pub(crate) fn of(chosen: &Chosen, authority: Option<PathBuf>) -> Result<Self, ClusterError> {
        let context = || chosen.name.clone();
        let cluster = &chosen.cluster;
        let url = text(cluster, "server").ok_or_else(|| ClusterError::NoServer { context: context() })?;
        let server = server(url)?;
        let tls_name = text(cluster, "tls-server-name").unwrap_or(&server.host);
        let bad_name = |_unfit| wrong(url, "its name is none that a certificate can carry");
        let name = ServerName::try_from(tls_name.to_owned()).map_err(bad_name)?;
        let address = match server.host.parse::<IpAddr>() {
            Ok(ip) => Address::Socket((ip, server.port).into()),
            Err(_) => Address::Host(server.host.clone(), server.port),
        };
        let identity = match (pem(&chosen.user, "client-certificate")?, pem(&chosen.user, "client-key")?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(ClusterError::HalfIdentity { context: context() }),
        };
        Ok(Self {
            url: url.to_owned(),
            names: vec![server.host.clone(), tls_name.to_owned()],
            target: Target { address, name },
            server,
            authority: believed(cluster, authority)?,
            proxy_url: text(cluster, "proxy-url").map(str::to_owned),
            identity,
        })
    }
}

fn server(url: &str) -> Result<Upstream, ClusterError> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(wrong(url, "it has no scheme; write https:// before it"));
    };
    if scheme != "https" {
        return Err(wrong(url, "without TLS nobody knows who answers"));
    }
    let path = rest.split_once('/').is_some_and(|(_, path)| !path.trim_matches('/').is_empty());
    if path || rest.contains(['?', '#']) {
        return Err(wrong(url, "requests below a path cannot be told apart; name the API server itself"));
    }
    let bare = format!("https://{}", rest.trim_end_matches('/'));
    bare.parse().map_err(|_unfit| wrong(url, "it names no host, or a user"))
}

fn wrong(url: &str, why: &'static str) -> ClusterError {
    ClusterError::Server { url: url.to_owned(), why }
}

fn believed(cluster: &Fields, given: Option<PathBuf>) -> Result<Pem, ClusterError> {
    if let Some(file) = given {
        return Ok(Pem::File(file));
    }
    if cluster.get("insecure-skip-tls-verify").and_then(serde_json::Value::as_bool) == Some(true) {
        return Err(ClusterError::Insecure);
    }
    if let Some(pem) = pem(cluster, "certificate-authority")? {
        return Ok(pem);
    }
    let own = env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let usual = SYSTEM_AUTHORITIES.iter().map(PathBuf::from);
    let found = own.into_iter().chain(usual).find(|file| fs::metadata(file).is_ok());
    found.map(Pem::File).ok_or(ClusterError::NoAuthority)
}

/// `name-data`, which comes first, or the file of `name`.
fn pem(fields: &Fields, name: &str) -> Result<Option<Pem>, ClusterError> {
    let field = format!("{name}-data");
    if let Some(data) = text(fields, &field) {
        let data: String = data.split_whitespace().collect();
        let decoded = STANDARD.decode(data);
        return decoded.map(|bytes| Some(Pem::Data(bytes))).map_err(|source| ClusterError::Data { field, source });
    }
    Ok(text(fields, name).map(|file| Pem::File(file.into())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chosen(cluster: serde_json::Value, user: serde_json::Value) -> Chosen {
        let fields = |value| serde_json::from_value(value).unwrap();
        Chosen { name: "dev".into(), cluster: fields(cluster), user: fields(user), context: Fields::new() }
    }

    fn of(cluster: serde_json::Value) -> Result<Cluster, ClusterError> {
        Cluster::of(&chosen(cluster, json!({})), None)
    }

    #[test]
    fn the_name_in_the_certificate_may_be_another_than_the_host() {
        let cluster = of(json!({
            "server": "https://10.0.0.1:6443/", "tls-server-name": "api.example.com",
            "certificate-authority-data": "QUJD",
        }));
        let cluster = cluster.unwrap();
        assert_eq!(cluster.names, ["10.0.0.1", "api.example.com"]);
        assert_eq!(cluster.target.name, ServerName::try_from("api.example.com").unwrap());
        assert_eq!(cluster.target.address, Address::Socket("10.0.0.1:6443".parse().unwrap()));
        assert_eq!(cluster.authority, Pem::Data(b"ABC".to_vec()));
    }

    #[test]
    fn a_server_that_cannot_be_served_is_refused_with_the_reason() {
        for (url, why) in [
            ("http://10.0.0.1:8080", "without TLS"),
            ("10.0.0.1:6443", "no scheme"),
            ("https://rancher/k8s/clusters/c-1", "below a path"),
            ("https://me@host", "a user"),
            ("https://", "no host"),
        ] {
            let error = of(json!({"server": url})).unwrap_err().to_string();
            assert!(error.contains(why), "{url}: {error}");
        }
        assert!(matches!(of(json!({})), Err(ClusterError::NoServer { .. })));
    }

    #[test]
    fn an_unverified_server_is_refused_without_its_authority() {
        let cluster = json!({"server": "https://a", "insecure-skip-tls-verify": true});
        let error = of(cluster.clone()).unwrap_err();
        assert!(error.to_string().contains("--certificate-authority"), "{error}");
        let given = Cluster::of(&chosen(cluster, json!({})), Some("ca.crt".into())).unwrap();
        assert_eq!(given.authority, Pem::File("ca.crt".into()));
    }

    #[test]
    fn data_comes_before_a_file_and_half_an_identity_is_refused() {
        let cluster = json!({"server": "https://a", "certificate-authority": "/ca"});
        let user = json!({
            "client-certificate": "/crt", "client-certificate-data": "QQ==", "client-key": "/key",
        });
        let both = Cluster::of(&chosen(cluster.clone(), user), None).unwrap();
        assert_eq!(both.identity, Some((Pem::Data(b"A".to_vec()), Pem::File("/key".into()))));
        let half = Cluster::of(&chosen(cluster.clone(), json!({"client-key": "/key"})), None);
        assert!(matches!(half, Err(ClusterError::HalfIdentity { .. })));
        let broken = Cluster::of(&chosen(cluster, json!({"client-key-data": "?"})), None);
        assert!(broken.unwrap_err().to_string().contains("client-key-data"));
    }
}
