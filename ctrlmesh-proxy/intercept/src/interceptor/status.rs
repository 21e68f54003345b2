//! Reads the attachments and counters of the kernel programs.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ctrlmesh_common::kernel::{CHECK_HEARTBEAT, CHECK_LISTENER, CHECK_PORT, FAIL_OPEN, NATIVE_IPV6, Pod};
use nix::time::{self, ClockId};
use serde::Serialize;

use crate::Error;
use crate::host::cgroup::{Census, Cgroup, Hierarchy};
use crate::pins::record::{Record, State};
use crate::pins::{Pins, Slot};
use crate::programs::link;
use crate::programs::map::Maps;
use crate::programs::object::HOOKS;
use crate::programs::target_table;

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
    /// Its cgroup, where it is seen from here.
    pub cgroup: PathBuf,
    /// Whether the cgroup is to be seen from here.
    pub alive: bool,
    /// Whether the cgroup exists no more: its owner's next sweep removes it. One that is neither alive nor gone is
    /// elsewhere.
    pub gone: bool,
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
    /// Age at which a heartbeat of the proxy no longer counts, in seconds; none if heartbeats are not checked.
    pub heartbeat_max_age: Option<f64>,
    /// Age of the last heartbeat, in seconds; none if heartbeats are not checked, or there was none yet.
    pub heartbeat_age: Option<f64>,
    /// Programs that are attached.
    pub hooks: Vec<String>,
    /// Cgroups below whose connections pass.
    pub except: Vec<PathBuf>,
    /// Webhook calls that the proxy takes, by their address.
    pub webhooks: Vec<SocketAddr>,
}

/// What it is read from.
struct Reader<'a> {
    pins: &'a Pins,
    maps: &'a Maps,
    hierarchy: Option<&'a Hierarchy>,
    census: Option<Census<'a>>,
    /// Targets of tables that were read already.
    tables: BTreeMap<u16, Vec<String>>,
}

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

    pub(crate) fn of(pins: &Pins, maps: &Maps) -> Result<Self, Error> {
        let records = pins.records()?.into_iter().filter(|record| record.state != State::Claimed);
        // Without cgroups nothing is to be seen.
        let hierarchy = Hierarchy::find().ok();
        let census = hierarchy.as_ref().map(Hierarchy::census);
        let mut reader = Reader { pins, maps, hierarchy: hierarchy.as_ref(), census, tables: BTreeMap::new() };
        let mut webhooks = maps.webhooks()?;
        let attachments = records.filter_map(|record| {
            let webhooks = webhooks.remove(&record.slot.get()).unwrap_or_default();
            reader.attachment(record, webhooks).transpose()
        });
        let counters = maps.counts()?.into_iter().map(|(outcome, count)| (outcome.name(), count));
        Ok(Self { attachments: attachments.collect::<Result<_, _>>()?, counters: counters.collect() })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.attachments.is_empty() {
            writeln!(f, "nothing is attached")?;
        }
        for attachment in &self.attachments {
            attachment.fmt(f)?;
        }
        for (name, count) in self.counters.iter().filter(|(_, count)| **count > 0) {
            writeln!(f, "{name:22} {count}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dead = match (self.alive, self.gone) {
            (true, _) => "",
            (false, true) => " (gone; `detach` sweeps it)",
            (false, false) => " (not to be seen from here)",
        };
        writeln!(f, "slot {}  {}{dead}", self.slot, self.cgroup.display())?;
        writeln!(f, "  owner      {}", self.owner)?;
        if self.state == State::Closed.name() {
            return writeln!(f, "  closed     a table was full: every connection is refused; attach it again");
        }
        writeln!(f, "  targets    {}", self.targets.join(" "))?;
        let ipv6 = if self.ipv6 { ", IPv6 natively" } else { "" };
        let Self { to, fail, check, .. } = self;
        writeln!(f, "  to         port {to}, fails {fail}, checks {check}{ipv6}")?;
        if let Some(most) = self.heartbeat_max_age {
            match self.heartbeat_age {
                Some(age) => writeln!(f, "  heartbeat  {age:.1} s ago, {most} s at most")?,
                None => writeln!(f, "  heartbeat  never")?,
            }
        }
        for except in &self.except {
            writeln!(f, "  except     {}", except.display())?;
        }
        for webhook in &self.webhooks {
            writeln!(f, "  webhook    {webhook}")?;
        }
        Ok(())
    }
}

impl Reader<'_> {
    /// What is to be said of a pod; nothing, if it was detached meanwhile.
    fn attachment(&mut self, record: Record, webhooks: Vec<SocketAddr>) -> Result<Option<Attachment>, Error> {
        let open = record.state == State::Attached;
        let pod = if open { self.maps.pods.get(&record.slot.index(), 0) } else { Ok(Pod::default()) };
        let pod = pod.map_err(Error::map("PODS"))?;
        let targets = match pod.table(pod.generation) {
            Some(table) => self.targets(table)?,
            None => Vec::new(),
        };
        let Some(names) = self.pins.names(record.slot)? else { return Ok(None) };
        let found = self.find(&record.cgroup);
        let sees = self.hierarchy.is_some_and(|hierarchy| hierarchy.sees_what(record.view));
        Ok(Some(Attachment {
            slot: record.slot,
            alive: found.is_some(),
            gone: found.is_none() && sees,
            cgroup: found.unwrap_or(record.cgroup.path),
            owner: record.owner,
            state: record.state.name(),
            targets,
            to: u16::from_be(pod.port),
            fail: if pod.flags & FAIL_OPEN == 0 { "closed" } else { "open" },
            ipv6: pod.flags & NATIVE_IPV6 != 0,
            check: check(&pod),
            heartbeat_max_age: measured(&pod).then(|| Duration::from_nanos(pod.max_age_ns).as_secs_f64()),
            heartbeat_age: age(self.maps, &pod)?,
            hooks: names.into_iter().filter(|name| HOOKS.contains(&name.as_str()) || name == link::INBOUND).collect(),
            except: record.except.into_iter().map(|cgroup| self.find(&cgroup).unwrap_or(cgroup.path)).collect(),
            webhooks,
        }))
    }

    /// The targets of a table, read once for all pods that share it.
    fn targets(&mut self, table: u16) -> Result<Vec<String>, Error> {
        if let Some(known) = self.tables.get(&table) {
            return Ok(known.clone());
        }
        let targets = target_table::targets(self.maps, table)?;
        let targets: Vec<String> = targets.iter().map(ToString::to_string).collect();
        self.tables.insert(table, targets.clone());
        Ok(targets)
    }

    fn find(&self, cgroup: &Cgroup) -> Option<PathBuf> {
        self.census.as_ref().and_then(|census| census.find(cgroup))
    }
}

/// Nanoseconds of the clock that the kernel compares heartbeats with.
pub(crate) fn now() -> u64 {
    // The clock exists on every kernel; before it does, there was no heartbeat.
    let now = time::clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

fn check(pod: &Pod) -> &'static str {
    match (pod.flags & CHECK_LISTENER != 0, pod.flags & CHECK_PORT != 0) {
        (true, _) => "listener",
        (false, true) => "port",
        (false, false) => "none",
    }
}

fn measured(pod: &Pod) -> bool {
    pod.flags & CHECK_HEARTBEAT != 0
}

fn age(maps: &Maps, pod: &Pod) -> Result<Option<f64>, Error> {
    if !measured(pod) {
        return Ok(None);
    }
    let beat = maps.heartbeats.get(&pod.heartbeat, 0).map_err(Error::map("HEARTBEATS"))?;
    // Zero is a proxy that never sent a heartbeat.
    let age = Duration::from_nanos(now().saturating_sub(beat)).as_secs_f64();
    Ok((beat != 0).then_some(age))
}
