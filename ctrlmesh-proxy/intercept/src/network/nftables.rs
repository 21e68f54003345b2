//! A table of nftables that drops what some addresses send to others, and counts it.
//!
//! The numbers are those of `linux/netfilter/nf_tables.h`. The table is written whole each time, in one batch: the
//! kernel swaps it for the former one at once. Needs `CAP_NET_ADMIN` and Linux 5.7, whose sets count per element.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::SockProtocol;

use super::netlink::{
    Attributes, Messages, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP, Socket, attribute, attributes, malformed,
};

const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
const NFNL_SUBSYS_NFTABLES: u16 = 10;

const NFT_MSG_NEWTABLE: u16 = 0;
const NFT_MSG_DELTABLE: u16 = 2;
const NFT_MSG_NEWCHAIN: u16 = 3;
const NFT_MSG_NEWRULE: u16 = 6;
const NFT_MSG_NEWSET: u16 = 9;
const NFT_MSG_NEWSETELEM: u16 = 12;
const NFT_MSG_GETSETELEM: u16 = 13;

const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;

/// The hook of what is for the node itself.
const NF_INET_LOCAL_IN: u32 = 1;
/// The hook of what leaves the node, forwarded or its own.
const NF_INET_POST_ROUTING: u32 = 4;
/// There, after IPVS (98 and 99) has led elsewhere what is for a Service: it makes their addresses the node's own.
const INPUT_PRIORITY: i32 = 110;
/// When it leaves, before sources are translated (`NF_IP_PRI_NAT_SRC` is 100): all destinations are.
const LEAVING_PRIORITY: i32 = 90;

/// `NFT_SET_TIMEOUT`: elements of the set go by themselves.
const NFT_SET_TIMEOUT: u32 = 0x10;

const NFT_REG_VERDICT: u32 = 0;
/// The first of sixteen registers of four bytes.
const NFT_REG32_00: u32 = 8;

const NFT_PAYLOAD_NETWORK_HEADER: u32 = 1;
const NFT_PAYLOAD_TRANSPORT_HEADER: u32 = 2;
const NFT_META_NFPROTO: u32 = 15;
const NFT_META_L4PROTO: u32 = 16;
const TCP: u8 = 6;

/// `NFTA_LIST_ELEM`.
const LIST_ELEMENT: u16 = 1;
/// `NFTA_DATA_VALUE`, and `NFTA_DATA_VERDICT`.
const DATA: (u16, u16) = (1, 2);
/// `NFTA_EXPR_NAME`, and `NFTA_EXPR_DATA`.
const EXPRESSION: (u16, u16) = (1, 2);
const NFTA_COUNTER_PACKETS: u16 = 2;
const NFTA_SET_ELEM_KEY: u16 = 1;
const NFTA_SET_ELEM_EXPR: u16 = 7;

/// How many elements go into one message: its attributes have at most 64 KiB.
const ELEMENTS: usize = 1000;

/// The types of keys, for people who list the table with `nft`.
const IPV4_ADDR: u32 = 7;
const IPV6_ADDR: u32 = 8;
const INET_SERVICE: u32 = 13;
/// `TYPE_BITS` of nft.
const TYPE_BITS: u32 = 6;

/// How long the table drops what comes from an address after it was written last: so long a node proxy may be away.
/// Later the address may be another pod's.
pub(crate) const LIFETIME: Duration = Duration::from_mins(15);

/// What is dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Where it comes from.
    pub(crate) sources: BTreeSet<IpAddr>,
    /// Where it goes to, after translation.
    pub(crate) destinations: BTreeSet<SocketAddr>,
    /// TCP ports at any address of the node itself.
    pub(crate) local_ports: BTreeSet<u16>,
}

/// What differs between IPv4 and IPv6.
struct Family {
    number: u8,
    sources: &'static str,
    destinations: &'static str,
    address_type: u32,
    /// Bytes.
    address: u32,
    /// Where a packet's source and its destination begin.
    offsets: (u32, u32),
}

const FAMILIES: [Family; 2] = [
    Family {
        number: NFPROTO_IPV4,
        sources: "pods4",
        destinations: "servers4",
        address_type: IPV4_ADDR,
        address: 4,
        offsets: (12, 16),
    },
    Family {
        number: NFPROTO_IPV6,
        sources: "pods6",
        destinations: "servers6",
        address_type: IPV6_ADDR,
        address: 16,
        offsets: (8, 24),
    },
];

const LOCAL_PORTS: &str = "ports";

const INPUT: &str = "input";
const LEAVING: &str = "postrouting";

/// Where packets go that a rule drops.
#[derive(Clone, Copy)]
enum To {
    Servers,
    LocalPorts,
}

/// A batch of messages about one table.
struct Batch<'a> {
    messages: Messages,
    table: &'a str,
    sets: u32,
}

/// Writes the table, in the network namespace of the calling thread.
pub(crate) fn write(table: &str, rules: &Rules) -> io::Result<()> {
    let mut batch = Batch::begin(table);
    batch.replace_table();
    for family in &FAMILIES {
        let address = (family.address_type, family.address);
        batch.set(family.sources, address, true);
        batch.set(family.destinations, (address.0 << TYPE_BITS | INET_SERVICE, address.1 + 4), false);
        let is_of_it = |ip: &IpAddr| ip.is_ipv6() == (family.number == NFPROTO_IPV6);
        batch.elements(family.sources, rules.sources.iter().filter(|ip| is_of_it(ip)).map(|ip| octets(*ip)));
        let destinations = rules.destinations.iter().filter(|one| is_of_it(&one.ip()));
        batch.elements(family.destinations, destinations.map(|one| [octets(one.ip()), padded(one.port())].concat()));
    }
    batch.set(LOCAL_PORTS, (INET_SERVICE, 2), false);
    batch.elements(LOCAL_PORTS, rules.local_ports.iter().map(|one| one.to_be_bytes().to_vec()));
    batch.chain(INPUT, NF_INET_LOCAL_IN, INPUT_PRIORITY);
    batch.chain(LEAVING, NF_INET_POST_ROUTING, LEAVING_PRIORITY);
    for family in &FAMILIES {
        for chain in [INPUT, LEAVING] {
            batch.rule(chain, family, To::Servers);
        }
        batch.rule(INPUT, family, To::LocalPorts);
    }
    batch.commit()
}

/// Removes the table, if it is there.
pub(crate) fn remove(table: &str) -> io::Result<()> {
    let mut batch = Batch::begin(table);
    batch.add(NFT_MSG_DELTABLE, 0, |attributes| attributes.text(1, table));
    match batch.commit() {
        Err(error) if is_absent(&error) => Ok(()),
        removed => removed,
    }
}

/// How many packets were dropped since the table was written, by their source; `None` where the table is gone.
pub(crate) fn dropped(table: &str) -> io::Result<Option<BTreeMap<IpAddr, u64>>> {
    let mut dropped = BTreeMap::new();
    let socket = Socket::open(SockProtocol::NetlinkNetFilter)?;
    for family in &FAMILIES {
        let mut messages = Messages::default();
        messages.add(kind(NFT_MSG_GETSETELEM), NLM_F_DUMP, &header(NFPROTO_INET, 0), |attributes| {
            attributes.text(1, table);
            attributes.text(2, family.sources);
        });
        let listed = socket.listed(&messages, |body| {
            let body = body.get(header(0, 0).len()..).ok_or_else(malformed)?;
            let elements = attribute(body, 3).unwrap_or_default();
            dropped.extend(attributes(elements).filter_map(|(_, element)| counted(element)));
            Ok(())
        });
        match listed {
            Err(error) if is_absent(&error) => return Ok(None),
            listed => listed?,
        }
    }
    Ok(Some(dropped))
}

/// An element of a set of addresses, and the packets that it has counted.
fn counted(element: &[u8]) -> Option<(IpAddr, u64)> {
    let key = attribute(attribute(element, NFTA_SET_ELEM_KEY)?, DATA.0)?;
    let v4 = <[u8; 4]>::try_from(key).map(IpAddr::from);
    let address = v4.or_else(|_longer| <[u8; 16]>::try_from(key).map(IpAddr::from)).ok()?;
    let counter = attribute(attribute(element, NFTA_SET_ELEM_EXPR)?, EXPRESSION.1)?;
    let packets = attribute(counter, NFTA_COUNTER_PACKETS)?.try_into().ok()?;
    Some((address, u64::from_be_bytes(packets)))
}

impl<'a> Batch<'a> {
    fn begin(table: &'a str) -> Self {
        let mut messages = Messages::default();
        messages.add(NFNL_MSG_BATCH_BEGIN, 0, &header(0, NFNL_SUBSYS_NFTABLES), |_| {});
        Self { messages, table, sets: 0 }
    }

    fn add(&mut self, message: u16, flags: u16, fill: impl FnOnce(&mut Attributes<'_>)) {
        self.messages.add(kind(message), flags, &header(NFPROTO_INET, 0), fill);
    }

    /// Makes the table so that it is there, removes it with all that is in it, and makes it anew.
    fn replace_table(&mut self) {
        let table = self.table;
        for (message, flags) in
            [(NFT_MSG_NEWTABLE, NLM_F_CREATE), (NFT_MSG_DELTABLE, 0), (NFT_MSG_NEWTABLE, NLM_F_CREATE)]
        {
            self.add(message, flags, |attributes| attributes.text(1, table));
        }
    }

    /// Adds a set of keys of a type, and of so many bytes. Elements of one that `counts` have a counter and a lifetime.
    fn set(&mut self, name: &str, (key_type, key_bytes): (u32, u32), counts: bool) {
        self.sets += 1;
        let (table, id) = (self.table, self.sets);
        self.add(NFT_MSG_NEWSET, NLM_F_CREATE, |set| {
            set.text(1, table);
            set.text(2, name);
            set.number(3, if counts { NFT_SET_TIMEOUT } else { 0 });
            set.number(4, key_type);
            set.number(5, key_bytes);
            set.number(10, id);
            if counts {
                let milliseconds = u64::try_from(LIFETIME.as_millis()).unwrap_or(u64::MAX);
                set.bytes(11, &milliseconds.to_be_bytes());
                set.nest(17, |counter| expression(counter, "counter", |_from_zero| {}));
            }
        });
    }

    fn elements(&mut self, set: &str, keys: impl Iterator<Item = Vec<u8>>) {
        let (table, keys) = (self.table, keys.collect::<Vec<_>>());
        for keys in keys.chunks(ELEMENTS) {
            self.add(NFT_MSG_NEWSETELEM, NLM_F_CREATE, |elements| {
                elements.text(1, table);
                elements.text(2, set);
                elements.nest(3, |list| {
                    for key in keys {
                        list.nest(LIST_ELEMENT, |element| {
                            element.nest(NFTA_SET_ELEM_KEY, |data| data.bytes(DATA.0, key));
                        });
                    }
                });
            });
        }
    }

    fn chain(&mut self, name: &str, hook: u32, priority: i32) {
        let table = self.table;
        self.add(NFT_MSG_NEWCHAIN, NLM_F_CREATE, |chain| {
            chain.text(1, table);
            chain.text(3, name);
            chain.nest(4, |hooked| {
                hooked.number(1, hook);
                hooked.bytes(2, &priority.to_be_bytes());
            });
            chain.text(7, "filter");
        });
    }

    /// Adds a rule that drops TCP packets of a family from its sources.
    fn rule(&mut self, chain: &str, family: &Family, to: To) {
        let table = self.table;
        self.add(NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND, |rule| {
            rule.text(1, table);
            rule.text(2, chain);
            rule.nest(4, |list| {
                let mut rule = Expressions(list);
                rule.meta_is(NFT_META_NFPROTO, family.number);
                rule.meta_is(NFT_META_L4PROTO, TCP);
                match to {
                    To::Servers => rule.destination(family),
                    To::LocalPorts => rule.local_port(),
                }
                // Last, for an element that is found counts.
                rule.payload(NFT_PAYLOAD_NETWORK_HEADER, family.offsets.0, family.address, NFT_REG32_00);
                rule.lookup(family.sources);
                rule.drop();
            });
        });
    }

    /// Has the kernel carry all of it out, or nothing.
    fn commit(mut self) -> io::Result<()> {
        // Not the end: older kernels do not acknowledge that.
        self.messages.acknowledge();
        self.messages.add(NFNL_MSG_BATCH_END, 0, &header(0, NFNL_SUBSYS_NFTABLES), |_| {});
        Socket::open(SockProtocol::NetlinkNetFilter)?.acknowledged(&self.messages)
    }
}

/// The expressions of a rule, of which each goes on only where it matches.
struct Expressions<'a, 'b>(&'a mut Attributes<'b>);

impl Expressions<'_, '_> {
    fn meta_is(&mut self, key: u32, value: u8) {
        self.add("meta", |meta| {
            meta.number(1, NFT_REG32_00);
            meta.number(2, key);
        });
        self.add("cmp", |equal| {
            equal.number(1, NFT_REG32_00);
            equal.number(2, 0);
            equal.nest(3, |data| data.bytes(DATA.0, &[value]));
        });
    }

    /// Loads so many bytes of a packet into registers.
    fn payload(&mut self, base: u32, offset: u32, bytes: u32, register: u32) {
        self.add("payload", |payload| {
            payload.number(1, register);
            payload.number(2, base);
            payload.number(3, offset);
            payload.number(4, bytes);
        });
    }

    fn lookup(&mut self, set: &str) {
        self.add("lookup", |lookup| {
            lookup.text(1, set);
            lookup.number(2, NFT_REG32_00);
        });
    }

    fn destination(&mut self, family: &Family) {
        self.payload(NFT_PAYLOAD_NETWORK_HEADER, family.offsets.1, family.address, NFT_REG32_00);
        self.payload(NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, NFT_REG32_00 + family.address / 4);
        self.lookup(family.destinations);
    }

    fn local_port(&mut self) {
        self.payload(NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, NFT_REG32_00);
        self.lookup(LOCAL_PORTS);
    }

    fn drop(&mut self) {
        self.add("immediate", |verdict| {
            verdict.number(1, NFT_REG_VERDICT);
            verdict.nest(2, |data| data.nest(DATA.1, |verdict| verdict.number(1, 0)));
        });
    }

    fn add(&mut self, name: &str, fill: impl FnOnce(&mut Attributes<'_>)) {
        self.0.nest(LIST_ELEMENT, |one| expression(one, name, fill));
    }
}

fn expression(into: &mut Attributes<'_>, name: &str, fill: impl FnOnce(&mut Attributes<'_>)) {
    into.text(EXPRESSION.0, name);
    into.nest(EXPRESSION.1, fill);
}

/// `nfgenmsg`: family, version 0, and a number in the order of networks.
fn header(family: u8, resource: u16) -> [u8; 4] {
    let [high, low] = resource.to_be_bytes();
    [family, 0, high, low]
}

const fn kind(message: u16) -> u16 {
    NFNL_SUBSYS_NFTABLES << 8 | message
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// A port as a part of a key: each part is filled up to four bytes.
fn padded(port: u16) -> Vec<u8> {
    let [high, low] = port.to_be_bytes();
    vec![high, low, 0, 0]
}

fn is_absent(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::ENOENT as i32)
}
