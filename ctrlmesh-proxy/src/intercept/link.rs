//! Links: how programs are attached, replaced without a gap, and found again.
//!
//! Replacing puts the new program beside the old one first, and takes the old one away after. Between the two both run,
//! which is harmless: an address that was rewritten is no target, and one that was explained is no encoded address. A
//! pin is replaced by `rename`, so that a crash at any point leaves one that is whole.

use std::fs::{self, File};

use aya::programs::ProgramError;
use aya::programs::links::FdLink;

use super::cgroup::Cgroup;
use super::listener::Namespace;
use super::object::{HOOKS, Object};
use super::pin::{Pins, Slot};
use super::{Error, privilege};

/// Attaches every hook at a pod's cgroup, or replaces what is attached.
pub(super) fn attach(
    object: &mut Object,
    pins: &Pins,
    slot: Slot,
    cgroup: &Cgroup,
) -> Result<(), Error> {
    let folder = File::open(&cgroup.path).map_err(Error::file("open", &cgroup.path))?;
    for hook in HOOKS {
        let link =
            object.attach_cgroup(hook, &folder)?.map_err(|error| refused(hook, cgroup, error))?;
        put(pins, slot, hook, link)?;
    }
    Ok(())
}

/// Attaches the inbound program at a pod's network namespace, or replaces it.
pub(super) fn attach_inbound(
    object: &mut Object,
    pins: &Pins,
    slot: Slot,
    namespace: &Namespace,
) -> Result<(), Error> {
    let failed = |source| Error::Attach {
        program: "inbound",
        to: namespace.path().to_owned(),
        source: Box::new(source),
    };
    let link = object.attach_inbound(namespace.file())?;
    let link =
        link.map_err(|error| privilege::explain("attach program `inbound`", error, failed))?;
    put(pins, slot, "inbound", link)
}

/// Takes every link of a pod away.
pub(super) fn detach(pins: &Pins, slot: Slot) -> Result<(), Error> {
    for hook in HOOKS.into_iter().rev().chain(["inbound"]) {
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

fn refused(program: &'static str, cgroup: &Cgroup, error: ProgramError) -> Error {
    let failed =
        |source| Error::Attach { program, to: cgroup.path.clone(), source: Box::new(source) };
    let exclusive = matches!(&error, ProgramError::SyscallError(syscall) if syscall.io_error.raw_os_error() == Some(nix::libc::EPERM));
    match privilege::explain(format!("attach program `{program}`"), error, failed) {
        // Every capability is there: then it is the flags of another program.
        Error::Capability { missing, source, .. } if exclusive && missing.none() => {
            match source.downcast::<ProgramError>() {
                Ok(source) => Error::Exclusive { cgroup: cgroup.path.clone(), source: *source },
                Err(source) => Error::Capability {
                    doing: format!("attach program `{program}`"),
                    missing,
                    source,
                },
            }
        }
        other => other,
    }
}
