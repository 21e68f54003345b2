//! Looks up the command's program as `execvp` does, before the session is made.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use nix::unistd::{self, AccessFlags};

use crate::run::error::RunError;

/// Finds the program that a command names.
pub(crate) fn find(program: &OsStr) -> Result<PathBuf, RunError> {
    find_on(program, &env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into()))
}

fn find_on(program: &OsStr, path: &OsStr) -> Result<PathBuf, RunError> {
    let candidates: Vec<PathBuf> = if program.as_encoded_bytes().contains(&b'/') {
        vec![program.into()]
    } else {
        env::split_paths(path).map(|folder| folder.join(program)).collect()
    };
    let exists: Vec<PathBuf> = candidates.into_iter().filter(|path| path.exists()).collect();
    let program: OsString = program.to_owned();
    if exists.is_empty() || program.is_empty() {
        return Err(RunError::NotFound { program });
    }
    let found = exists.into_iter().find(|path| is_executable(path));
    found.ok_or(RunError::NotExecutable { program })
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && unistd::access(path, AccessFlags::X_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_command_is_found_on_the_path_if_it_can_be_executed() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, program) = (folder.path().join("plain"), folder.path().join("program"));
        fs::write(&plain, "").unwrap();
        fs::write(&program, "").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        let path = env::join_paths([Path::new("/nowhere"), folder.path()]).unwrap();
        assert_eq!(find_on(OsStr::new("program"), &path).unwrap(), program);
        assert_eq!(find_on(program.as_os_str(), OsStr::new("")).unwrap(), program);
        let error = find_on(OsStr::new("plain"), &path).unwrap_err();
        assert_eq!(error.exit_code(), 126);
        assert_eq!(find_on(folder.path().as_os_str(), &path).unwrap_err().exit_code(), 126);
        for missing in ["nothing", "/nowhere/nothing", ""] {
            assert_eq!(find_on(OsStr::new(missing), &path).unwrap_err().exit_code(), 127);
        }
    }
}
