//! Reads and writes the trace context of a request, as the W3C Recommendation "Trace Context" has it.

use http::header::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

pub(super) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Of version 00: the version, the trace, its parent and flags, with hyphens between them. Later versions begin so.
const PARENT_BYTES: usize = 55;

/// A longer state is not kept with a span: no proxy has to pass on more. It goes to the API server all the same.
const MAX_STATE_BYTES: usize = 512;

/// The version that is none.
const NO_VERSION: &str = "ff";

/// The context that a request brings. `None` where it brings none, or one that is malformed.
pub(super) fn read(headers: &HeaderMap) -> Option<SpanContext> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    let (trace, parent, flags) = parse(value.to_str().ok()?)?;
    let context = SpanContext::new(trace, parent, flags, true, state(headers));
    context.is_valid().then_some(context)
}

/// Names `span` as the parent of what the API server does. The state of a trace passes as the operator sent it, and is
/// removed where the trace is `new`.
pub(super) fn write(headers: &mut HeaderMap, span: &SpanContext, new: bool) {
    if new {
        headers.remove(TRACESTATE);
    }
    let flags = span.trace_flags() & TraceFlags::SAMPLED;
    let parent = format!("00-{}-{}-{flags:02x}", span.trace_id(), span.span_id());
    // All of it is ASCII.
    if let Ok(parent) = HeaderValue::try_from(parent) {
        headers.insert(TRACEPARENT, parent);
    }
}

fn parse(text: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let (known, more) = text.split_at_checked(PARENT_BYTES)?;
    let mut fields = known.split('-');
    let mut hex = |length| fields.next().filter(|field| field.len() == length && field.bytes().all(is_hex));
    let (version, trace, parent, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
    let may_have_more = version != "00" && more.starts_with('-');
    if version == NO_VERSION || !(more.is_empty() || may_have_more) {
        return None;
    }
    let flags = u8::from_str_radix(flags, 16).ok()?;
    Some((TraceId::from_hex(trace).ok()?, SpanId::from_hex(parent).ok()?, TraceFlags::new(flags) & TraceFlags::SAMPLED))
}

/// Digits in lower case only.
fn is_hex(byte: u8) -> bool {
    byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)
}

/// The state of the trace, of one or more headers. Empty where it is malformed or too long, which says nothing about
/// the parent.
fn state(headers: &HeaderMap) -> TraceState {
    let values = headers.get_all(TRACESTATE).iter().flat_map(HeaderValue::to_str);
    let members = values.flat_map(|value| value.split(','));
    let members: Vec<&str> = members.map(str::trim).filter(|member| !member.is_empty()).collect();
    let state = members.join(",");
    if state.len() > MAX_STATE_BYTES { TraceState::NONE } else { state.parse().unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const PARENT: &str = "00f067aa0ba902b7";

    fn headers(parents: &[&str], states: &[&str]) -> HeaderMap {
        let parents = parents.iter().map(|value| (TRACEPARENT, *value));
        let states = states.iter().map(|value| (TRACESTATE, *value));
        let mut headers = HeaderMap::new();
        for (name, value) in parents.chain(states) {
            headers.append(name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_context_is_read_with_its_state() {
        let sent = headers(&[&format!("00-{TRACE}-{PARENT}-01")], &["a=1, b=2", "c=3"]);
        let context = read(&sent).unwrap();
        assert_eq!((context.trace_id().to_string(), context.span_id().to_string()), (TRACE.into(), PARENT.into()));
        assert!(context.is_sampled() && context.is_remote());
        assert_eq!(context.trace_state().header(), "a=1,b=2,c=3");
    }

    #[test]
    fn only_the_flag_for_sampling_is_kept() {
        for (flags, sampled) in [("00", false), ("01", true), ("02", false), ("ff", true)] {
            let context = read(&headers(&[&format!("00-{TRACE}-{PARENT}-{flags}")], &[])).unwrap();
            assert_eq!(context.trace_flags(), if sampled { TraceFlags::SAMPLED } else { TraceFlags::default() });
        }
    }

    #[test]
    fn a_later_version_is_read_as_far_as_it_is_known() {
        for more in ["", "-", "-what-comes"] {
            assert!(read(&headers(&[&format!("cc-{TRACE}-{PARENT}-01{more}")], &[])).is_some(), "{more}");
        }
    }

    #[test]
    fn malformed_parents_are_ignored() {
        let zero = "0".repeat(32);
        let wrong = [
            String::new(),
            format!("00-{TRACE}-{PARENT}"),
            format!("00-{TRACE}-{PARENT}-1"),
            format!("0-{TRACE}-{PARENT}-001"),
            format!("00-{TRACE}-{PARENT}-01-more"),
            format!("cc-{TRACE}-{PARENT}-01more"),
            format!("ff-{TRACE}-{PARENT}-01"),
            format!("00-{}-{PARENT}-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-{PARENT}-0G"),
            format!("00_{TRACE}_{PARENT}_01"),
            format!("00-{zero}-{PARENT}-01"),
            format!("00-{TRACE}-{}-01", &zero[..16]),
            format!("00-{PARENT}-{TRACE}-01"),
            format!("00-+{}-{PARENT}-01", &TRACE[1..]),
        ];
        for wrong in wrong {
            assert!(read(&headers(&[&wrong], &["a=1"])).is_none(), "{wrong}");
        }
        let twice = format!("00-{TRACE}-{PARENT}-01");
        assert!(read(&headers(&[&twice, &twice], &[])).is_none());
        assert!(read(&HeaderMap::new()).is_none());
    }

    #[test]
    fn a_malformed_state_leaves_the_parent_as_it_is() {
        for wrong in ["no equals sign", &format!("a={}", "1".repeat(MAX_STATE_BYTES))] {
            let context = read(&headers(&[&format!("00-{TRACE}-{PARENT}-01")], &[wrong])).unwrap();
            assert_eq!((context.trace_id().to_string(), context.trace_state().header()), (TRACE.into(), String::new()));
        }
    }

    #[test]
    fn the_span_becomes_the_parent_and_the_state_passes() {
        let mut sent = headers(&[&format!("00-{TRACE}-{PARENT}-01")], &["a=1"]);
        let context = read(&sent).unwrap();
        let own = SpanContext::new(context.trace_id(), SpanId::from(7), TraceFlags::SAMPLED, false, TraceState::NONE);
        write(&mut sent, &own, false);
        assert_eq!(sent[TRACEPARENT], format!("00-{TRACE}-0000000000000007-01"));
        assert_eq!(sent[TRACESTATE], "a=1");
        write(&mut sent, &own, true);
        assert!(!sent.contains_key(TRACESTATE), "it belongs to another trace");
    }
}
