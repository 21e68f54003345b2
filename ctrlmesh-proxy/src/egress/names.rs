//! Resolves the names of hosts as the processes of a pod do: by its `/etc/hosts` and `/etc/resolv.conf`, from its
//! network namespace.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use ctrlmesh_intercept::listener::{self, Namespace};
use domain::base::Name;
use domain::net::client::dgram_stream;
use domain::net::client::protocol::AsyncConnect;
use domain::resolv::StubResolver;
use domain::resolv::stub::conf::ResolvConf;
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::task;
use tokio::task::JoinSet;

use super::pod_files::PodFiles;

/// Larger files of these are not read, in bytes.
const MAX_FILE_BYTES: usize = 256 << 10;

/// No more servers are asked (`MAXNS` of `resolv.conf(5)`).
const MAX_SERVERS: usize = 3;

/// Kubernetes allows so many domains to search.
const MAX_DOMAINS: usize = 32;

/// `RES_MAXNDOTS` of `resolv.conf(5)`.
const MAX_DOTS: usize = 15;

/// The port of name servers.
const DNS: u16 = 53;

/// A name server, and the network namespace from which it is asked.
#[derive(Clone, Debug)]
struct NameServer {
    address: SocketAddr,
    network: Option<Arc<Namespace>>,
}

/// Asks it over UDP.
#[derive(Clone, Debug)]
struct Datagrams(NameServer);

/// Asks it over TCP, where an answer is too long for UDP.
#[derive(Clone, Debug)]
struct Streams(NameServer);

/// A socket that is being made.
type Connecting<S> = Pin<Box<dyn Future<Output = io::Result<S>> + Send + Sync>>;

impl NameServer {
    /// A socket of its address's family, which a thread has made in the namespace.
    async fn socket<S: Send + 'static>(
        self,
        open: fn(&Namespace, IpAddr) -> Result<S, ctrlmesh_intercept::Error>,
    ) -> io::Result<S> {
        let made = task::spawn_blocking(move || match &self.network {
            Some(network) => open(network, self.address.ip()),
            None => open(&Namespace::own()?, self.address.ip()),
        });
        made.await.map_err(io::Error::other)?.map_err(io::Error::other)
    }
}

impl AsyncConnect for Datagrams {
    type Connection = UdpSocket;
    type Fut = Connecting<UdpSocket>;

    fn connect(&self) -> Self::Fut {
        let server = self.0.clone();
        Box::pin(async move {
            let address = server.address;
            let socket = UdpSocket::from_std(server.socket(listener::datagrams).await?)?;
            socket.connect(address).await?;
            Ok(socket)
        })
    }
}

impl AsyncConnect for Streams {
    type Connection = TcpStream;
    type Fut = Connecting<TcpStream>;

    fn connect(&self) -> Self::Fut {
        let server = self.0.clone();
        Box::pin(async move {
            let address = server.address;
            TcpSocket::from_std_stream(server.socket(listener::outgoing).await?).connect(address).await
        })
    }
}

/// What `resolv.conf(5)` says, as far as it counts here.
#[derive(Debug, PartialEq, Eq)]
struct Config {
    servers: Vec<IpAddr>,
    search: Vec<String>,
    /// Names with fewer dots are searched first.
    dots: usize,
}

/// The addresses of a host, each once, those of IPv4 first.
///
/// # Errors
/// If it has none, or no server answers.
pub(super) async fn resolve(host: &str, files: &PodFiles, network: Option<&Arc<Namespace>>) -> io::Result<Vec<IpAddr>> {
    if let Ok(address) = host.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(vec![address.to_canonical()]);
    }
    let hosts = files.read(&["/etc/hosts"], MAX_FILE_BYTES).await?.unwrap_or_default();
    let known = in_hosts(&String::from_utf8_lossy(&hosts), host);
    if !known.is_empty() {
        return Ok(known);
    }
    let config = files.read(&["/etc/resolv.conf"], MAX_FILE_BYTES).await?.unwrap_or_default();
    let mut addresses = ask(host, Config::read(&String::from_utf8_lossy(&config)), network).await?;
    addresses.sort_by_key(IpAddr::is_ipv6);
    Ok(addresses)
}

async fn ask(host: &str, config: Config, network: Option<&Arc<Namespace>>) -> io::Result<Vec<IpAddr>> {
    let names = config.candidates(host);
    // They end with it.
    let mut transports = JoinSet::new();
    let resolver = StubResolver::from_conf(ResolvConf::new());
    for address in config.servers {
        let server = NameServer { address: SocketAddr::new(address, DNS), network: network.cloned() };
        let (connection, transport) = dgram_stream::Connection::new(Datagrams(server.clone()), Streams(server));
        transports.spawn(transport.run());
        resolver.add_connection(Box::new(connection)).await;
    }
    let mut failed = None;
    for name in names {
        match resolver.lookup_host(name).await {
            Ok(found) => {
                let mut addresses: Vec<IpAddr> = Vec::new();
                for address in found.iter().map(|address| address.to_canonical()) {
                    if !addresses.contains(&address) {
                        addresses.push(address);
                    }
                }
                if !addresses.is_empty() {
                    return Ok(addresses);
                }
            }
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| not_found(host)))
}

impl Config {
    /// What the pod wrote is bounded, and no name is looked up for it: a server is an address.
    fn read(text: &str) -> Self {
        let mut config = Self { servers: Vec::new(), search: Vec::new(), dots: 1 };
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") if config.servers.len() < MAX_SERVERS => {
                    config.servers.extend(words.next().and_then(|word| word.parse::<IpAddr>().ok()));
                }
                Some("search" | "domain") => {
                    let domains = words.take(MAX_DOMAINS).map(|domain| domain.trim_end_matches('.').to_owned());
                    config.search = domains.filter(|domain| !domain.is_empty()).collect();
                }
                Some("options") => {
                    let dots = words.filter_map(|word| word.strip_prefix("ndots:")?.parse().ok()).next_back();
                    config.dots = dots.map_or(config.dots, |dots: usize| dots.min(MAX_DOTS));
                }
                _ => {}
            }
        }
        if config.servers.is_empty() {
            config.servers.push(Ipv4Addr::LOCALHOST.into());
        }
        config
    }

    /// The names to ask for: one with few dots is tried in each domain of the search list first. What is no name is
    /// left out.
    fn candidates(&self, host: &str) -> Vec<Name<Vec<u8>>> {
        let mut texts = vec![host.to_owned()];
        if !host.ends_with('.') {
            texts.splice(0..0, self.search.iter().map(|domain| format!("{host}.{domain}")));
            if host.matches('.').count() >= self.dots {
                texts.rotate_right(1);
            }
        }
        texts.iter().filter_map(|text| Name::vec_from_str(text).ok()).collect()
    }
}

/// The addresses that a file as `hosts(5)` gives a host. `localhost` is loopback where it is not listed (RFC 6761).
fn in_hosts(text: &str, host: &str) -> Vec<IpAddr> {
    let host = host.strip_suffix('.').unwrap_or(host);
    let mut addresses = Vec::new();
    for line in text.lines() {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let address = words.next().and_then(|word| word.parse::<IpAddr>().ok());
        let Some(address) = address.map(|address| address.to_canonical()) else { continue };
        if words.any(|name| name.eq_ignore_ascii_case(host)) && !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() && host.eq_ignore_ascii_case("localhost") {
        return vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    }
    addresses
}

fn not_found(host: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("no address of host {host:?} is known"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_searched_as_in_other_processes_of_the_pod() {
        let pod = "search ns.svc.cluster.local svc.cluster.local.\nnameserver 10.96.0.10\noptions ndots:2 edns0\n";
        for (config, host, expected) in [
            (pod, "web", &["web.ns.svc.cluster.local", "web.svc.cluster.local", "web"][..]),
            (pod, "web.ns", &["web.ns.ns.svc.cluster.local", "web.ns.svc.cluster.local", "web.ns"]),
            (pod, "a.b.com", &["a.b.com", "a.b.com.ns.svc.cluster.local", "a.b.com.svc.cluster.local"]),
            (pod, "web.", &["web"]),
            ("nameserver 10.96.0.10\n", "web", &["web"]),
            ("nameserver 10.96.0.10\n", "", &[]),
            (pod, "a..b", &[]),
        ] {
            let names: Vec<String> = Config::read(config).candidates(host).iter().map(ToString::to_string).collect();
            assert_eq!(names, expected, "{host}");
        }
    }

    #[test]
    fn a_file_of_the_pod_is_read_within_bounds() {
        let many = "nameserver slow.example.com\nnameserver 10.0.0.1\n".repeat(100);
        let domains: Vec<String> = (0..1000).map(|number| format!("d{number}")).collect();
        let config = Config::read(&format!("{many}search {}\noptions ndots:99999\n", domains.join(" ")));
        assert_eq!(config.servers, vec![IpAddr::from([10, 0, 0, 1]); MAX_SERVERS]);
        assert_eq!((config.search.len(), config.dots), (MAX_DOMAINS, MAX_DOTS));
        assert_eq!(Config::read("").servers, [IpAddr::from([127, 0, 0, 1])]);
    }

    #[test]
    fn hosts_are_read_as_in_other_processes_of_the_pod() {
        let text = "127.0.0.1 localhost\n# 10.0.0.9 web\n10.0.0.1\tweb Web.Example.com # other\n::1 web\nx web\n";
        let addresses = |host| in_hosts(text, host).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(addresses("WEB"), ["10.0.0.1", "::1"]);
        assert_eq!(addresses("web.example.com."), ["10.0.0.1"]);
        assert_eq!(addresses("other"), [""; 0]);
        assert_eq!(addresses("localhost"), ["127.0.0.1"]);
        assert_eq!(in_hosts("", "localhost").len(), 2);
    }
}
