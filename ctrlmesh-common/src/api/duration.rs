//! Durations as Go writes them, such as 500ms, 10s or 1h30m.

use std::time::Duration;

/// Units, the longer spelling before the one that it ends like, each with its nanoseconds.
const UNITS: [(&str, u64); 6] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// The duration that `text` says; `None` where it says none, or one that is longer than Go can say (about 292 years).
///
/// What is left of a nanosecond is dropped, of each number by itself: `0.5ns` is nothing.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (mut rest, mut nanoseconds) = (text, 0_u64);
    while !rest.is_empty() {
        let digits = rest.find(|next: char| !next.is_ascii_digit() && next != '.')?;
        let (number, behind) = rest.split_at(digits);
        let (unit, each) = UNITS.iter().find(|(unit, _)| is_unit(behind, unit))?;
        nanoseconds = nanoseconds.checked_add(times(number, *each)?)?;
        rest = &behind[unit.len()..];
    }
    (!text.is_empty() && i64::try_from(nanoseconds).is_ok()).then(|| Duration::from_nanos(nanoseconds))
}

/// A number such as `1` or `1.5`, times a unit, without what is left of a whole.
fn times(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|one| one.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) {
        return None;
    }
    // A nanosecond is the 3.6e12th part of the longest unit: digits behind these cannot matter.
    let digits = &fraction[..fraction.len().min(18)];
    let scale = 10_u128.pow(u32::try_from(digits.len()).ok()?);
    let part = digits.parse::<u128>().ok()? * u128::from(unit) / scale;
    whole.parse::<u64>().ok()?.checked_mul(unit)?.checked_add(u64::try_from(part).ok()?)
}

/// Whether `text` begins with `unit` and then with another number, or ends.
fn is_unit(text: &str, unit: &str) -> bool {
    text.strip_prefix(unit).is_some_and(|rest| !rest.starts_with(|next: char| next.is_alphabetic()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let cases = [
            ("500ms", 500_000_000),
            ("10s", 10_000_000_000),
            ("1h30m", 5_400_000_000_000),
            ("1.5h", 5_400_000_000_000),
            ("1m1ms1us1ns", 60_001_001_001),
            ("0s", 0),
            ("0.5ns", 0),
            ("0.9ns0.9ns", 0),
            ("1.0009us", 1_000),
            ("0.0000000000000000000000000000001h", 0),
            ("9223372036854775807ns", 9_223_372_036_854_775_807),
        ];
        for (text, nanoseconds) in cases {
            assert_eq!(parse_duration(text), Some(Duration::from_nanos(nanoseconds)), "{text}");
        }
        for wrong in
            ["", "1", "s", "1d", "-1s", "1.s", ".5s", "1..5s", "1 s", "1mss", "9999999h", "9223372036854775808ns"]
        {
            assert_eq!(parse_duration(wrong), None, "{wrong}");
        }
    }
}
