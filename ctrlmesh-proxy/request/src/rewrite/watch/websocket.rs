//! The end of a watch with a Status, as the API server sends it, over a WebSocket and as an HTTP stream.
//!
//! Over a WebSocket, each event is a message of its own, without the framing of an HTTP stream: text in JSON, binary in
//! protobuf and CBOR (apiserver's `WatchServer.HandleWS`). The frames are those of RFC 6455, 5.2; a server's are not
//! masked.

use crate::rewrite::document::Encoding;
use crate::rewrite::list;
use crate::rewrite::status::Status;

const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;

/// The frame has no continuation.
const FINAL: u8 = 0x80;

/// Longer payloads have their length in two further bytes.
const MAX_SHORT_BYTES: usize = 125;

/// "Normal closure" (RFC 6455, 7.4.1).
const NORMAL_CLOSURE: u16 = 1000;

/// The frames that end a watch with a Status: an ERROR event in an encoding that the client accepts, and the close.
pub fn error_frames(accept: Option<&str>, status: &Status) -> Vec<u8> {
    let encoding = accepted(accept.unwrap_or_default());
    let mut event = list::error(encoding, status);
    // Messages need no length before them. The newline behind a text stays, as the server's own.
    if encoding == Encoding::Protobuf {
        event.drain(..size_of::<u32>());
    }
    let opcode = if encoding == Encoding::Json { TEXT } else { BINARY };
    [frame(opcode, &event), frame(CLOSE, &NORMAL_CLOSURE.to_be_bytes())].concat()
}

fn frame(opcode: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![FINAL | opcode];
    match (u8::try_from(payload.len()), u16::try_from(payload.len())) {
        (Ok(short), _) if payload.len() <= MAX_SHORT_BYTES => frame.push(short),
        (_, Ok(length)) => {
            frame.push(126);
            frame.extend(length.to_be_bytes());
        }
        _ => {
            frame.push(127);
            frame.extend(u64::try_from(payload.len()).unwrap_or(u64::MAX).to_be_bytes());
        }
    }
    frame.extend(payload);
    frame
}

/// The same for a watch that is an HTTP stream: its content type, and the frame.
pub fn error_stream(accept: Option<&str>, status: &Status) -> (&'static str, Vec<u8>) {
    let encoding = accepted(accept.unwrap_or_default());
    let kind = match encoding {
        Encoding::Json => "application/json",
        Encoding::Protobuf => "application/vnd.kubernetes.protobuf;stream=watch",
        Encoding::Cbor => "application/cbor-seq",
    };
    (kind, list::error(encoding, status))
}

/// The first encoding that the client names; JSON where it names none.
fn accepted(accept: &str) -> Encoding {
    let mut types = accept.split(',').map(|clause| clause.split(';').next().unwrap_or_default().trim());
    types.find_map(Encoding::of).unwrap_or(Encoding::Json)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(message: &str) -> Status {
        Status { code: 410, reason: "Expired", message: message.to_owned(), retry_after: None }
    }

    /// Opcode and payload of each frame.
    fn read(mut frames: &[u8]) -> Vec<(u8, Vec<u8>)> {
        let mut read = Vec::new();
        while let [first, length, rest @ ..] = frames {
            assert_eq!(first & 0xf0, FINAL);
            let (length, rest) = match length {
                126 => (usize::from(u16::from_be_bytes([rest[0], rest[1]])), &rest[2..]),
                127 => (usize::try_from(u64::from_be_bytes(rest[..8].try_into().unwrap())).unwrap(), &rest[8..]),
                short => (usize::from(*short), rest),
            };
            read.push((first & 0x0f, rest[..length].to_vec()));
            frames = &rest[length..];
        }
        read
    }

    #[test]
    fn a_json_watch_ends_with_a_text_and_a_close() {
        for accept in [None, Some("application/json"), Some("*/*"), Some("text/plain, application/json;stream=watch")] {
            let frames = read(&error_frames(accept, &status("too old")));
            let [(TEXT, event), (CLOSE, code)] = &frames[..] else { panic!("{frames:?}") };
            assert_eq!((event.last(), &code[..]), (Some(&b'\n'), &[3, 0xe8][..]));
            let event: serde_json::Value = serde_json::from_slice(event).unwrap();
            assert_eq!((&event["type"], &event["object"]["code"]), (&"ERROR".into(), &410.into()));
        }
    }

    #[test]
    fn other_watches_end_with_a_binary_message() {
        for (accept, encoding) in [
            ("application/vnd.kubernetes.protobuf;stream=watch,application/json", Encoding::Protobuf),
            ("application/cbor-seq,application/json", Encoding::Cbor),
        ] {
            let frames = read(&error_frames(Some(accept), &status("too old")));
            let [(BINARY, event), (CLOSE, _)] = &frames[..] else { panic!("{frames:?}") };
            let whole = list::error(encoding, &status("too old"));
            assert!(whole.ends_with(event), "{accept}");
            assert_eq!(whole.len() - event.len(), if encoding == Encoding::Protobuf { 4 } else { 0 });
        }
    }

    #[test]
    fn a_stream_ends_with_a_frame_of_its_encoding() {
        for (accept, kind, encoding) in [
            (None, "application/json", Encoding::Json),
            (
                Some("application/vnd.kubernetes.protobuf,application/json"),
                "application/vnd.kubernetes.protobuf;stream=watch",
                Encoding::Protobuf,
            ),
            (Some("application/cbor-seq, application/json"), "application/cbor-seq", Encoding::Cbor),
        ] {
            let expected = (kind, list::error(encoding, &status("too old")));
            assert_eq!(error_stream(accept, &status("too old")), expected);
        }
    }

    #[test]
    fn every_length_is_read_back() {
        for length in [0, 125, 126, 127, 65_535, 65_536] {
            let payload = vec![b'x'; length];
            assert_eq!(read(&frame(TEXT, &payload)), [(TEXT, payload)]);
        }
    }
}
