//! What is attached, and what happened so far?

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ctrlmesh_common::kernel::{
    CHECK_HEARTBEAT, CHECK_LISTENER, CHECK_PORT, FAIL_OPEN, NATIVE_IPV6, Pod,
};
use nix::time::{self, ClockId};
use serde::Serialize;

use super::map::Maps;
use super::object::HOOKS;
use super::pin::{Pins, Slot};
use super::record::{Record, State};
use super::{Error, link, table};

/// Everything that is pinned.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Status {
    /// Enrolled pods, by slot.
    pub attachments: Vec<Attachment>,
    /// Outcome → how often, since the maps were made.
    pub counters: BTreeMap<&'static str, u64>,
}

/// One enrolled pod.
#[derive(Clone, Debug, Serialize)]
pub struct Attachment {
    /// Its slot.
    pub slot: Slot,
    /// Its cgroup.
    pub cgroup: PathBuf,
    /// Whether the cgroup still exists; if not, the next sweep removes the attachment.
    pub alive: bool,
    /// Who attached it.
    pub owner: String,
    /// `attached`, or `closed` where a full table left the pod without targets, and all its connections are refused.
    pub state: &'static str,
    /// What is redirected.
    pub targets: Vec<String>,
    /// The proxy's port; 0 where the pod is closed.
    pub to: u16,
    /// `closed` or `open`.
    pub fail: &'static str,
    /// Whether native IPv6 targets go through our prefix, sockets for IPv6 only among them.
    pub ipv6: bool,
    /// How it is known that the proxy listens: `listener`, `port` or `none`.
    pub check: &'static str,
    /// Age of the proxy's last beat, in seconds, where it counts.
    pub heartbeat_age: Option<f64>,
    /// Programs that are attached.
    pub hooks: Vec<String>,
    /// Cgroups below whose connections pass.
    pub except: Vec<PathBuf>,
}

// === impl Status ===

impl Status {
    /// Reads what is pinned below `pins`; nothing, if nobody ever pinned anything.
    ///
    /// # Errors
    /// If it may not be read.
    pub fn read(pins: &Path) -> Result<Self, Error> {
        let pins = Pins::at(pins);
        if !pins.exist()? {
            return Ok(Self::default());
        }
        Self::of(&pins, &Maps::open(&pins)?)
    }

    pub(super) fn of(pins: &Pins, maps: &Maps) -> Result<Self, Error> {
        let records = pins.records()?.into_iter().filter(|record| record.state != State::Claimed);
        let attachments = records.map(|record| attachment(pins, maps, record));
        let counters = maps.counts()?.into_iter().map(|(outcome, count)| (outcome.name(), count));
        Ok(Self {
            attachments: attachments.collect::<Result<_, _>>()?,
            counters: counters.collect(),
        })
    }
}

/// Nanoseconds of the clock that the kernel compares beats with.
pub(super) fn now() -> u64 {
    // The clock exists on every kernel; before it does, nothing has beaten.
    let now = time::clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

fn attachment(pins: &Pins, maps: &Maps, record: Record) -> Result<Attachment, Error> {
    let open = record.state == State::Attached;
    let pod = if open { maps.pods.get(&record.slot.index(), 0) } else { Ok(Pod::default()) };
    let pod = pod.map_err(Error::map("PODS"))?;
    let targets = match pod.table(pod.generation) {
        Some(table) => table::targets(maps, table)?,
        None => Vec::new(),
    };
    let names = pins.names(record.slot)?;
    Ok(Attachment {
        slot: record.slot,
        alive: record.lives(),
        cgroup: record.cgroup.path,
        owner: record.owner,
        state: record.state.name(),
        targets: targets.iter().map(ToString::to_string).collect(),
        to: u16::from_be(pod.port),
        fail: if pod.flags & FAIL_OPEN == 0 { "closed" } else { "open" },
        ipv6: pod.flags & NATIVE_IPV6 != 0,
        check: check(&pod),
        heartbeat_age: age(maps, &pod)?,
        hooks: names
            .into_iter()
            .filter(|name| HOOKS.contains(&name.as_str()) || name == link::INBOUND)
            .collect(),
        except: record.except.into_iter().map(|cgroup| cgroup.path).collect(),
    })
}

fn check(pod: &Pod) -> &'static str {
    match (pod.flags & CHECK_LISTENER != 0, pod.flags & CHECK_PORT != 0) {
        (true, _) => "listener",
        (false, true) => "port",
        (false, false) => "none",
    }
}

fn age(maps: &Maps, pod: &Pod) -> Result<Option<f64>, Error> {
    if pod.flags & CHECK_HEARTBEAT == 0 {
        return Ok(None);
    }
    let beat = maps.heartbeats.get(&pod.heartbeat, 0).map_err(Error::map("HEARTBEATS"))?;
    Ok(Some(Duration::from_nanos(now().saturating_sub(beat)).as_secs_f64()))
}
