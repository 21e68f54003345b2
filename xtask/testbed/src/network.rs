//! A network namespace of a test's own, with addresses that are not loopback's; needs root.
//!
//! A thread that enters it is in it, and so is every thread and program that it then starts. The namespace is gone when
//! the last of them is, and this, too.

use std::fs::File;
use std::marker::PhantomData;
use std::net::Ipv4Addr;
use std::process::Command;
use std::{io, thread};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sched::{CloneFlags, setns, unshare};

/// The namespace of the thread that looks.
const OWN: &str = "/proc/thread-self/ns/net";

/// A network namespace.
#[derive(Debug)]
pub struct Network(File);

/// Says that this thread is in a [`Network`]; when it is dropped, the thread is where it was before.
#[derive(Debug)]
#[must_use = "the thread leaves the network when this is dropped"]
pub struct Entered {
    before: File,
    /// It is about one thread.
    _of_this_thread: PhantomData<*const ()>,
}

impl Network {
    /// Makes one whose loopback has these addresses, beside its own.
    ///
    /// # Errors
    /// Where this is not root, or `ip` fails.
    pub fn make(addresses: &[Ipv4Addr]) -> Result<Self> {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace (needs root)")?;
            ip(&["link", "set", "lo", "up"])?;
            for address in addresses {
                ip(&["address", "add", &format!("{address}/32"), "dev", "lo"])?;
            }
            Ok(Self(File::open(OWN)?))
        };
        // The thread is in it, and ends.
        thread::scope(|scope| {
            scope.spawn(make).join().map_err(|_panic| anyhow!("the thread that makes it panicked"))?
        })
    }

    /// Brings this thread into it.
    ///
    /// # Errors
    /// Where this is not root.
    pub fn enter(&self) -> io::Result<Entered> {
        let before = File::open(OWN)?;
        setns(&self.0, CloneFlags::CLONE_NEWNET)?;
        Ok(Entered { before, _of_this_thread: PhantomData })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Err(error) = setns(&self.before, CloneFlags::CLONE_NEWNET) {
            debug_assert!(false, "leave a network namespace: {error}");
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output().context("start ip")?;
    ensure!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
