//! Tells connections to the API server from others.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ctrlmesh_intercept::Targets;
use tokio::sync::watch;

use crate::upstream::{Address, Target};

/// The addresses of the API server that a pod's proxy stands for.
#[derive(Clone, Debug)]
pub enum ApiServers {
    /// What the kernel redirects.
    Redirected(watch::Receiver<Targets>),
    /// What a sidecar is told.
    Told {
        target: Target,
        /// By the environment that Kubernetes gives every pod.
        cluster: Option<SocketAddr>,
        /// Its other addresses.
        others: watch::Receiver<Arc<[SocketAddr]>>,
    },
}

impl ApiServers {
    /// The name by which it is known, if it is one.
    pub(super) fn name(&self) -> Option<&str> {
        match self {
            Self::Told { target: Target { address: Address::Host(name, _), .. }, .. } => Some(name),
            _ => None,
        }
    }

    /// Where requests for the API server go, if `host` with these addresses is it; `own` are those of its name.
    pub(super) fn target(&self, host: &str, port: u16, addresses: &[IpAddr], own: &[IpAddr]) -> Option<Target> {
        let mut addresses = addresses.iter().map(|address| SocketAddr::new(*address, port));
        match self {
            Self::Redirected(targets) => {
                let targets = targets.borrow();
                let address = addresses.find(|address| targets.list.iter().any(|target| target.covers(*address)));
                address.map(Target::from)
            }
            Self::Told { target, cluster, others } => {
                let its_port = match &target.address {
                    Address::Host(_, its) => *its,
                    Address::Socket(address) => address.port(),
                };
                let is_named = its_port == port && self.name().is_some_and(|name| name.eq_ignore_ascii_case(host));
                let others = others.borrow();
                let is_known = |address: SocketAddr| {
                    target.address == Address::Socket(address)
                        || *cluster == Some(address)
                        || its_port == port && own.contains(&address.ip())
                        || others.contains(&address)
                };
                (is_named || addresses.any(is_known)).then(|| target.clone())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Upstream;

    fn addresses(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn what_the_kernel_redirects_is_the_api_server() {
        let list = ["10.96.0.1:443", "192.0.2.0/24:6443"].map(|one| one.parse().unwrap());
        let (_sender, targets) = watch::channel(Targets { name: "t".to_owned(), list: list.into() });
        let servers = ApiServers::Redirected(targets);
        let found =
            |port, texts: &[&str]| servers.target("k", port, &addresses(texts), &[]).map(|target| target.address);
        let socket = |text: &str| Some(Address::Socket(text.parse().unwrap()));
        assert_eq!(found(443, &["10.96.0.1"]), socket("10.96.0.1:443"));
        assert_eq!(found(6443, &["198.51.100.1", "192.0.2.7"]), socket("192.0.2.7:6443"));
        assert_eq!(found(6443, &["10.96.0.1"]), None);
    }

    #[test]
    fn a_sidecar_knows_its_api_server_by_name_and_by_all_its_addresses() {
        let (_sender, others) = watch::channel(Arc::from(["10.96.0.1:443".parse().unwrap()]));
        for (url, host, port, address, expected) in [
            ("https://api.example.com:6443", "API.example.com", 6443, "192.0.2.1", true),
            ("https://api.example.com:6443", "api.example.com", 443, "192.0.2.1", false),
            ("https://192.0.2.1:6443", "other", 6443, "192.0.2.1", true),
            ("https://192.0.2.1:6443", "kubernetes.default", 443, "10.96.0.1", true),
            ("https://192.0.2.1:6443", "other", 443, "192.0.2.1", false),
            ("https://api.example.com:6443", "other", 6443, "192.0.2.9", true),
            ("https://api.example.com:6443", "other", 443, "192.0.2.9", false),
            ("https://192.0.2.1:6443", "other", 443, "10.96.0.7", true),
        ] {
            let target = url.parse::<Upstream>().unwrap().target().unwrap();
            let cluster = Some("10.96.0.7:443".parse().unwrap());
            let servers = ApiServers::Told { target: target.clone(), cluster, others: others.clone() };
            let own = addresses(&["192.0.2.9"]);
            let found = servers.target(host, port, &addresses(&[address]), &own).map(|found| found.address);
            assert_eq!(found, expected.then_some(target.address), "{url} {host}");
        }
    }
}
