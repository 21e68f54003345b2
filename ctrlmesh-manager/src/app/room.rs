//! How many proxies may be connected?

use nix::sys::resource::{self, Resource};
use tracing::warn;

use crate::listen::Limits;

/// Proxies that have not proved themselves. They need milliseconds for that where the API server has nothing else to do; so
/// few that all can where it answers fifty a second.
const UNPROVEN: usize = 512;

/// The same, from one address.
const UNPROVEN_OF_ONE: usize = 256;

/// Files that are open beside the proxies' connections: those to and from the API servers, and the pages.
const OTHER_FILES: usize = 2048;

/// How many files may be open, after that was made as many as may be: many container runtimes begin with 1024.
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

/// How many proxies may be connected where so many files may be open; what else is open always finds room.
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
    fn no_more_proxies_are_let_in_than_files_can_be_open() {
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
