//! Links: how programs are attached, replaced without a gap, and found again.
//!
//! Replacing puts the new program beside the old one first, and takes the old one away after. Between the two both run,
//! which is harmless: what one has redirected, refused or explained the other leaves as it is, and only what passes
//! counts twice. A pin is replaced by `rename`, so that a crash at any point leaves one that is whole.
//!
//! The kernel could exchange the program of a link at once (`BPF_LINK_UPDATE`), but aya 0.14 offers that for XDP and
//! TCX links alone and hands out no file descriptor of a link, and to make the call ourselves would be `unsafe`. Later
//! releases of aya, which want a newer compiler than ours, offer it for the links at cgroups too.

use std::fs::{self, File};
use std::thread;
use std::time::{Duration, Instant};

use aya::programs::ProgramError;
use aya::programs::links::FdLink;
use nix::libc::{E2BIG, EPERM};

use crate::Error;
use crate::host::cgroup::Cgroup;
use crate::host::privilege;
use crate::network::listener::Namespace;
use crate::pins::record::{Record, SOCK_RELEASE};
use crate::pins::{Pins, Slot};
use crate::programs::object::{HOOKS, Object};

/// How long the kernel may take to let go of links that are gone.
const ROOM_WITHIN: Duration = Duration::from_secs(5);

/// Between two tries meanwhile.
const ROOM_RETRY: Duration = Duration::from_millis(10);

/// The program that takes webhook calls.
pub(crate) const INBOUND: &str = "inbound";

/// The hooks of a pod.
fn hooks(by_port: bool) -> impl Iterator<Item = &'static str> {
    HOOKS.into_iter().filter(move |hook| by_port || *hook != SOCK_RELEASE)
}

/// Attaches every hook of a pod at its cgroup, or replaces what is attached.
pub(crate) fn attach(object: &mut Object, pins: &Pins, slot: Slot, cgroup: &Cgroup) -> Result<(), Error> {
    let folder = File::open(&cgroup.path).map_err(Error::file("open", &cgroup.path))?;
    for hook in hooks(pins.is_by_port(slot)) {
        let link = attach_with_room(object, hook, &folder)?.map_err(|error| refused(hook, cgroup, error))?;
        put(pins, slot, hook, link)?;
    }
    Ok(())
}

/// Attaches once the kernel has room for one more program at the hook. It takes 64 (`BPF_CGROUP_MAX_PROGS`), and lets
/// go of a link only some time after its last pin is gone, on a worker of its own.
fn attach_with_room(
    object: &mut Object,
    hook: &'static str,
    folder: &File,
) -> Result<Result<FdLink, ProgramError>, Error> {
    let end = Instant::now() + ROOM_WITHIN;
    loop {
        let attached = object.attach_cgroup(hook, folder)?;
        if errno(attached.as_ref().err()) != Some(E2BIG) || Instant::now() >= end {
            return Ok(attached);
        }
        thread::sleep(ROOM_RETRY);
    }
}

/// Whether every hook of a pod is attached, with the programs of this object, and nothing is left half made. One that
/// is gone meanwhile has none.
pub(crate) fn whole(pins: &Pins, record: &Record, fingerprint: &str) -> Result<bool, Error> {
    let names = pins.names(record.slot)?.unwrap_or_default();
    let inbound = record.netns.is_none()
        || record.inbound_object.as_deref() == Some(fingerprint) && names.iter().any(|name| name == INBOUND);
    Ok(inbound
        && record.object.as_deref() == Some(fingerprint)
        && hooks(record.by_port).all(|hook| names.iter().any(|name| name == hook))
        && !names.iter().any(|name| name.ends_with("-next")))
}

/// Attaches the inbound program at a pod's network namespace, or replaces it.
pub(crate) fn attach_inbound(object: &mut Object, pins: &Pins, slot: Slot, namespace: &Namespace) -> Result<(), Error> {
    let failed = |source| Error::Attach { program: INBOUND, to: namespace.path().to_owned(), source: Box::new(source) };
    let link = object.attach_inbound(namespace.file())?;
    let link = link.map_err(|error| privilege::explain("attach program `inbound`", error, failed))?;
    put(pins, slot, INBOUND, link)
}

/// Answers `SO_ORIGINAL_DST` in a proxy's cgroup for as long as the object lives.
pub(crate) fn attach_getsockopt(object: &mut Object, cgroup: &Cgroup) -> Result<(), Error> {
    let folder = File::open(&cgroup.path).map_err(Error::file("open", &cgroup.path))?;
    let failed = |source| Error::Attach { program: "getsockopt", to: cgroup.path.clone(), source: Box::new(source) };
    let attached = object.attach_getsockopt(&folder)?;
    attached.map_err(|error| privilege::explain("attach program `getsockopt`", error, failed))
}

/// Takes every link of a pod away.
pub(crate) fn detach(pins: &Pins, slot: Slot) -> Result<(), Error> {
    for hook in HOOKS.into_iter().rev().chain([INBOUND]) {
        pins.remove(slot, &format!("{hook}-next"))?;
        pins.remove(slot, hook)?;
    }
    Ok(())
}

fn put(pins: &Pins, slot: Slot, hook: &'static str, link: FdLink) -> Result<(), Error> {
    let next = pins.hook(slot, &format!("{hook}-next"));
    // What a crashed loader left: attached twice does no harm, but once is enough.
    pins.remove(slot, &format!("{hook}-next"))?;
    link.pin(&next).map_err(|source| Error::Pin { path: next.clone(), source })?;
    let path = pins.hook(slot, hook);
    fs::rename(&next, &path).map_err(Error::file("replace", path))
}

/// What the kernel answered.
fn errno(error: Option<&ProgramError>) -> Option<i32> {
    match error {
        Some(ProgramError::SyscallError(syscall)) => syscall.io_error.raw_os_error(),
        _ => None,
    }
}

fn refused(program: &'static str, cgroup: &Cgroup, error: ProgramError) -> Error {
    let failed = |source| Error::Attach { program, to: cgroup.path.clone(), source: Box::new(source) };
    let exclusive = errno(Some(&error)) == Some(EPERM);
    match privilege::explain(format!("attach program `{program}`"), error, failed) {
        // Every capability is there: then it is the flags of another program.
        Error::Capability { missing, source, .. } if exclusive && missing.none() => {
            match source.downcast::<ProgramError>() {
                Ok(source) => Error::Exclusive { cgroup: cgroup.path.clone(), source: *source },
                Err(source) => Error::Capability { doing: format!("attach program `{program}`"), missing, source },
            }
        }
        other => other,
    }
}
