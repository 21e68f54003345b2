//! Finds protobuf fields, and replaces them with the lengths around them.

use std::ops::Range;

use super::Edit;

/// The prefix of the API server's protobuf bodies.
const PREFIX: &[u8] = b"k8s\0";

/// A field of a message.
#[derive(Clone, Debug)]
pub(super) struct Field {
    pub(super) number: u32,
    /// With tag and length.
    pub(super) whole: Range<usize>,
    /// The content of a field of variable length.
    pub(super) payload: Option<Range<usize>>,
}

/// The fields of the message at `at`.
pub(super) fn fields(body: &[u8], at: Range<usize>) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    let mut next = at.start;
    while next < at.end {
        let start = next;
        let (tag, behind) = varint(body, next, at.end)?;
        let number = u32::try_from(tag >> 3).ok().filter(|number| *number > 0)?;
        let (end, payload) = match tag & 7 {
            0 => (varint(body, behind, at.end)?.1, None),
            1 => (behind + 8, None),
            5 => (behind + 4, None),
            2 => {
                let (length, start) = varint(body, behind, at.end)?;
                let end = start.checked_add(usize::try_from(length).ok()?)?;
                (end, Some(start..end))
            }
            // Groups: no message of Kubernetes has one.
            _ => return None,
        };
        next = (end <= at.end).then_some(end)?;
        fields.push(Field { number, whole: start..end, payload });
    }
    Some(fields)
}

/// The envelope, behind the prefix.
pub(super) fn unprefixed(body: &[u8], at: Range<usize>) -> Option<Range<usize>> {
    body.get(at.clone())?.starts_with(PREFIX).then(|| at.start + PREFIX.len()..at.end)
}

/// The message at `at` with the edits that lie in it; each is of a whole field, or of a payload.
pub(super) fn apply(body: &[u8], at: Range<usize>, edits: &[Edit]) -> Option<Vec<u8>> {
    let mut applied = Vec::with_capacity(at.len() + 64);
    let mut message = at.clone();
    if let Some(inside) = unprefixed(body, at) {
        applied.extend(PREFIX);
        message = inside;
    }
    for field in fields(body, message)? {
        let inside =
            |range: &Range<usize>| edits.iter().any(|edit| edit.at.start >= range.start && edit.at.end <= range.end);
        if edits.iter().any(|edit| edit.at == field.whole && edit.with.is_empty()) {
            continue;
        }
        match field.payload.filter(inside) {
            None => applied.extend(&body[field.whole]),
            Some(payload) => {
                let payload = match edits.iter().find(|edit| edit.at == payload) {
                    Some(edit) => edit.with.clone(),
                    None => apply(body, payload, edits)?,
                };
                applied.extend(self::field(field.number, &payload));
            }
        }
    }
    Some(applied)
}

/// A field of variable length.
pub(in crate::rewrite) fn field(number: u32, payload: &[u8]) -> Vec<u8> {
    let mut field = Vec::with_capacity(payload.len() + 8);
    put_varint(&mut field, u64::from(number) << 3 | 2);
    put_varint(&mut field, payload.len() as u64);
    field.extend(payload);
    field
}

/// A body: a message in an envelope with its `apiVersion` and kind.
pub(in crate::rewrite) fn envelope(api_version: &str, kind: &str, message: &[u8]) -> Vec<u8> {
    let type_meta = [field(1, api_version.as_bytes()), field(2, kind.as_bytes())].concat();
    // Content encoding and content type follow, empty, as the API server writes them.
    [PREFIX, &field(1, &type_meta), &field(2, message), &field(3, b""), &field(4, b"")].concat()
}

fn varint(body: &[u8], at: usize, end: usize) -> Option<(u64, usize)> {
    let mut number = 0_u64;
    for (place, byte) in body.get(at..end)?.iter().take(10).enumerate() {
        number |= u64::from(byte & 0x7f).checked_shl(u32::try_from(place).ok()? * 7)?;
        if *byte < 0x80 {
            return Some((number, at + place + 1));
        }
    }
    None
}

fn put_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(u8::try_from(number & 0x7f | 0x80).unwrap_or_default());
        number >>= 7;
    }
    out.push(u8::try_from(number).unwrap_or_default());
}
