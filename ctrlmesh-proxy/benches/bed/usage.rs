//! What the kernel counts of a process.

use std::fs;
use std::io::{BufRead as _, BufReader};

use nix::unistd::{SysconfVar, sysconf};

/// User and system time of a process so far. What `stat` shows of it in ticks of some milliseconds, `schedstat` has
/// exactly, of each thread; contestants keep theirs.
pub(crate) fn cpu_nanoseconds(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let used = threads.map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    let used: Option<u64> = used.sum();
    used.unwrap_or_else(|| {
        let ticks = sysconf(SysconfVar::CLK_TCK).unwrap().unwrap();
        cpu_ticks(pid) * 1_000_000_000 / u64::try_from(ticks).unwrap()
    })
}

/// The same where a kernel has no `schedstat`, in ticks (proc(5), fields 14 and 15).
fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let field = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok()).unwrap_or_default();
    field(11) + field(12)
}

pub(crate) fn resident_bytes(pid: u32) -> u64 {
    let Ok(status) = fs::File::open(format!("/proc/{pid}/status")) else { return 0 };
    let lines = BufReader::new(status).lines().map_while(Result::ok);
    let line = lines.into_iter().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() << 10
}
