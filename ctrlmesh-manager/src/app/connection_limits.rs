//! Derives the limits for proxy connections from the open-files limit.

use nix::sys::resource::{self, Resource};
use tracing::warn;

use crate::listen::Limits;

/// Unproven connections. A proxy proves itself in milliseconds while the API server is idle. All of these still can in
/// time where it answers fifty reviews a second.
const UNPROVEN: usize = 512;

/// Unproven connections of one address.
const UNPROVEN_OF_ONE: usize = 256;

/// Open files besides proxy connections: connections to and from API servers, probes and metrics.
const OTHER_FILES: usize = 2048;

/// Raises the open-files limit to its maximum and returns it: many container runtimes begin with 1024.
pub(super) fn open_files() -> usize {
    let raised = resource::getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, most)| {
        resource::setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
        Ok(usize::try_from(most).unwrap_or(usize::MAX))
    });
    raised.unwrap_or_else(|error| {
        warn!(%error, "how many files may be open is not known");
        usize::MAX
    })
}

/// `proxies`, or fewer where the open-files limit allows only these.
pub(super) fn limits(proxies: usize, open_files: usize) -> Limits {
    let room = open_files.saturating_sub(OTHER_FILES).max(open_files / 2);
    if room < proxies {
        warn!(open_files, asked = proxies, room, "fewer proxies can be connected than may be");
    }
    let connections = proxies.min(room);
    let unproven = UNPROVEN.min(connections / 4).max(1);
    Limits { connections, unproven, unproven_of_one: UNPROVEN_OF_ONE.min(unproven / 2).max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_open_files_limit_bounds_the_connections() {
        let of = |proxies, open_files| {
            let limits = limits(proxies, open_files);
            (limits.connections, limits.unproven, limits.unproven_of_one)
        };
        assert_eq!(of(20_000, 524_288), (20_000, 512, 256));
        assert_eq!(of(20_000, usize::MAX), (20_000, 512, 256));
        assert_eq!(of(20_000, 10_000), (7952, 512, 256));
        assert_eq!(of(20_000, 1024), (512, 128, 64));
        assert_eq!(of(100, 4096), (100, 25, 12));
        assert_eq!(of(1, 4096), (1, 1, 1));
    }
}
