//! How is it said where the manager is?

use std::net::{AddrParseError, IpAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::Manager;

/// How the manager is reached, on the command line.
#[derive(Clone, Debug, Default, Args)]
pub struct ManagerArgs {
    /// The manager, which tells the policy and signs the certificate; needs --manager-ca, --token and --state-dir.
    #[arg(long, env = "CTRLMESH_PROXY_MANAGER", value_name = "HOST:PORT",
          requires_all = ["manager_ca", "token", "state_dir"])]
    pub manager: Option<Address>,
    /// Where the manager is connected to first, before where its name leads: what Kubernetes tells pods of its Service
    /// when they start. A variable `$(NAME)`, which Kubernetes leaves as it is where there is no Service, says nothing.
    #[arg(
        long,
        env = "CTRLMESH_PROXY_MANAGER_ADDRESS",
        value_name = "ADDRESS",
        requires = "manager"
    )]
    pub manager_address: Option<Told>,
    /// The CA that the manager's certificate is verified against; read for each connection.
    #[arg(long, env = "CTRLMESH_PROXY_MANAGER_CA", value_name = "FILE")]
    pub manager_ca: Option<PathBuf>,
    /// The pod's token, made out to `ctrlmesh`; read for each connection.
    #[arg(long, env = "CTRLMESH_PROXY_TOKEN", value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// Folder in which it is kept what the manager said last, for a start without it, and what clients may have read under
    /// which policy.
    #[arg(long, env = "CTRLMESH_PROXY_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}

/// The address that Kubernetes told of the manager, if it did.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Told(Option<IpAddr>);

/// Where the manager is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

/// A text that is no address.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{text}` is not HOST:PORT")]
pub struct AddressError {
    text: String,
}

// === impl ManagerArgs ===

impl ManagerArgs {
    /// How the manager is reached, where one was named.
    pub fn manager(&self) -> Option<Manager> {
        let (address, ca) = self.manager.clone().zip(self.manager_ca.clone())?;
        let (token, state) = self.token.clone().zip(self.state_dir.clone())?;
        let at = self.manager_address.and_then(|Told(at)| at);
        Some(Manager { address, at, ca, token, state })
    }
}

// === impl Told ===

impl FromStr for Told {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        if text.starts_with("$(") { Ok(Self(None)) } else { text.parse().map(|at| Self(Some(at))) }
    }
}

// === impl Address ===

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = || AddressError { text: text.to_owned() };
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = inner.unwrap_or(host);
        let port = port.parse().map_err(|_unfit| wrong())?;
        let whole = !host.is_empty() && (inner.is_some() || !host.contains(':'));
        if whole { Ok(Self { host: host.to_owned(), port }) } else { Err(wrong()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_kubernetes_did_not_know_is_none() {
        let told = |text: &str| text.parse::<Told>();
        assert_eq!(told("10.96.0.7"), Ok(Told(Some([10, 96, 0, 7].into()))));
        assert_eq!(told("$(CTRLMESH_MANAGER_SERVICE_HOST)"), Ok(Told(None)));
        assert!(told("").is_err() && told("manager").is_err());
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let parsed = |text: &str| text.parse::<Address>().map(|one| (one.host, one.port));
        assert_eq!(parsed("manager.ns.svc:8071"), Ok(("manager.ns.svc".to_owned(), 8071)));
        assert_eq!(parsed("[::1]:1"), Ok(("::1".to_owned(), 1)));
        for wrong in ["", "a", "a:", ":1", "::1:1", "a:b", "a:70000"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
