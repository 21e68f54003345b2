//! Feeds raw bytes to the pure core, and checks what holds for any input.
//!
//! The fuzzer calls these functions with nightly; the tests of `ctrlmesh-request` call them with stable, on seeded
//! input.

use std::borrow::Cow;

use ctrlmesh_common::policy::egress::{ANY, AccessList, AccessRule, Egress, Scheme, UrlMatch, UrlParts};
use ctrlmesh_common::policy::{Limit, Lock, Policy};
use ctrlmesh_common::selector::Selector;
use ctrlmesh_request::decide::{Decision, Rename, decide};
use ctrlmesh_request::egress::{Hello, Protocol, Rules, Visible, protocol, read_hello};
use ctrlmesh_request::request::{Query, RequestInfo};
use ctrlmesh_request::rewrite::list::{self, Change};
use ctrlmesh_request::rewrite::watch::{self, Frames};
use ctrlmesh_request::rewrite::{self, Encoding, lock};
use serde_json::Value;

/// The policy's selector.
const POLICY: &str = "p in (1,2),!q";

/// The longest start of a connection that is cut at each of its bytes.
const MAX_CUT_BYTES: usize = 1 << 10;

/// So many bytes always tell a protocol.
const PROTOCOL_BYTES: usize = 34;

/// A line `METHOD TARGET`: it is refused, or the server reads the same request, narrowed.
///
/// # Panics
/// Where that does not hold.
pub fn request_line(data: &[u8]) {
    let Ok(line) = std::str::from_utf8(data) else { return };
    let Some((method, target)) = line.split_once(' ') else { return };
    let Ok(asked) = RequestInfo::parse(method, target) else { return };
    let Decision::Rewrite(plan) = decide(&policy(), &asked) else {
        assert!(!asked.is_collection() || decide(&policy(), &asked) != Decision::Pass, "{line}");
        return;
    };
    let sent = rewrite::target(&asked, &plan);
    let seen = RequestInfo::parse(method, &sent).unwrap_or_else(|error| panic!("{sent}: {error}"));
    let what = |info: &RequestInfo<'_>| {
        let parts =
            [info.verb(), info.api_group(), info.api_version(), info.namespace(), info.resource(), info.subresource()];
        parts.map(str::to_owned)
    };
    assert_eq!(what(&asked), what(&seen), "{line} became {sent}");
    if asked.is_collection() {
        assert_narrowed(&seen, &sent);
    }
    if asked.name_in_path() == "op" && plan.lock.is_some() {
        assert_eq!(seen.name_in_path(), "op---s1", "{line} became {sent}");
    }
}

/// A query: the server reads one label selector, which holds the policy, and all else as it was.
///
/// # Panics
/// Where that does not hold.
pub fn query(data: &[u8]) {
    let asked = Query::new(data);
    if !asked.has_room_for(1) {
        return;
    }
    let narrowed = rewrite::selector::narrowed(data, &policy_selector());
    let seen = Query::new(&narrowed);
    let others = |query: Query<'_>| -> Vec<Vec<u8>> {
        let others = query.pairs().filter(|pair| !pair.is("labelSelector"));
        others.map(|pair| pair.raw.to_vec()).collect()
    };
    let kept = if data.is_empty() { Vec::new() } else { others(asked) };
    assert_eq!(kept, others(seen), "{}", narrowed.escape_ascii());
    assert_eq!(seen.pairs().filter(|pair| pair.is("labelSelector")).count(), 1);
    assert_holds_policy(&seen.text("labelSelector").unwrap_or_default());
}

/// A client's label selector: the server reads exactly both.
///
/// # Panics
/// Where that does not hold.
pub fn selector(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let query = format!("labelSelector={}", rewrite::selector::escaped(data));
    let narrowed = rewrite::selector::narrowed(query.as_bytes(), &policy_selector());
    let seen = Query::new(&narrowed).text("labelSelector").map(Cow::into_owned).unwrap_or_default();
    match (Selector::parse(text), Selector::parse(&seen)) {
        (Ok(client), Ok(seen)) => assert_eq!(seen, policy_selector().and(&client), "{text:?}"),
        (Err(_), Err(_)) => {}
        (client, seen) => panic!("{text:?}: {client:?} became {seen:?}"),
    }
}

/// A body in each encoding: it is refused, or only names change.
///
/// # Panics
/// Where that does not hold.
pub fn lock_body(data: &[u8]) {
    for encoding in [Encoding::Json, Encoding::Protobuf, Encoding::Cbor] {
        let up = lock::request(data, encoding, &rename());
        let down = lock::response(data, encoding, &rename());
        let framed = lock::frame(data, encoding, &rename());
        if encoding == Encoding::Json
            && let Ok(given) = serde_json::from_slice::<Value>(data)
        {
            let framed = framed.as_ref().ok().and_then(Option::as_ref);
            let bodies = [up.as_ref().ok(), down.as_ref().ok(), framed];
            for changed in bodies.into_iter().flatten() {
                let changed: Value = serde_json::from_slice(changed).unwrap_or_else(|error| panic!("{given}: {error}"));
                assert_eq!(nameless(changed), nameless(given.clone()));
            }
        }
        // What went up under the server's name comes back under the client's.
        if let Ok(Cow::Owned(up)) = up {
            assert!(lock::response(&up, encoding, &rename()).is_ok(), "{encoding:?} {}", data.escape_ascii());
        }
        for change in [Change::Joins, Change::Leaves] {
            if let Ok(listed) = list::events(data, encoding, change) {
                whole_frames(&listed.frames, encoding);
            }
        }
    }
}

/// A stream in each encoding: however it is cut, it says the same.
///
/// # Panics
/// Where that does not hold.
pub fn watch_frames(data: &[u8]) {
    let Some((size, stream)) = data.split_first() else { return };
    for encoding in [Encoding::Json, Encoding::Protobuf, Encoding::Cbor] {
        for target in
            ["/api/v1/pods?watch&resourceVersion=5", "/api/v1/pods?watch", "/api/v1/pods?watch&sendInitialEvents=1"]
        {
            let Ok(request) = RequestInfo::parse("GET", target) else { return };
            let (mut whole, mut cut) = (Frames::new(encoding, &request), Frames::new(encoding, &request));
            let size = usize::from(*size).max(1);
            let (mut shown, mut shown_cut) = (Vec::new(), Vec::new());
            let fed = whole.feed_each(stream, |frame| shown.push(watch::object_change(frame, encoding)));
            let Ok(end) = fed else { return };
            let mut last = None;
            for (number, chunk) in stream.chunks(size).enumerate() {
                let end = cut.feed_each(chunk, |frame| shown_cut.push(watch::object_change(frame, encoding)));
                let end = end.unwrap_or_else(|error| panic!("{encoding:?}: {error}"));
                last = end.map(|end| number * size + end).or(last);
            }
            assert_eq!((end, whole.at_boundary()), (last, cut.at_boundary()), "{encoding:?} {size}");
            assert_eq!(whole.at(), cut.at(), "{encoding:?} {size}");
            assert_eq!(shown, shown_cut, "{encoding:?} {size}");
        }
    }
}

/// The start of a TLS connection: it is incomplete until it says what it says, and says it in records of any size.
///
/// # Panics
/// Where that does not hold.
pub fn client_hello(data: &[u8]) {
    let whole = read_hello(data);
    for end in 0..data.len().min(MAX_CUT_BYTES) {
        let prefix = read_hello(&data[..end]);
        assert!(prefix == Hello::Incomplete || prefix == whole, "{end} of {}", data.escape_ascii());
    }
    let size = data.last().map_or(1, |size| usize::from(*size).max(1));
    let hello = read_hello(&in_records(data, size));
    assert_eq!(hello, read_hello(&in_records(data, 1 << 14)), "{size} {}", data.escape_ascii());
    for hello in [whole, hello] {
        if let Hello::Read { server_name: Some(name) } = hello {
            let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
            let is_label = |label: &str| !label.is_empty() && label.bytes().all(is_inner);
            assert!(name.len() <= 253 && name.split('.').all(is_label), "{name:?}");
        }
    }
}

/// The start of any connection: its protocol is told once, and a request passes as below a path only if it is.
///
/// # Panics
/// Where that does not hold.
pub fn http_head(data: &[u8]) {
    let told = protocol(data);
    assert!(told.is_some() || data.len() < PROTOCOL_BYTES, "{}", data.escape_ascii());
    for end in 0..data.len().min(PROTOCOL_BYTES) {
        let prefix = protocol(&data[..end]);
        assert!(prefix.is_none() || prefix == told, "{end} of {}", data.escape_ascii());
    }
    let line = data.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return };
    let mut words = line.split(' ');
    let (Some(Protocol::Http1), Some(method), Some(path)) = (told, words.next(), words.next()) else { return };
    let host = words.next().unwrap_or_default();
    let visible = Visible { scheme: Some(Scheme::Http), host, port: 80, request: Some((method, path)) };
    let [allow, deny] = [AccessList::Allow, AccessList::Deny].map(|list| below_public(list).decide(&visible).is_ok());
    assert_ne!(allow, deny, "{line}");
    assert!(!allow || is_below_public(path), "{line}");
}

fn policy_selector() -> Selector {
    Selector::parse(POLICY).unwrap_or_default()
}

fn policy() -> Policy {
    let limit = Limit { selector: policy_selector(), ..Limit::default() };
    Policy { limits: vec![limit], lock: Some(rename().lock), ..Policy::default() }
}

fn rename() -> Rename {
    let lock = Lock { namespace: "ops".to_owned(), name: "op".to_owned(), shard: "s1".to_owned() };
    Rename { on_server: lock.per_shard(), lock }
}

/// The `ClientHello` with this body, in records of so many bytes.
fn in_records(body: &[u8], bytes: usize) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX).to_be_bytes();
    let message = [&[1], &length[1..], body].concat();
    let record = |content: &[u8]| {
        let length = u16::try_from(content.len()).unwrap_or(u16::MAX).to_be_bytes();
        [&[22, 3, 1], &length[..], content].concat()
    };
    message.chunks(bytes).flat_map(record).collect()
}

/// A rule on what is below `/public` on any host.
fn below_public(list: AccessList) -> Rules {
    let public = UrlParts { host: ANY.to_owned(), path: Some("/public/*".to_owned()), ..UrlParts::default() };
    let urls = vec![UrlMatch::Parts(public)];
    let (ports, methods) = (vec![80], vec![ANY.to_owned()]);
    let access = AccessRule { breaker: String::new(), rule: String::new(), ports, list, urls, methods };
    Rules::new(&Egress { ports: vec![80], access: vec![access] }).unwrap_or_default()
}

/// Whether a server finds the path below `/public` that decodes every escape but that of the slash.
fn is_below_public(path: &str) -> bool {
    let mut decoded = Vec::new();
    let mut rest = path.split(['?', '#']).next().unwrap_or_default().as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        let escaped = behind.get(..2).filter(|_| *first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        let escaped = escaped.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|byte| *byte != b'/');
        decoded.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &behind[2..] } else { behind };
    }
    let mut open = Vec::new();
    for segment in decoded.split(|byte| *byte == b'/') {
        match segment {
            b"" | b"." => {}
            b".." => drop(open.pop()),
            other => open.push(other),
        }
    }
    open.first() == Some(&&b"public"[..])
}

fn assert_narrowed(seen: &RequestInfo<'_>, sent: &str) {
    let counted = seen.query().pairs().filter(|pair| pair.is("labelSelector")).count();
    assert_eq!(counted, 1, "{sent}");
    assert_holds_policy(&seen.query().text("labelSelector").unwrap_or_default());
}

/// What does not parse selects nothing: the server refuses it.
fn assert_holds_policy(text: &str) {
    if let Ok(seen) = Selector::parse(text) {
        let policy = policy_selector();
        assert!(seen.requirements().starts_with(policy.requirements()), "{text:?}");
    }
}

/// The frames of a stream that must be whole.
fn whole_frames(stream: &[u8], encoding: Encoding) {
    let mut rest = stream;
    let mut framer = watch::Framer::new(encoding);
    while !rest.is_empty() {
        match framer.next(rest) {
            Ok(Some((_, next))) => rest = &rest[next..],
            other => panic!("{encoding:?}: {other:?} in {}", stream.escape_ascii()),
        }
    }
}

/// A document without what a rename may change: names, messages, and what holds items that it may hide.
fn nameless(mut value: Value) -> Value {
    strip(&mut value);
    value
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for field in ["name", "message", "items", "rows", "value"] {
                fields.remove(field);
            }
            fields.values_mut().for_each(strip);
        }
        Value::Array(values) => values.iter_mut().for_each(strip),
        _ => {}
    }
}
