//! How is everything removed again?

use super::attach::Options;
use super::pin::Pins;
use super::record::Record;
use super::{Error, link, private};

/// Removes every attachment, every map and every folder below `pins`. Nothing of it is left in the kernel, unless another
/// process holds it.
///
/// # Errors
/// If another owner's pods are attached, and not told to remove `everybody`'s; if something cannot be removed.
pub fn uninstall(options: &Options, everybody: bool) -> Result<(), Error> {
    let pins = Pins::at(&options.pins);
    private::not_a_root(&options.pins)?;
    let Some(_lock) = pins.lock_made()? else { return Ok(()) };
    // What a crashed loader did not come to make is missed by what follows.
    pins.fill()?;
    // Dead or alive: who attached it may see cgroups elsewhere than we do.
    let theirs = |record: &Record| record.owner != options.owner;
    if let Some(Record { cgroup, owner, .. }) = pins.records()?.into_iter().find(theirs)
        && !everybody
    {
        return Err(Error::Owned { cgroup: cgroup.path, owner });
    }
    for slot in pins.slots()? {
        link::detach(&pins, slot)?;
        pins.release(slot)?;
    }
    pins.remove_all()
}
