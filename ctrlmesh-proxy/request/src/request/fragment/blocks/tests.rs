use super::*;

/// Code and length of each printable byte, from `!`.
const CODES: [(u32, u32); 94] = [
    (0x3f8, 10),
    (0x3f9, 10),
    (0xffa, 12),
    (0x1ff9, 13),
    (0x15, 6),
    (0xf8, 8),
    (0x7fa, 11),
    (0x3fa, 10),
    (0x3fb, 10),
    (0xf9, 8),
    (0x7fb, 11),
    (0xfa, 8),
    (0x16, 6),
    (0x17, 6),
    (0x18, 6),
    (0x0, 5),
    (0x1, 5),
    (0x2, 5),
    (0x19, 6),
    (0x1a, 6),
    (0x1b, 6),
    (0x1c, 6),
    (0x1d, 6),
    (0x1e, 6),
    (0x1f, 6),
    (0x5c, 7),
    (0xfb, 8),
    (0x7ffc, 15),
    (0x20, 6),
    (0xffb, 12),
    (0x3fc, 10),
    (0x1ffa, 13),
    (0x21, 6),
    (0x5d, 7),
    (0x5e, 7),
    (0x5f, 7),
    (0x60, 7),
    (0x61, 7),
    (0x62, 7),
    (0x63, 7),
    (0x64, 7),
    (0x65, 7),
    (0x66, 7),
    (0x67, 7),
    (0x68, 7),
    (0x69, 7),
    (0x6a, 7),
    (0x6b, 7),
    (0x6c, 7),
    (0x6d, 7),
    (0x6e, 7),
    (0x6f, 7),
    (0x70, 7),
    (0x71, 7),
    (0x72, 7),
    (0xfc, 8),
    (0x73, 7),
    (0xfd, 8),
    (0x1ffb, 13),
    (0x7fff0, 19),
    (0x1ffc, 13),
    (0x3ffc, 14),
    (0x22, 6),
    (0x7ffd, 15),
    (0x3, 5),
    (0x23, 6),
    (0x4, 5),
    (0x24, 6),
    (0x5, 5),
    (0x25, 6),
    (0x26, 6),
    (0x27, 6),
    (0x6, 5),
    (0x74, 7),
    (0x75, 7),
    (0x28, 6),
    (0x29, 6),
    (0x2a, 6),
    (0x7, 5),
    (0x2b, 6),
    (0x76, 7),
    (0x2c, 6),
    (0x8, 5),
    (0x9, 5),
    (0x2d, 6),
    (0x77, 7),
    (0x78, 7),
    (0x79, 7),
    (0x7a, 7),
    (0x7b, 7),
    (0x7ffe, 15),
    (0x7fc, 11),
    (0x3ffd, 14),
    (0x1ffd, 13),
];

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// `:method: GET`, `:scheme: https`, and an authority from the dynamic table.
const REST: &[u8] = &[0x82, 0x87, 0xc0];

fn encoded(text: &str) -> Vec<u8> {
    let (mut bytes, mut byte, mut filled) = (Vec::new(), 0_u8, 0);
    let codes = text.bytes().map(|one| CODES[usize::from(one - b'!')]);
    let bits =
        codes.flat_map(|(code, length)| (0..length).rev().map(move |bit| code >> bit & 1 == 1));
    for bit in bits {
        byte = byte << 1 | u8::from(bit);
        filled += 1;
        if filled == 8 {
            bytes.push(byte);
            (byte, filled) = (0, 0);
        }
    }
    if filled > 0 {
        bytes.push(byte << (8 - filled) | (0xff >> filled));
    }
    bytes
}

/// A header with this beginning, as it is and in Huffman's code.
fn literals(name: &[u8], value: &str) -> [Vec<u8>; 2] {
    let short = |bytes: &[u8], encoded: u8| {
        [&[u8::try_from(bytes.len()).unwrap() | encoded], bytes].concat()
    };
    [[name, &short(value.as_bytes(), 0)].concat(), [name, &short(&encoded(value), 0x80)].concat()]
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn headers(stream: u32, block: &[u8]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, block)
}

fn seen(frames: &[Vec<u8>]) -> Blocks {
    let mut blocks = Blocks::default();
    blocks.look(&[PREFACE, &frames.concat()].concat());
    blocks
}

#[test]
fn the_hash_is_found_beside_every_byte_and_no_other_byte_is_taken_for_it() {
    for byte in b'!'..=b'~' {
        let byte = char::from(byte);
        for path in [format!("/{byte}"), format!("/a{byte}b/{byte}{byte}"), format!("/?{byte}=")] {
            for literal in literals(&[0x44], &path) {
                let cut = seen(&[headers(1, &[REST, &literal].concat())]).cut(1);
                // A backslash is in no target that is taken, and what is behind it is not looked at.
                assert!(byte == '\\' || cut == path.contains('#'), "{path}");
            }
            for literal in literals(&[0x44], &format!("{path}#x").replace('\\', "")) {
                assert!(seen(&[headers(1, &[&literal, REST].concat())]).cut(1), "{path}#x");
            }
        }
    }
}

#[test]
fn only_a_path_is_looked_at_however_it_is_written() {
    let name = literals(&[0x40], ":path");
    let plain = [&[0x00, 5], NAME].concat();
    for (begin, path) in [
        (&[0x44][..], true),
        (&[0x04], true),
        (&[0x14], true),
        (&[0x45], true),
        (&name[0], true),
        (&name[1], true),
        (&plain, true),
        (&[0x40, 1, b'x'], false),
        (&[0x0f, 0x2b], false),
        (&[0x7f, 0x00], false),
        (&[0x3f, 0xe1, 0x1f, 0x41], false),
    ] {
        for literal in literals(begin, "/a#b") {
            let block = [REST, &literal, &[0x84][..usize::from(!path)]].concat();
            assert_eq!(seen(&[headers(1, &block)]).cut(1), path, "{begin:x?}");
        }
    }
}

#[test]
fn what_the_dynamic_table_holds_is_not_taken_once_it_may_hold_one() {
    let [bad, _] = literals(&[0x44], "/a#b");
    let [good, _] = literals(&[0x44], "/ab");
    let again = headers(5, &[REST, &[0xbe]].concat());
    let mut clean = seen(&[headers(1, &[REST, &good].concat()), again.clone()]);
    assert!(!clean.cut(1) && !clean.cut(5));
    let mut tainted = seen(&[
        headers(1, &[REST, &bad].concat()),
        headers(3, &[REST, &good].concat()),
        again,
        headers(7, &[REST, &[0x84]].concat()),
    ]);
    assert_eq!([1, 3, 5, 7].map(|stream| tainted.cut(stream)), [true, false, true, false]);
    // One that was never put into the table taints nothing.
    let [passing, _] = literals(&[0x04], "/a#b");
    let mut other =
        seen(&[headers(1, &[REST, &passing].concat()), headers(3, &[REST, &[0xbe]].concat())]);
    assert!(other.cut(1) && !other.cut(3));
}

#[test]
fn blocks_are_found_however_they_are_framed_and_cut() {
    let [_, path] = literals(&[0x44], "/api/v1/namespaces/a#b");
    let block = [REST, &path].concat();
    let padded = [&[3, 0, 0, 0, 0, 9][..], &block, &[0; 3]].concat();
    let stream = [
        PREFACE.to_vec(),
        frame(4, 0, 0, &[0; 6]),
        frame(HEADERS, END_HEADERS | PADDED | PRIORITY, 1, &padded),
        frame(0, 1, 1, b"GET /x# HTTP/1.1 \x01\x04"),
        frame(HEADERS, 0, 3, &block[..5]),
        frame(CONTINUATION, 0, 3, &[]),
        frame(CONTINUATION, 0, 3, &block[5..9]),
        frame(CONTINUATION, END_HEADERS, 3, &block[9..]),
        headers(5, REST),
        headers(7, &block),
    ]
    .concat();
    for size in 1..stream.len() {
        let mut blocks = Blocks::default();
        stream.chunks(size).for_each(|chunk| blocks.look(chunk));
        assert_eq!([1, 3, 7].map(|stream| blocks.cut(stream)), [true; 3], "{size}");
        assert!(!blocks.cut(9) && blocks.payload.is_empty() && blocks.block.is_empty());
    }
}

#[test]
fn a_block_without_end_is_not_kept() {
    let mut blocks = seen(&[frame(HEADERS, 0, 1, &[])]);
    for _ in 0..300 {
        blocks.look(&frame(CONTINUATION, 0, 1, &[0; 16 << 10]));
        assert!(blocks.block.len() <= MAX_BLOCK_BYTES);
    }
    assert!(blocks.cut(3));
}
