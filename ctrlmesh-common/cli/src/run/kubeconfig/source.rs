//! Finds and reads the kubeconfig that the command would use.
//!
//! The first of these counts: `--kubeconfig` of `run`, the kubeconfig that the command's own arguments name, the files
//! of `KUBECONFIG`, the file at home, the service account of the pod.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use kube::config::{Kubeconfig, KubeconfigError};
use serde_json::json;

/// Where a pod finds its service account.
pub(crate) const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The name of everything in the kubeconfig that is made of a service account.
const IN_CLUSTER: &str = "in-cluster";

/// What was found.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// The files that were read; none where it is a pod's service account.
    pub(crate) files: Vec<PathBuf>,
    pub(crate) kubeconfig: Kubeconfig,
    /// The context that the command's own arguments choose.
    pub(crate) context: Option<String>,
}

/// Why no kubeconfig was found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SourceError {
    #[error("read the kubeconfig `{path}`")]
    Read { path: PathBuf, source: io::Error },
    #[error("parse the kubeconfig `{path}`")]
    Parse { path: PathBuf, source: Box<KubeconfigError> },
    #[error(
        "the command's arguments name the kubeconfig `{command}`, --kubeconfig names `{flag}`: name one of them only"
    )]
    Two { flag: PathBuf, command: PathBuf },
    #[error("which cluster: there is no kubeconfig (--kubeconfig, KUBECONFIG, `{home}`), and this is no pod")]
    None { home: PathBuf },
}

/// Finds and reads it; `command` is the command with its arguments.
pub(crate) fn find(flag: Option<&Path>, command: &[OsString]) -> Result<Source, SourceError> {
    let named = option(command, "kubeconfig").map(PathBuf::from);
    if let (Some(flag), Some(command)) = (flag, &named)
        && !same(flag, command)
    {
        return Err(SourceError::Two { flag: flag.to_owned(), command: command.clone() });
    }
    let (files, kubeconfig) = match flag.map(Path::to_owned).or(named) {
        Some(file) => (vec![file.clone()], read(&file)?),
        None => usual()?,
    };
    let context = option(command, "context").and_then(|name| name.into_string().ok());
    // What is no context here may mean something else to the command.
    let context = context.filter(|name| kubeconfig.contexts.iter().any(|it| it.name == *name));
    Ok(Source { files, kubeconfig, context })
}

/// Where kubectl looks, too.
fn usual() -> Result<(Vec<PathBuf>, Kubeconfig), SourceError> {
    let home = env::home_dir().unwrap_or_default().join(".kube/config");
    let listed = env::var_os("KUBECONFIG").filter(|list| !list.is_empty());
    let files = listed.map_or_else(|| vec![home.clone()], |list| split(&list));
    let mut found = Vec::new();
    let mut merged = Kubeconfig::default();
    for file in files {
        match read(&file) {
            Ok(kubeconfig) => {
                let failed = |source| SourceError::parse(&file, source);
                merged = merged.merge(kubeconfig).map_err(failed)?;
                found.push(file);
            }
            // As kubectl does: what is not there says nothing.
            Err(SourceError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    if found.is_empty() {
        merged = in_cluster().ok_or(SourceError::None { home })?;
    }
    Ok((found, merged))
}

/// The value of an option among a command's arguments: `--name=value` or `--name value`, with one dash or two.
pub(crate) fn option(arguments: &[OsString], name: &str) -> Option<OsString> {
    let mut arguments = arguments.iter().skip(1);
    while let Some(argument) = arguments.next() {
        let Some(rest) = argument.to_str().and_then(|text| text.strip_prefix('-')) else {
            continue;
        };
        let rest = rest.strip_prefix('-').unwrap_or(rest);
        match rest.strip_prefix(name) {
            Some("") => return arguments.next().filter(|value| !value.is_empty()).cloned(),
            Some(value) if value.starts_with('=') && value.len() > 1 => {
                return Some(value[1..].into());
            }
            _ => {}
        }
    }
    None
}

/// Whether two paths lead to the same file.
pub(crate) fn same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).ok();
    one == other || real(one).is_some_and(|one| real(other) == Some(one))
}

fn split(list: &OsStr) -> Vec<PathBuf> {
    env::split_paths(list).filter(|path| !path.as_os_str().is_empty()).collect()
}

fn read(path: &Path) -> Result<Kubeconfig, SourceError> {
    let failed = |source| SourceError::Read { path: path.to_owned(), source };
    // Paths in the file become absolute only where its own is.
    let absolute = std::path::absolute(path).map_err(failed)?;
    let mut kubeconfig = Kubeconfig::read_from(&absolute).map_err(|error| match error {
        KubeconfigError::ReadConfig(source, _) => failed(source),
        error => SourceError::parse(path, error),
    })?;
    drop_empty_paths(&mut kubeconfig, absolute.parent());
    // An empty name chooses nothing, so that the next file may.
    kubeconfig.current_context = kubeconfig.current_context.filter(|name| !name.is_empty());
    Ok(kubeconfig)
}

/// Takes out paths that were empty: kube makes the kubeconfig's own `folder` of them.
fn drop_empty_paths(kubeconfig: &mut Kubeconfig, folder: Option<&Path>) {
    let is_folder = |path: &mut String| folder == Some(Path::new(path));
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|it| it.cluster.as_mut()) {
        cluster.certificate_authority.take_if(is_folder);
    }
    for user in kubeconfig.auth_infos.iter_mut().filter_map(|it| it.auth_info.as_mut()) {
        for path in [&mut user.client_certificate, &mut user.client_key, &mut user.token_file] {
            path.take_if(is_folder);
        }
    }
}

/// What a pod knows of its cluster.
fn in_cluster() -> Option<Kubeconfig> {
    let host = env::var("KUBERNETES_SERVICE_HOST").ok().filter(|host| !host.is_empty())?;
    let port = env::var("KUBERNETES_SERVICE_PORT").ok().filter(|port| !port.is_empty())?;
    let folder = Path::new(SERVICE_ACCOUNT);
    fs::metadata(folder.join("token")).ok()?;
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let namespace = fs::read_to_string(folder.join("namespace")).unwrap_or_default();
    let config = json!({
        "current-context": IN_CLUSTER,
        "clusters": [{"name": IN_CLUSTER, "cluster": {
            "server": format!("https://{host}:{port}"),
            "certificate-authority": folder.join("ca.crt"),
        }}],
        "users": [{"name": IN_CLUSTER, "user": {"tokenFile": folder.join("token")}}],
        "contexts": [{"name": IN_CLUSTER, "context": {
            "cluster": IN_CLUSTER, "user": IN_CLUSTER, "namespace": namespace.trim(),
        }}],
    });
    serde_json::from_value(config).ok()
}

impl SourceError {
    fn parse(path: &Path, source: KubeconfigError) -> Self {
        Self::Parse { path: path.to_owned(), source: Box::new(source) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_path_is_no_path() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config");
        let text = "clusters: [{name: a, cluster: {server: 'https://a', certificate-authority: ''}}]\n\
            users: [{name: a, user: {client-certificate: '', client-key: key.pem, tokenFile: ''}}]\n";
        fs::write(&file, text).unwrap();
        let read = read(&file).unwrap();
        assert_eq!(read.clusters[0].cluster.as_ref().unwrap().certificate_authority, None);
        let user = read.auth_infos[0].auth_info.as_ref().unwrap();
        assert_eq!((&user.client_certificate, &user.token_file), (&None, &None));
        let key = folder.path().join("key.pem").display().to_string();
        assert_eq!(user.client_key.as_ref(), Some(&key));
    }

    fn command(words: &str) -> Vec<OsString> {
        words.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn an_option_is_found_however_it_is_written() {
        for words in ["op --kubeconfig=f", "op -v 3 -kubeconfig f", "op -kubeconfig=f --x", "op --kubeconfig f"] {
            assert_eq!(option(&command(words), "kubeconfig"), Some("f".into()), "{words}");
        }
        for words in
            ["op", "op kubeconfig f", "op --kubeconfigs=f", "op --kubeconfig", "op --kubeconfig=", "--kubeconfig=f"]
        {
            assert_eq!(option(&command(words), "kubeconfig"), None, "{words}");
        }
    }

    #[test]
    fn the_file_that_the_command_names_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config");
        fs::write(&file, "current-context: here").unwrap();
        let words = [OsString::from("op"), "--kubeconfig".into(), file.clone().into()];
        assert_eq!(find(None, &words).unwrap().kubeconfig.current_context.as_deref(), Some("here"));
        assert_eq!(find(Some(&file), &words).unwrap().files, std::slice::from_ref(&file));
        let other = folder.path().join("other");
        assert!(matches!(find(Some(&other), &words), Err(SourceError::Two { .. })));
        let error = find(Some(&other), &command("op")).unwrap_err();
        assert!(matches!(error, SourceError::Read { .. }), "one that was asked for must be there");
    }

    #[test]
    fn paths_are_relative_to_the_file_and_empty_names_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config");
        let user = "{client-certificate: me.crt, client-key: /abs/me.key, exec: {command: ./login}}";
        fs::write(&file, format!("current-context: ''\nusers: [{{name: me, user: {user}}}]")).unwrap();
        let read = read(&file).unwrap();
        assert_eq!(read.current_context, None);
        let user = read.auth_infos[0].auth_info.as_ref().unwrap();
        let at = |name: &str| Some(folder.path().join(name).display().to_string());
        assert_eq!(user.client_certificate, at("me.crt"));
        assert_eq!(user.client_key.as_deref(), Some("/abs/me.key"));
        assert_eq!(user.exec.as_ref().unwrap().command, at("./login"));
        fs::write(&file, "").unwrap();
        assert!(super::read(&file).unwrap().contexts.is_empty());
    }
}
