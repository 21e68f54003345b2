//! The clock that goes on while the machine is suspended, and that nobody sets.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The time since the machine was started.
pub fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_clock_runs() {
        let before = super::now();
        std::thread::yield_now();
        assert!(before > std::time::Duration::ZERO && super::now() >= before);
    }
}
