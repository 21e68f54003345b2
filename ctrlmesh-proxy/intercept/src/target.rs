//! The targets whose connections are redirected.
//!
//! A target is an address and a port, or a prefix and a port, or a port at any address. The bits that a prefix leaves
//! open must fit into a source address, so the widest are /10 for IPv4 and /106 for IPv6: more than any service range
//! of Kubernetes, /12 and /108.
//!
//! 0.0.0.0 and :: are loopback here, as they are for the kernel where somebody connects to them.

use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use ctrlmesh_common::kernel::{self, ANY_ADDRESS, Address, Destination, MAX_HOST_BITS, TargetKey};

/// How many a pod may have: the index of one has 8 bits, of which one value means none.
const MOST: usize = 255;

/// An address, a prefix or any address, and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    address: Address,
    host_bits: u8,
    port: u16,
}

/// Targets under a name. Pods that name the same targets share a table, and a change reaches all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Targets {
    /// What they are, for instance `default/kubernetes`.
    pub name: String,
    /// At most 255.
    pub list: Vec<Target>,
}

/// Why a text is not a target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTarget {
    /// Neither form.
    #[error("`{0}` is not ADDRESS:PORT, PREFIX/LENGTH:PORT or *:PORT, with an IPv6 address in brackets")]
    Syntax(String),
    /// Port 0.
    #[error("`{0}`: port 0 is nobody's")]
    Port(String),
    /// Longer than the address.
    #[error("`{text}`: a prefix of this family has at most {most} bits")]
    TooLong {
        /// What was given.
        text: String,
        /// Bits of the address.
        most: u8,
    },
    /// More open bits than a source address carries.
    #[error("`{text}`: a prefix of this family has at least {least} bits")]
    TooWide {
        /// What was given.
        text: String,
        /// Bits of the widest prefix.
        least: u8,
    },
    /// Where connections are redirected to.
    #[error(
        "`{0}`: 127.64.0.0 to 127.255.255.255 and fd63:746c:6d65:7368::/64 are where redirected connections go, and cannot be targets"
    )]
    Reserved(String),
}

impl Targets {
    /// These, and `more` that are none of them and can be redirected, as many as there is room for.
    #[must_use]
    pub fn and(&self, more: &[SocketAddr]) -> Self {
        let mut list = self.list.clone();
        for target in more.iter().copied().map(Target::exact).filter(|one| !one.is_reserved()) {
            if !list.contains(&target) && list.len() < MOST {
                list.push(target);
            }
        }
        Self { name: self.name.clone(), list }
    }

    /// These, and those of one pod, as many as there is room for. They have a name of their own.
    #[must_use]
    pub fn and_of_pod(&self, more: &[Target]) -> Self {
        let mut all = self.clone();
        for target in more {
            if all.list.len() < MOST {
                all.list.push(*target);
            }
            // Writing to a text never fails.
            let _written = write!(all.name, " {target}");
        }
        all
    }

    /// Those that are no prefix, as addresses and ports.
    pub fn exact(&self) -> impl Iterator<Item = SocketAddr> {
        let exact = self.list.iter().filter(|target| target.host_bits == 0);
        exact.map(|target| SocketAddr::new(target.address.into(), target.port))
    }

    /// The addresses of those that are no prefix.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.exact().map(|server| server.ip())
    }
}

impl Target {
    /// One address.
    pub fn exact(address: SocketAddr) -> Self {
        Self { address: reached(address.ip()).into(), host_bits: 0, port: address.port() }
    }

    /// A port at any address. More exact targets go before.
    pub fn any_address(port: u16) -> Self {
        Self { address: Address::default(), host_bits: ANY_ADDRESS, port }
    }

    /// Whether it is a port at any address.
    pub(crate) fn is_any_address(self) -> bool {
        self.host_bits == ANY_ADDRESS
    }

    /// Whether connections to `address` are of this target.
    pub fn covers(self, address: SocketAddr) -> bool {
        if self.port != address.port() {
            return false;
        }
        self.is_any_address() || Address::from(reached(address.ip())).with_host(self.host_bits, 0) == self.address
    }

    /// Whether it is an address that connections are redirected to.
    pub fn is_reserved(self) -> bool {
        kernel::is_reserved(self.address)
    }

    /// The key in the kernel's table and the length of its prefix in bits.
    pub(crate) fn key(self, table: u16) -> (u32, TargetKey) {
        (kernel::prefix_bits(self.host_bits), TargetKey { table, port: self.port.to_be(), address: self.address })
    }

    /// The entry that explains the kernel's index.
    pub(crate) fn destination(self) -> Destination {
        Destination { address: self.address, port: self.port.to_be(), host_bits: self.host_bits, retired: 0 }
    }

    /// Bits of the address that are open.
    pub(crate) fn host_bits(self) -> u8 {
        self.host_bits
    }

    /// Reads an entry back.
    pub(crate) fn of(entry: &Destination) -> Self {
        Self { address: entry.address, host_bits: entry.host_bits, port: u16::from_be(entry.port) }
    }
}

impl From<SocketAddr> for Target {
    fn from(address: SocketAddr) -> Self {
        Self::exact(address)
    }
}

impl FromStr for Target {
    type Err = InvalidTarget;

    fn from_str(text: &str) -> Result<Self, InvalidTarget> {
        let syntax = || InvalidTarget::Syntax(text.to_owned());
        let (host, port) = text.rsplit_once(':').ok_or_else(syntax)?;
        let port: u16 = port.parse().ok().ok_or_else(syntax)?;
        if port == 0 {
            return Err(InvalidTarget::Port(text.to_owned()));
        }
        if host == "*" {
            return Ok(Self::any_address(port));
        }
        let bare = match (host.strip_prefix('['), host.strip_suffix(']')) {
            (Some(rest), Some(_)) => rest.strip_suffix(']').ok_or_else(syntax)?,
            (None, None) if !host.contains(':') => host,
            _ => return Err(syntax()),
        };
        let (ip, length) = match bare.split_once('/') {
            Some((ip, length)) => (ip, Some(length.parse::<u8>().ok().ok_or_else(syntax)?)),
            None => (bare, None),
        };
        let ip: IpAddr = ip.parse().ok().ok_or_else(syntax)?;
        let host_bits = host_bits(text, ip, length)?;
        let ip = if host_bits == 0 { reached(ip) } else { ip };
        let target = Self { address: Address::from(ip).with_host(host_bits, 0), host_bits, port };
        if target.is_reserved() {
            return Err(InvalidTarget::Reserved(text.to_owned()));
        }
        Ok(target)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_any_address() {
            return write!(f, "*:{}", self.port);
        }
        let ip = IpAddr::from(self.address);
        if self.host_bits == 0 {
            return write!(f, "{}", SocketAddr::new(ip, self.port));
        }
        let length = width(ip) - self.host_bits;
        if ip.is_ipv6() { write!(f, "[{ip}/{length}]:{}", self.port) } else { write!(f, "{ip}/{length}:{}", self.port) }
    }
}

/// What the kernel connects to where it is told this address.
fn reached(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    }
}

fn width(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

fn host_bits(text: &str, ip: IpAddr, length: Option<u8>) -> Result<u8, InvalidTarget> {
    let most = width(ip);
    let length = length.unwrap_or(most);
    let host_bits = most.checked_sub(length).ok_or_else(|| InvalidTarget::TooLong { text: text.to_owned(), most })?;
    if host_bits > MAX_HOST_BITS {
        return Err(InvalidTarget::TooWide { text: text.to_owned(), least: most - MAX_HOST_BITS });
    }
    Ok(host_bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_prints_as_it_was_read() {
        for text in
            ["10.96.0.1:443", "[fd00::1]:443", "10.96.0.0/12:443", "10.64.0.0/10:1", "[fd00::/108]:6443", "*:443"]
        {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn added_targets_are_listed_once_and_never_the_proxy() {
        let list = |texts: &[&str]| texts.iter().map(|one| one.parse().unwrap()).collect();
        let told = Targets { name: "t".to_owned(), list: list(&["10.96.0.1:443"]) };
        let more = ["10.96.0.1:443", "192.0.2.1:6443", "192.0.2.1:6443", "127.64.0.1:1"];
        let both = told.and(&more.map(|one| one.parse().unwrap()));
        assert_eq!(both.list, list(&["10.96.0.1:443", "192.0.2.1:6443"]) as Vec<Target>);
        assert_eq!(both.and(&[]), both);
        let many: Vec<SocketAddr> = (1..=300).map(|port| SocketAddr::from(([192, 0, 2, 1], port))).collect();
        assert_eq!(told.and(&many).list.len(), MOST);
    }

    #[test]
    fn a_target_covers_what_the_kernel_redirects() {
        for (target, address, expected) in [
            ("10.96.0.1:443", "10.96.0.1:443", true),
            ("10.96.0.1:443", "[::ffff:10.96.0.1]:443", true),
            ("10.96.0.1:443", "10.96.0.1:6443", false),
            ("10.96.0.1:443", "10.96.0.2:443", false),
            ("10.96.0.0/12:443", "10.111.255.255:443", true),
            ("10.96.0.0/12:443", "10.112.0.0:443", false),
            ("[fd00::/108]:443", "[fd00::f:ffff]:443", true),
            ("[fd00::/108]:443", "[fd00::10:0]:443", false),
            ("127.0.0.1:443", "0.0.0.0:443", true),
            ("*:443", "192.0.2.1:443", true),
            ("*:443", "192.0.2.1:80", false),
        ] {
            let target: Target = target.parse().unwrap();
            assert_eq!(target.covers(address.parse().unwrap()), expected, "{target} {address}");
        }
    }

    #[test]
    fn targets_with_other_ports_have_another_name() {
        let told = Targets { name: "t".to_owned(), list: vec!["10.96.0.1:443".parse().unwrap()] };
        assert_eq!(told.and_of_pod(&[]), told);
        let more = told.and_of_pod(&["*:443", "127.0.0.1:15002"].map(|one| one.parse().unwrap()));
        assert_eq!(more.name, "t *:443 127.0.0.1:15002");
        let list: Vec<String> = more.list.iter().map(ToString::to_string).collect();
        assert_eq!(list, ["10.96.0.1:443", "*:443", "127.0.0.1:15002"]);
    }

    #[test]
    fn the_open_bits_of_a_prefix_are_cleared() {
        assert_eq!("10.96.7.9/16:443".parse::<Target>().unwrap().to_string(), "10.96.0.0/16:443");
    }

    #[test]
    fn a_full_prefix_is_an_exact_target() {
        assert_eq!("10.96.0.1/32:443".parse::<Target>(), "10.96.0.1:443".parse());
        assert_eq!("[fd00::1/128]:443".parse::<Target>(), "[fd00::1]:443".parse());
    }

    #[test]
    fn a_mapped_address_is_the_ipv4_address() {
        assert_eq!("[::ffff:10.96.0.1]:443".parse::<Target>(), "10.96.0.1:443".parse());
    }

    #[test]
    fn an_unspecified_address_is_loopback_of_its_family() {
        for (text, target) in [
            ("0.0.0.0:443", "127.0.0.1:443"),
            ("[::]:443", "[::1]:443"),
            ("[::ffff:0.0.0.0]:443", "127.0.0.1:443"),
            ("0.0.0.0/10:443", "0.0.0.0/10:443"),
        ] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), target);
        }
        let address: SocketAddr = "0.0.0.0:443".parse().unwrap();
        assert_eq!(Target::from(address).to_string(), "127.0.0.1:443");
    }

    #[test]
    fn an_address_that_connections_are_redirected_to_is_no_target() {
        for text in [
            "127.64.0.0:443",
            "127.255.255.255:443",
            "127.127.0.0/16:443",
            "127.192.0.0/10:443",
            "[::ffff:127.64.0.1]:443",
            "[fd63:746c:6d65:7368::1]:443",
            "[fd63:746c:6d65:7368:1::/112]:443",
        ] {
            assert_eq!(text.parse::<Target>(), Err(InvalidTarget::Reserved(text.to_owned())));
        }
        for text in ["127.63.255.255:443", "127.0.0.0/10:443", "[fd63:746c:6d65:7369::1]:443"] {
            assert!(text.parse::<Target>().is_ok(), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_target_is_refused_with_the_reason() {
        for text in [
            "",
            "10.96.0.1",
            "fd00::1:443",
            "[fd00::1:443",
            "fd00::1]:443",
            "10.0.0.0/x:1",
            "host:443",
            "10.0.0.1:65536",
            "*",
            "[*]:1",
            "*/0:1",
        ] {
            assert_eq!(text.parse::<Target>(), Err(InvalidTarget::Syntax(text.to_owned())));
        }
        for text in ["10.0.0.1:0", "*:0"] {
            assert_eq!(text.parse::<Target>(), Err(InvalidTarget::Port(text.to_owned())));
        }
        assert!(matches!("10.0.0.0/33:1".parse::<Target>(), Err(InvalidTarget::TooLong { most: 32, .. })));
        assert!(matches!("10.0.0.0/9:1".parse::<Target>(), Err(InvalidTarget::TooWide { least: 10, .. })));
        assert!(matches!("[fd00::/64]:1".parse::<Target>(), Err(InvalidTarget::TooWide { least: 106, .. })));
    }
}
