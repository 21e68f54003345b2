//! Shows the command the files of a service account that lead it to the proxy.
//!
//! Clients in a cluster read token and CA from a fixed folder. The command sees a folder of this run there, in a mount
//! namespace of its own. Where the fixed folder does not exist, a copy of the folder above hides the original. So
//! nothing is made where others could see it.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};

use nix::fcntl;
use nix::fcntl::OFlag;
use nix::mount::{self, MsFlags};

use crate::run::cluster::Cluster;
use crate::run::error::RunError;
use crate::run::folder::Folder;
use crate::run::kubeconfig::source::SERVICE_ACCOUNT;
use crate::run::kubeconfig::{Chosen, text};

/// The folder that exists wherever there may be service accounts.
const ABOVE: &str = "/var/run";

/// Makes the files of a service account: the kubeconfig's token, and `authority` for a CA.
pub(crate) fn write(folder: &Folder, chosen: &Chosen, cluster: &Cluster, authority: &str) -> Result<PathBuf, RunError> {
    let user = &chosen.user;
    let has = |what| Err(RunError::NotAnAccount { what });
    let account = folder.subfolder("account")?;
    match (text(user, "token"), text(user, "tokenFile")) {
        _ if cluster.identity.is_some() => return has("a client certificate"),
        _ if user.contains_key("exec") => return has("an exec plugin"),
        // A file may change, and is read again.
        (_, Some(file)) => folder.link(file.as_ref(), "account/token")?,
        (Some(token), None) => folder.write("account/token", token.as_bytes()).map(drop)?,
        (None, None) => return has("none"),
    }
    folder.write("account/ca.crt", authority.as_bytes())?;
    let namespace = text(&chosen.context, "namespace").unwrap_or("default");
    folder.write("account/namespace", namespace.as_bytes())?;
    Ok(account)
}

/// Shows `account` where service accounts are. To be called in a mount namespace of one's own.
pub(crate) fn show(account: &Path) -> io::Result<()> {
    let place = Path::new(SERVICE_ACCOUNT);
    let above = place.ancestors().take_while(|folder| folder.starts_with(ABOVE));
    match above.into_iter().find(|folder| folder.is_dir()) {
        Some(folder) if folder == place => {}
        Some(folder) => make_room(folder, place)?,
        None => return Err(io::ErrorKind::NotFound.into()),
    }
    bind(account, place)
}

/// Puts a folder with the same content over one, so that `place` can be made below it.
fn make_room(above: &Path, place: &Path) -> io::Result<()> {
    // Held by descriptors, what is hidden can be shown again.
    let mut content = Vec::new();
    for entry in fs::read_dir(above)? {
        let path = entry?.path();
        let flags = (OFlag::O_PATH | OFlag::O_NOFOLLOW).bits();
        content.push((File::options().read(true).custom_flags(flags).open(&path)?, path));
    }
    mount::mount(Some("tmpfs"), above, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))?;
    for (entry, path) in content {
        let held = PathBuf::from(format!("/proc/self/fd/{}", entry.as_raw_fd()));
        let kind = entry.metadata()?.file_type();
        if kind.is_symlink() {
            let to = fcntl::readlinkat(&entry, "")?;
            symlink(to, &path)?;
            continue;
        }
        if kind.is_dir() {
            fs::create_dir(&path)?;
        } else {
            File::create(&path)?;
        }
        bind(&held, &path)?;
    }
    fs::create_dir_all(place)
}

fn bind(from: &Path, to: &Path) -> io::Result<()> {
    let none: Option<&Path> = None;
    Ok(mount::mount(Some(from), to, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?)
}
