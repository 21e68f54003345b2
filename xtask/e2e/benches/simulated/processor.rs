//! Processor time by process.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::time::Duration;

use nix::unistd::{SysconfVar, sysconf};

/// What each program has used of the processor, this process and those that it started, by their names.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spent(BTreeMap<String, Duration>);

/// One line of `/proc/PID/stat`.
struct Stat {
    name: String,
    parent: u32,
    ticks: u64,
}

impl Spent {
    /// Until now.
    pub(crate) fn now() -> Self {
        let pids = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.ok().and_then(|entry| entry.file_name().to_str()?.parse().ok()));
        let all: BTreeMap<u32, Stat> = pids.filter_map(|pid| Some((pid, Stat::of(pid)?))).collect();
        let hertz = sysconf(SysconfVar::CLK_TCK).unwrap().unwrap_or(100);
        let mut spent = Self::default();
        for (pid, stat) in all.iter().filter(|(pid, _)| is_ours(**pid, &all)) {
            let name = if *pid == std::process::id() { "proxies" } else { stat.name.as_str() };
            let time = Duration::from_millis(stat.ticks * 1000 / hertz.cast_unsigned());
            *spent.0.entry(name.to_owned()).or_default() += time;
        }
        spent
    }

    /// Of the program of this name.
    pub(crate) fn of(&self, name: &str) -> Duration {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// Since `before`. What ended meanwhile counts for nothing.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let since = |(name, time): (&String, &Duration)| {
            let before = before.0.get(name).copied().unwrap_or_default();
            (name.clone(), time.saturating_sub(before))
        };
        Self(self.0.iter().map(since).collect())
    }
}

impl fmt::Display for Spent {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let worth_it = self.0.iter().filter(|(_, time)| time.as_millis() >= 100);
        let all: Vec<String> = worth_it.map(|(name, time)| format!("{name} {time:.1?}")).collect();
        to.write_str(&all.join(", "))
    }
}

impl Stat {
    /// Of a process that is there.
    fn of(pid: u32) -> Option<Self> {
        let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may hold anything; what follows it is numbers.
        let (name, rest) = line.split_once('(')?.1.rsplit_once(')')?;
        let numbers: Vec<&str> = rest.split_whitespace().collect();
        let ticks = |field: usize| numbers.get(field)?.parse::<u64>().ok();
        let parent = numbers.get(1)?.parse().ok()?;
        Some(Self { name: name.to_owned(), parent, ticks: ticks(11)? + ticks(12)? })
    }
}

fn is_ours(mut pid: u32, all: &BTreeMap<u32, Stat>) -> bool {
    while pid != std::process::id() {
        match all.get(&pid) {
            Some(stat) => pid = stat.parent,
            None => return false,
        }
    }
    true
}
