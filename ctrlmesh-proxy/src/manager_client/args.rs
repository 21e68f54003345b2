//! The command-line flags for the manager.

use std::net::{AddrParseError, IpAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::Endpoint;

#[derive(Clone, Debug, Default, Args)]
pub struct ManagerArgs {
    /// Host and port of the manager, from which policy and certificate come. Needs --manager-ca, --token and
    /// --state-dir.
    #[arg(long, env = "CTRLMESH_PROXY_MANAGER", value_name = "HOST:PORT",
          requires_all = ["manager_ca", "token", "state_dir"])]
    pub manager: Option<Address>,
    /// IP address of the manager's Service, which the proxy tries before the name in --manager. An unexpanded variable
    /// `$(NAME)` counts as not given.
    #[arg(long, env = "CTRLMESH_PROXY_MANAGER_ADDRESS", value_name = "ADDRESS", requires = "manager")]
    pub manager_address: Option<ServiceAddress>,
    /// PEM file with the CA of the manager's certificate. It is read again for each connection.
    #[arg(long, env = "CTRLMESH_PROXY_MANAGER_CA", value_name = "FILE")]
    pub manager_ca: Option<PathBuf>,
    /// File with a service account token for audience `ctrlmesh`. It is read again for each call.
    #[arg(long, env = "CTRLMESH_PROXY_TOKEN", value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// Folder for the last policy from the manager and for what clients may have read. The next process starts from it,
    /// with or without a manager.
    #[arg(long, env = "CTRLMESH_PROXY_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}

/// The manager's address from a Service variable; `None` where Kubernetes did not expand it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ServiceAddress(Option<IpAddr>);

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{text}` is not HOST:PORT")]
pub struct AddressError {
    text: String,
}

impl ManagerArgs {
    pub fn manager(&self) -> Option<Endpoint> {
        let (address, ca) = self.manager.clone().zip(self.manager_ca.clone())?;
        let (token, state) = self.token.clone().zip(self.state_dir.clone())?;
        let service_ip = self.manager_address.and_then(|ServiceAddress(ip)| ip);
        Some(Endpoint { address, service_ip, ca, token, state })
    }
}

impl FromStr for ServiceAddress {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        if text.starts_with("$(") { Ok(Self(None)) } else { text.parse().map(|at| Self(Some(at))) }
    }
}

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
    fn an_unexpanded_variable_is_no_address() {
        let told = |text: &str| text.parse::<ServiceAddress>();
        assert_eq!(told("10.96.0.7"), Ok(ServiceAddress(Some([10, 96, 0, 7].into()))));
        assert_eq!(told("$(CTRLMESH_MANAGER_SERVICE_HOST)"), Ok(ServiceAddress(None)));
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
