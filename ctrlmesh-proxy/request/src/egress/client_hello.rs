//! Reads the name of the server from the `ClientHello` with which a TLS connection begins.
//!
//! Input is what has arrived of the connection, from its first byte. The hello may be spread over records in any way
//! (RFC 8446, section 5.1). Where the client encrypts its hello (ECH), the name is that of the outer hello.

use std::borrow::Cow;
use std::net::Ipv4Addr;

use fields::Fields;
use records::Fragments;

mod fields;
mod records;

/// The longest hello that is read, in bytes, without its header. Servers read 16 KiB to 128 KiB.
pub const MAX_HELLO_BYTES: usize = 64 << 10;

/// Kind and length of a handshake message.
const HEADER_BYTES: usize = 4;

/// The kind of handshake message that a `ClientHello` is.
const CLIENT_HELLO: u8 = 1;

/// How many kinds of extensions there may be.
const KINDS: usize = 1 << 16;

/// The extension that names the server (RFC 6066, section 3).
const SERVER_NAME: u16 = 0;

/// The kind of server name that is a DNS name.
const HOST_NAME: u8 = 0;

/// The longest DNS name, in bytes, without the dot of the root.
const MAX_NAME_BYTES: usize = 253;

/// The longest label of a DNS name, in bytes.
const MAX_LABEL_BYTES: usize = 63;

/// What a connection begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hello {
    /// What has arrived is no whole hello, and may become one.
    Incomplete,
    /// No hello, or one that no server takes.
    NotTls,
    Read {
        /// In lower case, without a dot at its end. `None` where the client names no server, or none that DNS knows.
        server_name: Option<String>,
    },
}

/// These bytes can be no hello.
struct NotTls;

/// Reads the hello at the start of `bytes`. What is behind it does not count.
pub fn read_hello(bytes: &[u8]) -> Hello {
    let server_name = match body(bytes) {
        Ok(None) => return Hello::Incomplete,
        Ok(Some(body)) => server_name(&body),
        Err(error) => Err(error),
    };
    match server_name {
        Ok(server_name) => Hello::Read { server_name },
        Err(NotTls) => Hello::NotTls,
    }
}

/// The hello without its header, once all of it has arrived. Copies only what is spread over several records.
fn body(bytes: &[u8]) -> Result<Option<Cow<'_, [u8]>>, NotTls> {
    let mut header = [0; HEADER_BYTES];
    let mut arrived = 0;
    for fragment in Fragments::new(bytes) {
        let fragment = fragment?;
        let missing = header.iter_mut().skip(arrived);
        missing.zip(fragment).for_each(|(place, byte)| *place = *byte);
        arrived += fragment.len();
        let [kind, length @ ..] = header;
        if arrived > 0 && kind != CLIENT_HELLO {
            return Err(NotTls);
        }
        if arrived < HEADER_BYTES {
            continue;
        }
        let length = fields::number(&length);
        if length > MAX_HELLO_BYTES {
            return Err(NotTls);
        }
        let whole = HEADER_BYTES + length;
        if arrived == fragment.len() && arrived >= whole {
            return Ok(Some(Cow::Borrowed(&fragment[HEADER_BYTES..whole])));
        }
        if arrived >= whole {
            return Ok(Some(Cow::Owned(joined(bytes, length))));
        }
    }
    Ok(None)
}

/// The `length` bytes behind the header, which have arrived.
fn joined(bytes: &[u8], length: usize) -> Vec<u8> {
    let mut header = HEADER_BYTES;
    let mut body = Vec::with_capacity(length);
    for fragment in Fragments::new(bytes).flatten() {
        let behind = &fragment[header.min(fragment.len())..];
        header -= fragment.len() - behind.len();
        body.extend_from_slice(&behind[..behind.len().min(length - body.len())]);
    }
    body
}

/// The server's name in a hello (RFC 8446, section 4.1.2).
fn server_name(hello: &[u8]) -> Result<Option<String>, NotTls> {
    let mut hello = Fields(hello);
    let version = hello.bytes(2)?;
    let _random = hello.bytes(32)?;
    let session = hello.list(1)?;
    let suites = hello.list(2)?;
    let compressions = hello.list(1)?;
    let is_odd = suites.0.is_empty() || suites.0.len() % 2 != 0;
    if version[0] != 3 || session.0.len() > 32 || is_odd || compressions.0.is_empty() {
        return Err(NotTls);
    }
    if hello.0.is_empty() {
        return Ok(None);
    }
    let mut extensions = hello.list(2)?;
    if !hello.0.is_empty() {
        return Err(NotTls);
    }
    let mut known = Kinds([0; KINDS / 64]);
    let mut name = None;
    while !extensions.0.is_empty() {
        let (kind, data) = (extensions.kind()?, extensions.list(2)?);
        known.add(kind)?;
        if kind == SERVER_NAME {
            name = host_name(data)?;
        }
    }
    Ok(name.and_then(dns_name))
}

/// The DNS name in the extension. Names of other kinds have the same form (RFC 6066, section 3), each kind once.
fn host_name(mut data: Fields<'_>) -> Result<Option<&[u8]>, NotTls> {
    let mut names = data.list(2)?;
    if names.0.is_empty() || !data.0.is_empty() {
        return Err(NotTls);
    }
    let mut host_name = None;
    while !names.0.is_empty() {
        let (kind, name) = (names.bytes(1)?[0], names.list(2)?);
        if kind == HOST_NAME && host_name.replace(name.0).is_some() {
            return Err(NotTls);
        }
    }
    Ok(host_name)
}

/// The name in lower case. An address is no name (RFC 6066, section 3).
fn dns_name(name: &[u8]) -> Option<String> {
    let name = name.strip_suffix(b".").unwrap_or(name);
    let is_inner = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    let is_label = |label: &[u8]| (1..=MAX_LABEL_BYTES).contains(&label.len()) && label.iter().all(is_inner);
    if name.len() > MAX_NAME_BYTES || !name.split(|byte| *byte == b'.').all(is_label) {
        return None;
    }
    let name = std::str::from_utf8(name).ok()?.to_ascii_lowercase();
    name.parse::<Ipv4Addr>().is_err().then_some(name)
}

/// The kinds of extensions in a hello, a bit for each: a hello may have thousands.
struct Kinds([u64; KINDS / 64]);

impl Kinds {
    /// No kind may come twice (RFC 8446, section 4.2).
    fn add(&mut self, kind: u16) -> Result<(), NotTls> {
        let word = &mut self.0[usize::from(kind >> 6)];
        let bit = 1 << (kind & 63);
        if *word & bit != 0 {
            return Err(NotTls);
        }
        *word |= bit;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
