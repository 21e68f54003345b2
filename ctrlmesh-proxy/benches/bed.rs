//! The contestants of a benchmark, with a server behind and clients before them.

pub(crate) mod backend;
pub(crate) mod load;
pub(crate) mod process;
pub(crate) mod profile;
pub(crate) mod relay;
pub(crate) mod usage;
#[path = "../tests/harness/pki.rs"]
#[allow(dead_code, reason = "the harness of the tests has more")]
pub(crate) mod pki;

use std::fmt;
use std::net::SocketAddr;

use http::Version;

use pki::Pki;
use process::Process;

/// What stands between the load and the backend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// Nothing.
    Direct,
    /// Debian's nginx.
    Nginx,
    /// Hyper's server and client, joined, on one current-thread runtime.
    Relay,
    /// `ctrlmesh-proxy` without a policy.
    Ours,
    /// `ctrlmesh-proxy` with a policy for what is asked.
    Ruled,
}

/// All contestants, running.
pub(crate) struct Bed {
    contestants: Vec<(Kind, Process)>,
    #[expect(dead_code, reason = "held: it runs until it is dropped")]
    backend: Process,
    /// Last: the others read its files as long as they run.
    pub(crate) pki: Pki,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kind::Direct => "direct",
            Kind::Nginx => "nginx",
            Kind::Relay => "bare hyper relay",
            Kind::Ours => "ctrlmesh-proxy",
            Kind::Ruled => "ctrlmesh-proxy, one rule",
        })
    }
}

impl Bed {
    /// Starts the backend and `kinds`; leaves out nginx, and says so, where it is not installed.
    pub(crate) fn start(kinds: &[Kind]) -> Self {
        let pki = Pki::new();
        let backend = Process::backend(&pki);
        let mut contestants = Vec::new();
        for kind in kinds {
            match Process::contestant(*kind, &pki, backend.address) {
                Some(process) => contestants.push((*kind, process)),
                None => {
                    println!(
                        "{kind} is left out: it is not installed (`cargo xtask setup` does, Debian's nginx-light)"
                    );
                }
            }
        }
        Self { contestants, backend, pki }
    }

    /// All contestants; in every other round from the last to the first.
    pub(crate) fn round(&self, round: usize) -> Vec<(Kind, &Process)> {
        let mut order: Vec<_> = self.contestants.iter().map(|(kind, process)| (*kind, process)).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        order
    }

    pub(crate) fn kinds(&self) -> Vec<Kind> {
        self.contestants.iter().map(|(kind, _)| *kind).collect()
    }
}

/// How a protocol is called in the tables.
pub(crate) fn protocol(version: Version) -> &'static str {
    if version == Version::HTTP_2 { "h2" } else { "h1" }
}

/// The median of what was measured, and its spread.
pub(crate) fn spread(values: &mut [f64]) -> String {
    values.sort_unstable_by(f64::total_cmp);
    let [first, .., last] = values else {
        return format!("{:.1}", values.first().copied().unwrap_or(f64::NAN));
    };
    let (first, last) = (*first, *last);
    format!("{:.1} ({first:.1}–{last:.1})", values[values.len() / 2])
}

/// An address that is free now.
pub(crate) fn free_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}
