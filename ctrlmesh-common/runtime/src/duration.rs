//! Reads the durations of command-line flags.

use std::time::Duration;

/// A text that is no duration.
#[derive(Debug, thiserror::Error)]
#[error("`{seen}` is not a duration such as 500ms, 5s, 2m or 8760h")]
pub struct DurationError {
    seen: String,
}

/// Reads `500ms`, `5s`, `2m`, `1h`.
///
/// # Errors
/// Where number or unit is missing, or the duration is longer than can be counted.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let wrong = || DurationError { seen: text.to_owned() };
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(digits);
    let number: u32 = number.parse().map_err(|_unfit| wrong())?;
    let unit = match unit {
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        "m" => Duration::from_mins(1),
        "h" => Duration::from_hours(1),
        _ => return Err(wrong()),
    };
    Ok(unit * number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_needs_its_unit() {
        assert_eq!(parse("250ms").unwrap(), Duration::from_millis(250));
        assert_eq!(parse("2m").unwrap(), Duration::from_mins(2));
        for wrong in ["5", "s", "-1s", "1.5s", "5 s", ""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
