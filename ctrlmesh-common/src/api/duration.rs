//! Durations as Go writes them, such as 500ms, 10s or 1h30m.

use std::time::Duration;

/// Units, the longer spelling before the one that it ends like, each with its nanoseconds.
const UNITS: [(&str, f64); 6] =
    [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 60e9), ("h", 3600e9)];

/// The longest duration that Go has, in nanoseconds: about 292 years.
const MAX_NANOSECONDS: f64 = 9.2e18;

/// The duration that `text` says; `None` where it says none, or one that is longer than Go can say.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (mut rest, mut nanoseconds) = (text, 0.0);
    while !rest.is_empty() {
        let digits = rest.find(|next: char| !next.is_ascii_digit() && next != '.')?;
        let (number, behind) = rest.split_at(digits);
        if !number.starts_with(|first: char| first.is_ascii_digit()) || number.ends_with('.') {
            return None;
        }
        let (unit, each) = UNITS.iter().find(|(unit, _)| is_unit(behind, unit))?;
        nanoseconds += number.parse::<f64>().ok()? * each;
        rest = &behind[unit.len()..];
    }
    let said = !text.is_empty() && nanoseconds <= MAX_NANOSECONDS;
    said.then(|| Duration::try_from_secs_f64(nanoseconds / 1e9).ok()).flatten()
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
        ];
        for (text, nanoseconds) in cases {
            assert_eq!(parse_duration(text), Some(Duration::from_nanos(nanoseconds)), "{text}");
        }
        for wrong in ["", "1", "s", "1d", "-1s", "1.s", ".5s", "1..5s", "1 s", "1mss", "9999999h"] {
            assert_eq!(parse_duration(wrong), None, "{wrong}");
        }
    }
}
