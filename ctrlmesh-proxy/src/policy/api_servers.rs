//! Keeps the API server's addresses from the manager, for the kernel's redirection.
//!
//! They are stored in a file, one address a line, for a start without the manager. Lines that do not parse are skipped.
//! Without addresses, only the configured ones are redirected until the manager sends some.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task;
use tracing::{info, warn};

use super::store::replace;

/// The file's name.
const FILE: &str = "api-servers";

/// At most so many are taken: a kernel table has room for 255, and the configured ones need some of it.
const MAX_SERVERS: usize = 200;

/// The API server's addresses, and the folder of their file.
#[derive(Debug)]
pub(super) struct Servers {
    folder: PathBuf,
    addresses: watch::Sender<Arc<[SocketAddr]>>,
}

impl Servers {
    /// Reads the addresses in `folder`, which exists.
    pub(super) fn open(folder: &Path) -> Self {
        let text = match fs::read_to_string(folder.join(FILE)) {
            Ok(text) => text,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    warn!(%error, "where the API server is, besides, is not known yet");
                }
                String::new()
            }
        };
        Self { folder: folder.to_owned(), addresses: watch::Sender::new(parsed(text.lines())) }
    }

    pub(super) fn follow(&self) -> watch::Receiver<Arc<[SocketAddr]>> {
        self.addresses.subscribe()
    }

    /// Takes the manager's addresses; an empty list changes nothing. Addresses that are missing now stay as long as
    /// this process lives: a restarting API server is no endpoint for a moment, and is dialled all the same.
    pub(super) async fn take(&self, said: &[String]) {
        let said = parsed(said.iter().map(String::as_str));
        let before = self.addresses.borrow().clone();
        let all: Vec<SocketAddr> = said.iter().chain(before.iter()).copied().collect();
        let new = said.iter().any(|one| !before.contains(one));
        if said.is_empty() || !new && said.len() == before.len() {
            return;
        }
        info!(addresses = ?said, "where the API server is");
        let lines: Vec<String> = said.iter().map(ToString::to_string).collect();
        let text = lines.join("\n") + "\n";
        if new {
            let mut seen = HashSet::new();
            let all = all.into_iter().filter(|one| seen.insert(*one)).take(MAX_SERVERS);
            self.addresses.send_replace(all.collect());
        }
        let folder = self.folder.clone();
        // A disk may take its time.
        let kept = task::spawn_blocking(move || replace(&folder, FILE, text.as_bytes())).await;
        if let Ok(Err(error)) = kept {
            warn!(%error, "where the API server is, is not kept: a restart without the manager knows it as before");
        }
    }
}

fn parsed<'a>(said: impl Iterator<Item = &'a str>) -> Arc<[SocketAddr]> {
    let addresses = said.filter_map(|one| one.parse::<SocketAddr>().ok());
    addresses.filter(|address| address.port() != 0).take(MAX_SERVERS).collect()
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn said(addresses: &[&str]) -> Vec<String> {
        addresses.iter().map(|one| (*one).to_owned()).collect()
    }

    fn known(servers: &Servers) -> Vec<String> {
        servers.follow().borrow().iter().map(ToString::to_string).collect()
    }

    #[tokio::test]
    async fn the_last_addresses_are_read_back_and_none_is_lost() {
        let folder = TempDir::new().unwrap();
        let servers = Servers::open(folder.path());
        assert!(known(&servers).is_empty());
        let all = said(&["10.96.0.1:443", "[fd00:96::1]:443", "192.0.2.1:6443"]);
        servers.take(&all).await;
        servers.take(&[]).await;
        servers.take(&said(&["nowhere", "192.0.2.1:0"])).await;
        assert_eq!(known(&servers), all);
        assert_eq!(known(&Servers::open(folder.path())), all);
        let fewer = said(&["10.96.0.1:443"]);
        servers.take(&fewer).await;
        assert_eq!(known(&servers), all, "it may only be started anew");
        assert_eq!(known(&Servers::open(folder.path())), fewer);
        servers.take(&said(&["192.0.2.9:6443"])).await;
        assert_eq!(known(&servers), [&said(&["192.0.2.9:6443"])[..], &all].concat());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn the_same_addresses_are_no_change() {
        let folder = TempDir::new().unwrap();
        let servers = Servers::open(folder.path());
        servers.take(&said(&["192.0.2.1:6443"])).await;
        let follows = servers.follow();
        servers.take(&said(&["192.0.2.1:6443"])).await;
        assert!(!follows.has_changed().unwrap());
    }

    #[test]
    fn no_more_addresses_are_taken_than_the_kernel_has_room_for() {
        let many: Vec<String> = (1..=300).map(|port| format!("192.0.2.1:{port}")).collect();
        assert_eq!(parsed(many.iter().map(String::as_str)).len(), MAX_SERVERS);
    }
}
