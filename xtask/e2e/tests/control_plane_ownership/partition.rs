//! Cuts the connections between a process and an address, in the network that this thread is in.
//!
//! What a process connects to is known by its group: nftables marks the connection, both ways. Packets are lost where
//! they arrive, so that the sender hears nothing of it, as of a network that fails.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_runtime::sync::lock;

/// Connections of the groups in `marks` have a mark, from the first packet that the client sends after they are there.
const TABLE: &str = "
table ip torture {
  map marks { type gid : mark; }
  set lost { type mark . ipv4_addr . inet_service; }
  chain leaving { type filter hook output priority 0; ct direction original ct mark set meta skgid map @marks; }
  chain arriving {
    type filter hook input priority 0;
    ct mark . ip daddr . tcp dport @lost counter drop
    ct mark . ip saddr . tcp sport @lost counter drop
  }
}
";

/// How often each way is cut right now.
#[derive(Clone, Default)]
pub(crate) struct Partitions(Arc<Mutex<BTreeMap<Way, i32>>>);

/// From the processes of a group to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way {
    pub(crate) group: u32,
    pub(crate) to: SocketAddr,
}

impl Partitions {
    /// Of processes of these groups; nothing is cut yet.
    pub(crate) fn among(groups: impl IntoIterator<Item = u32>) -> Result<Self> {
        nft(TABLE)?;
        join(groups)?;
        Ok(Self::default())
    }

    /// Cuts a way; it may be cut several times, and is whole when each of them is mended.
    pub(crate) fn cut(&self, way: Way) -> Result<()> {
        if self.count(way, 1) == 1 { way.change("add") } else { Ok(()) }
    }

    /// Mends one cut of this way.
    pub(crate) fn mend(&self, way: Way) -> Result<()> {
        if self.count(way, -1) == 0 { way.change("delete") } else { Ok(()) }
    }

    fn count(&self, way: Way, more: i32) -> i32 {
        let mut cuts = lock(&self.0);
        let times = cuts.entry(way).or_default();
        *times += more;
        let now = *times;
        drop(cuts);
        now
    }
}

/// Takes in processes of further groups.
pub(crate) fn join(groups: impl IntoIterator<Item = u32>) -> Result<()> {
    let mut rules = String::new();
    for group in groups {
        writeln!(rules, "add element ip torture marks {{ {group} : {group} }}")?;
    }
    nft(&rules)
}

/// How many packets were lost so far.
pub(crate) fn lost() -> Result<u64> {
    let output =
        Command::new("nft").args(["list", "chain", "ip", "torture", "arriving"]).output().context("start nft")?;
    let rules = String::from_utf8(output.stdout)?;
    // counter packets 3 bytes 156
    let counts = rules.split("counter packets ").skip(1);
    counts.map(|rest| Ok(rest.split(' ').next().unwrap_or_default().parse::<u64>()?)).sum()
}

impl Way {
    fn change(self, verb: &str) -> Result<()> {
        let Self { group, to } = self;
        nft(&format!("{verb} element ip torture lost {{ {group} . {} . {} }}", to.ip(), to.port()))
    }
}

fn nft(rules: &str) -> Result<()> {
    let mut nft = Command::new("nft");
    let mut child = nft.args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().context("start nft")?;
    child.stdin.take().context("no input")?.write_all(rules.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "nft {rules}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
