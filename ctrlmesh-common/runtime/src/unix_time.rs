//! Times as the wire has them.

use std::time::SystemTime;

/// In milliseconds since 1970; 0 before that.
pub fn millis(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_time_before_1970_is_the_first() {
        assert_eq!(millis(SystemTime::UNIX_EPOCH + Duration::from_micros(1_234_567)), 1234);
        assert_eq!(millis(SystemTime::UNIX_EPOCH - Duration::from_secs(1)), 0);
    }
}
