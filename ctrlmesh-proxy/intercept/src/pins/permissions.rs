//! Checks that only their owner can open the pins: whoever can open a pin can use it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::unistd;

use crate::Error;

/// Any permission of others.
const OTHERS: u32 = 0o077;
/// To put something else into a folder.
const OTHERS_WRITE: u32 = 0o022;
/// Whoever may put something into a folder takes only what is his out of it.
const STICKY: u32 = 0o1000;

/// Fails if `path` is a whole BPF file system, which belongs to others too and cannot be removed.
pub(crate) fn refuse_mount_point(path: &Path) -> Result<(), Error> {
    let mounts = "/proc/self/mountinfo";
    let mounts = fs::read_to_string(mounts).map_err(Error::file("read", mounts))?;
    let found = path.canonicalize();
    match found {
        Ok(found) if is_root(&mounts, &found) => Err(Error::PinRoot(path.to_owned())),
        _ => Ok(()),
    }
}

/// Fails if others have a part in a folder.
pub(crate) fn ensure_private(folder: &Path) -> Result<(), Error> {
    look(folder, |mode| mode & OTHERS == 0)
}

/// Fails if others could put another folder in the place of this one.
pub(crate) fn ensure_private_above(folder: &Path) -> Result<(), Error> {
    let read = Error::file("read", folder);
    let found = folder.canonicalize().and_then(|path| Ok((fs::metadata(&path)?.dev(), path)));
    let (device, path) = found.map_err(read)?;
    for above in path.ancestors().skip(1) {
        // Files outside the BPF file system are not checked here.
        if !fs::metadata(above).is_ok_and(|above| above.dev() == device) {
            break;
        }
        look(above, |mode| mode & OTHERS_WRITE == 0 || mode & STICKY != 0)?;
    }
    Ok(())
}

fn look(folder: &Path, allowed: impl Fn(u32) -> bool) -> Result<(), Error> {
    let found = fs::metadata(folder).map_err(Error::file("read", folder))?;
    let ours = found.uid() == 0 || found.uid() == unistd::geteuid().as_raw();
    let mode = found.mode() & 0o7777;
    if ours && allowed(mode) {
        return Ok(());
    }
    Err(Error::Shared { path: folder.to_owned(), owner: found.uid(), mode })
}

/// Whether a whole file system is mounted at a path.
fn is_root(mountinfo: &str, path: &Path) -> bool {
    mountinfo.lines().any(|line| {
        let mut fields = line.split(' ').skip(3);
        fields.next() == Some("/") && fields.next().is_some_and(|point| path == Path::new(point))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_file_system_that_is_mounted_by_itself_is_no_root() {
        let mounts = "29 23 0:24 / /sys/fs/bpf rw,relatime - bpf bpf rw\n\
                      30 23 0:24 /ctrlmesh /run/pins rw,relatime - bpf bpf rw\n";
        assert!(is_root(mounts, Path::new("/sys/fs/bpf")));
        assert!(!is_root(mounts, Path::new("/run/pins")));
        assert!(!is_root(mounts, Path::new("/sys/fs/bpf/ctrlmesh")));
    }
}
