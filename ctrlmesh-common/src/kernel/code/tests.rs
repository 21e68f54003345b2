// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

use core::net::{IpAddr, Ipv4Addr};

use super::super::MAX_HOST_BITS;
use super::*;

fn words(ip: [u8; 4]) -> u32 {
    u32::from_ne_bytes(ip)
}

fn address(text: &str) -> Address {
    text.parse::<IpAddr>().unwrap().into()
}

fn codes() -> impl Iterator<Item = Code> {
    let slots = (0..4096u16).step_by(7).chain([4095]);
    slots.flat_map(|slot| {
        (0..GENERATIONS).flat_map(move |generation| [0, 1, 7, 128, 255].map(|index| Code { generation, slot, index }))
    })
}

#[test]
fn every_code_survives_the_round_trip_in_both_families() {
    for code in codes() {
        assert_eq!(Code::of_ipv4(code.ipv4()), Some(code));
        let host = u32::from(code.slot) << 8;
        let native = Decoded::read(code.ipv6(host), address("::1"));
        assert_eq!(native, Some(Decoded { code, host: Some(host) }));
    }
}

#[test]
fn an_encoded_address_is_loopback_and_outside_what_people_use() {
    for code in codes() {
        let ip = Ipv4Addr::from(code.ipv4().to_ne_bytes());
        assert!(ip.is_loopback() && ip >= Ipv4Addr::new(127, 64, 0, 0), "{ip}");
    }
}

#[test]
fn a_native_address_is_in_our_prefix() {
    let code = Code { generation: 1, slot: 2, index: 3 };
    assert_eq!(code.ipv6(0x0003_0007), address("fd63:746c:6d65:7368:3:7:10:203"));
}

#[test]
fn addresses_of_others_are_not_decoded() {
    for ip in [[127, 0, 0, 1], [127, 0, 0, 53], [127, 63, 255, 255], [128, 0, 0, 0], [126, 64, 0, 1], [10, 64, 0, 1]] {
        assert_eq!(Code::of_ipv4(words(ip)), None, "{ip:?}");
    }
    for ip in [[127, 0, 0, 2], [127, 127, 255, 255], [127, 192, 0, 0], [10, 128, 0, 1]] {
        assert_eq!(decode_host(words(ip)), None, "{ip:?}");
    }
    for text in ["::1", "fd00:96::1", "fd63:746c:6d65:7368::c0:0", "fd63:746c:6d65:7369::1", "::"] {
        assert!(!is_encoded(address(text)), "{text}");
    }
}

#[test]
fn every_open_bit_survives_the_round_trip() {
    for bit in 0..MAX_HOST_BITS {
        assert_eq!(decode_host(encode_host(1 << bit)), Some(1 << bit));
    }
    let all = (1 << MAX_HOST_BITS) - 1;
    assert_eq!(decode_host(encode_host(all)), Some(all));
    assert_eq!(Ipv4Addr::from(encode_host(0).to_ne_bytes()), Ipv4Addr::new(127, 128, 0, 0));
}

#[test]
fn an_exact_target_needs_no_open_bits() {
    let entry = Destination { address: address("10.96.0.1"), port: 443u16.to_be(), ..Destination::default() };
    assert_eq!(original(&entry, None), Some(entry.address));
}

#[test]
fn a_prefix_is_completed_from_what_the_connection_carries() {
    for (prefix, bits, ip) in
        [("10.96.0.0", 20, "10.99.7.200"), ("fd00::", 20, "fd00::7:c8"), ("10.64.0.0", 22, "10.127.255.255")]
    {
        let entry = Destination { address: address(prefix), port: 1, host_bits: bits, retired: 0 };
        let ip = address(ip);
        let code = Code { generation: 0, slot: 9, index: 1 };
        let source = Address::mapped(encode_host(ip.host(bits)));
        let mapped = Decoded::read(Address::mapped(code.ipv4()), source).unwrap();
        let native = Decoded::read(code.ipv6(ip.host(bits)), address("::1")).unwrap();
        for decoded in [mapped, native] {
            assert_eq!(original(&entry, decoded.host), Some(ip));
        }
    }
}

#[test]
fn a_prefix_without_its_open_bits_is_not_guessed() {
    let entry = Destination { address: address("10.96.0.0"), port: 1, host_bits: 12, retired: 0 };
    let code = Code { generation: 0, slot: 9, index: 1 };
    let decoded = Decoded::read(Address::mapped(code.ipv4()), address("127.0.0.1")).unwrap();
    assert_eq!(original(&entry, decoded.host), None);
}

#[test]
fn an_entry_that_was_never_used_explains_nothing() {
    assert_eq!(original(&Destination::default(), Some(1)), None);
}

#[test]
fn the_ranges_of_our_addresses_are_reserved_as_a_whole() {
    for text in ["127.64.0.0", "127.255.255.255", "fd63:746c:6d65:7368::", "fd63:746c:6d65:7368:f::"] {
        assert!(is_reserved(address(text)), "{text}");
    }
    for text in ["127.63.255.255", "128.0.0.0", "::1", "fd63:746c:6d65:7369::", "::ffff:10.0.0.1"] {
        assert!(!is_reserved(address(text)), "{text}");
    }
}
