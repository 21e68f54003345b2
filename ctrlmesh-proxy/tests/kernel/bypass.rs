//! The filter of what bypasses the proxy, in a network namespace that is a node to another one.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use ctrlmesh_intercept::listener::Namespace;
use ctrlmesh_intercept::{BypassFilter, Bypasses};

use crate::bed::{Bed, Server, must, until};

const NODE: &str = "-node";
/// The pod, as [`Bed::wire`] has it.
const POD: [&str; 2] = ["10.244.1.5", "fd00:244::5"];
/// What an API server is on the node, and where the node is reached besides.
const SERVER: [&str; 2] = ["10.96.0.1:6443", "[fd00:96::1]:6443"];
const OTHER: [&str; 2] = ["10.244.1.1:6443", "[fd00:244::1]:6443"];
/// Longer than the kernel needs for a connection that is not dropped.
const PATIENCE: Duration = Duration::from_secs(1);

/// A pod and its node, with servers on the node.
struct Wired {
    bed: Bed,
    filter: BypassFilter,
    _servers: Vec<Server>,
}

impl Wired {
    fn new() -> Self {
        let bed = Bed::new();
        bed.wire(NODE);
        for route in ["route add 10.96.0.1/32 via 10.244.1.1", "-6 route add fd00:96::1/128 via fd00:244::1"] {
            // The namespaces of a bed have these addresses themselves.
            let address = if route.starts_with("-6") { "fd00:96::1/128" } else { "10.96.0.1/32" };
            bed.ip("", &format!("addr del {address} dev lo"));
            bed.ip("", route);
        }
        let servers = ["[::]:6443", "[::]:7443"].map(|address| bed.target_in(NODE, address));
        Self { bed, filter: BypassFilter::new("test"), _servers: servers.into() }
    }

    fn node(&self) -> Namespace {
        Namespace::open(&self.bed.path(NODE)).unwrap()
    }

    /// Has the filter drop what comes from these pods and goes to an API server.
    fn apply(&mut self, pods: &[&str]) -> bool {
        self.apply_all(&bypasses(pods, &SERVER))
    }

    fn apply_all(&mut self, bypasses: &Bypasses) -> bool {
        let node = self.node();
        node.run(|| self.filter.apply(bypasses)).unwrap().unwrap()
    }

    /// Packets that were dropped since, by address.
    fn dropped(&mut self) -> Vec<String> {
        let node = self.node();
        let dropped = node.run(|| self.filter.dropped()).unwrap().unwrap();
        dropped.keys().map(ToString::to_string).collect()
    }

    /// Whether the pod reaches an address.
    fn reaches(&self, address: &str) -> bool {
        let address = address.parse().unwrap();
        self.bed.net().run(|| TcpStream::connect_timeout(&address, PATIENCE).is_ok()).unwrap()
    }

    fn nft(&self, command: &str) {
        let nft = ["netns", "exec", &self.bed.name(NODE), "nft"];
        must(Command::new("ip").args(nft).args(command.split(' ')));
    }
}

/// Packets of these pods to API servers that listen at these addresses.
fn bypasses(pods: &[&str], endpoints: &[&str]) -> Bypasses {
    let pods = pods.iter().map(|ip| ip.parse::<IpAddr>().unwrap()).collect();
    let endpoints: BTreeSet<SocketAddr> = endpoints.iter().map(|server| server.parse().unwrap()).collect();
    Bypasses { pods, endpoints, ..Bypasses::default() }
}

#[test]
fn an_address_of_a_service_closes_no_port_of_the_node() {
    let mut wired = Wired::new();
    // As IPVS has it: the Service's address is one of the node's own.
    let servers = SERVER.iter().map(|server| server.parse().unwrap()).collect();
    wired.apply_all(&Bypasses { servers, endpoints: BTreeSet::new(), ..bypasses(&POD, &[]) });
    assert!(!wired.reaches(SERVER[0]) && !wired.reaches(SERVER[1]));
    assert!(OTHER.iter().all(|address| wired.reaches(address)), "what else the node serves at that port");
    // A pod that gives itself an address of the node takes nothing from it.
    wired.apply(&["10.244.1.1", "127.0.0.1", "10.244.1.9"]);
    let node = wired.node();
    let connected = node.run(|| TcpStream::connect_timeout(&SERVER[0].parse().unwrap(), PATIENCE).is_ok());
    assert!(connected.unwrap());
}

#[test]
fn what_a_pod_sends_to_an_api_server_is_dropped_and_counted() {
    let mut wired = Wired::new();
    let all: Vec<&str> = [SERVER, OTHER].concat();
    until("the addresses to work", || all.iter().all(|address| wired.reaches(address)));
    assert!(wired.apply(&POD));
    assert!(!wired.apply(&POD), "nothing to do");
    for address in &all {
        assert!(!wired.reaches(address), "{address}");
    }
    assert_eq!(wired.dropped(), POD);
    assert_eq!(wired.dropped(), [""; 0], "none since");
    assert!(wired.reaches("10.244.1.1:7443"), "another port of the node");
    // Another pod's, and then nobody's.
    assert!(wired.apply(&["10.244.1.9"]));
    assert!(all.iter().all(|address| wired.reaches(address)));
    assert_eq!(wired.dropped(), [""; 0]);
}

#[test]
fn where_an_address_leads_after_translation_is_what_counts() {
    let mut wired = Wired::new();
    wired.nft("add table ip nat");
    wired.nft("add chain ip nat prerouting { type nat hook prerouting priority -100 ; }");
    wired.nft("add rule ip nat prerouting ip daddr 10.99.0.7 tcp dport 443 dnat to 10.96.0.1:6443");
    wired.bed.ip("", "route add 10.99.0.7/32 via 10.244.1.1");
    until("the address to lead to the server", || wired.reaches("10.99.0.7:443"));
    wired.apply(&POD);
    assert!(!wired.reaches("10.99.0.7:443"));
    assert_eq!(wired.dropped(), [POD[0]]);
}

#[test]
fn what_the_node_forwards_is_dropped_too() {
    let mut wired = Wired::new();
    let far = "-far";
    wired.bed.namespace(far);
    let (node, server) = (wired.bed.name(NODE), wired.bed.name(far));
    let link = ["link", "add", "far0", "netns", &node, "type", "veth", "peer", "name", "eth0", "netns", &server];
    must(Command::new("ip").args(link));
    for (suffix, device, address) in [(NODE, "far0", "10.245.0.1/24"), (far, "eth0", "10.245.0.2/24")] {
        wired.bed.ip(suffix, &format!("addr add {address} dev {device}"));
        wired.bed.ip(suffix, &format!("link set {device} up"));
    }
    wired.bed.ip(far, "route add 10.244.1.0/24 via 10.245.0.1");
    wired.bed.ip("", "route add 10.245.0.0/24 via 10.244.1.1");
    let forward = ["netns", "exec", &node, "sysctl", "-qw", "net.ipv4.ip_forward=1"];
    must(Command::new("ip").args(forward));
    let _servers = ["10.245.0.2:6443", "10.245.0.2:7443"].map(|address| wired.bed.target_in(far, address));
    until("the server behind the node", || wired.reaches("10.245.0.2:6443"));
    wired.apply_all(&bypasses(&POD, &["10.245.0.2:6443"]));
    assert!(!wired.reaches("10.245.0.2:6443"));
    assert!(wired.reaches("10.245.0.2:7443"), "another port of that server");
    assert!(wired.reaches(OTHER[0]), "the server is no address of this node");
}

#[test]
fn a_table_that_somebody_removed_is_written_again() {
    let mut wired = Wired::new();
    wired.apply(&POD);
    wired.nft("delete table inet ctrlmesh-test");
    assert!(wired.reaches(SERVER[0]));
    assert_eq!(wired.dropped(), [""; 0]);
    assert!(wired.apply(&POD), "written again");
    assert!(!wired.reaches(SERVER[0]));
    // Another process has another filter, and replaces the table.
    let mut next = BypassFilter::new("test");
    wired.node().run(|| next.apply(&bypasses(&[], &SERVER))).unwrap().unwrap();
    assert!(wired.reaches(SERVER[0]));
    wired.apply_all(&bypasses(&["10.244.1.9"], &SERVER));
    wired.node().run(|| BypassFilter::remove("test")).unwrap().unwrap();
    let chains = Command::new("ip").args(["netns", "exec", &wired.bed.name(NODE), "nft", "list", "tables"]).output();
    assert_eq!(String::from_utf8(chains.unwrap().stdout).unwrap(), "", "nothing is left");
}

#[test]
fn a_filter_of_thousands_of_pods_is_written_at_once() {
    let mut wired = Wired::new();
    let many = (0..5000_u32).map(|n| IpAddr::from((0x0a64_0000 + n).to_be_bytes()));
    let pods: BTreeSet<IpAddr> = many.chain([POD[0].parse().unwrap()]).collect();
    wired.apply_all(&Bypasses { pods, ..bypasses(&[], &SERVER) });
    assert!(!wired.reaches(SERVER[0]));
    assert_eq!(wired.dropped(), [POD[0]]);
}

#[test]
fn the_filter_goes_with_everything_else() {
    let mut wired = Wired::new();
    wired.apply(&POD);
    assert!(!wired.reaches(SERVER[0]));
    let options = wired.bed.options("test");
    wired.node().run(|| ctrlmesh_intercept::uninstall(&options, false)).unwrap().unwrap();
    assert!(wired.reaches(SERVER[0]));
    wired.node().run(|| ctrlmesh_intercept::uninstall(&options, false)).unwrap().unwrap();
}
