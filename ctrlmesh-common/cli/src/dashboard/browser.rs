//! Opens the page in the user's browser, without its token in a command line that others on the machine can read.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use tokio::time;

/// By then the browser has read the file.
const READ_WITHIN: Duration = Duration::from_secs(30);

/// A file that leads to the page. Only the user may read it. It is gone once this is dropped.
#[derive(Debug)]
struct Redirect(PathBuf);

impl Redirect {
    fn write(url: &str) -> io::Result<Self> {
        let name = format!("ctrlmesh-dashboard-{}.html", std::process::id());
        let path = env::var_os("XDG_RUNTIME_DIR").map_or_else(env::temp_dir, PathBuf::from).join(name);
        let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let this = Self(path);
        let head = format!("<meta charset=\"utf-8\"><meta http-equiv=\"refresh\" content=\"0; url={url}\">");
        write!(file, "<!doctype html>\n{head}\n<a href=\"{url}\">ctrlmesh</a>\n")?;
        Ok(this)
    }
}

impl Drop for Redirect {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}

/// Where there is a display, the user's browser opens the page. Without one, the user opens it by hand.
pub(super) async fn open(url: &str) {
    let has_display = ["DISPLAY", "WAYLAND_DISPLAY"].iter().any(|name| env::var_os(name).is_some());
    let program = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    if !cfg!(target_os = "macos") && !has_display {
        return;
    }
    let Ok(redirect) = Redirect::write(url) else { return };
    let mut command = Command::new(program);
    command.arg(&redirect.0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // It fails where there is no browser; the address is printed all the same.
    if let Ok(mut child) = command.spawn() {
        thread::spawn(move || drop(child.wait()));
        time::sleep(READ_WITHIN).await;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_the_user_may_read_where_the_page_is() {
        let redirect = Redirect::write("http://127.0.0.1:1/#token=7").unwrap();
        let path = redirect.0.clone();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(fs::read_to_string(&path).unwrap().contains("url=http://127.0.0.1:1/#token=7"));
        drop(redirect);
        assert!(!path.exists());
    }
}
