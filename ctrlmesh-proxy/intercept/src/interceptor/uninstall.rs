//! Removes everything from the kernel: programs, tables and pins.

use crate::Error;
use crate::bypass::BypassFilter;
use crate::host::cgroup::Hierarchy;
use crate::interceptor::attach::Options;
use crate::interceptor::register::Register;
use crate::pins::permissions;
use crate::pins::record::Record;
use crate::pins::{Pins, Slot};
use crate::programs::link;
use crate::programs::map::Maps;

/// Removes every attachment, every map and every folder below `pins`, and the owner's filter of what bypasses the
/// proxy. Nothing of it is left in the kernel, unless another process holds it.
///
/// # Errors
/// If another owner's pods are attached, and not told to remove `everybody`'s: then the maps stay for those, and this
/// owner's pods are let go of. If something cannot be removed.
pub fn uninstall(options: &Options, everybody: bool) -> Result<(), Error> {
    let removed = BypassFilter::remove(&options.owner).map_err(Error::Bypass);
    // Whatever becomes of the filter, no pod is left without a proxy.
    detach_all(options, everybody).and(removed)
}

fn detach_all(options: &Options, everybody: bool) -> Result<(), Error> {
    let pins = Pins::at(&options.pins);
    permissions::refuse_mount_point(&options.pins)?;
    let Some(_lock) = pins.lock_made()? else { return Ok(()) };
    pins.only_on_bpffs()?;
    // What a crashed loader did not come to make is missed by what follows.
    pins.fill()?;
    // Dead or alive: who attached it may see cgroups elsewhere than we do.
    let theirs = |record: &Record| !everybody && record.owner != options.owner;
    let theirs: Vec<Record> = pins.records()?.into_iter().filter(theirs).collect();
    let is_theirs = |slot: &Slot| theirs.iter().any(|record| record.slot == *slot);
    let ours: Vec<Slot> = pins.slots()?.into_iter().filter(|slot| !is_theirs(slot)).collect();
    for slot in &ours {
        link::detach(&pins, *slot)?;
    }
    let Some(first) = theirs.first() else {
        ours.into_iter().try_for_each(|slot| pins.release(slot))?;
        return pins.remove_all();
    };
    let others = Error::Others { cgroup: first.cgroup.path.clone(), owner: first.owner.clone() };
    clear(pins, options, ours)?;
    Err(others)
}

/// Leaves nothing of our pods in maps that stay.
fn clear(pins: Pins, options: &Options, slots: Vec<Slot>) -> Result<(), Error> {
    if slots.is_empty() {
        return Ok(());
    }
    let (maps, owner) = (Maps::open(&pins)?, options.owner.clone());
    let mut register = Register::new(pins, maps, owner, Hierarchy::find()?);
    slots.into_iter().try_for_each(|slot| register.clear(slot))
}
