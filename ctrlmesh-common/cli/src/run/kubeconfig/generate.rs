//! Generates the kubeconfig and the arguments that lead the command to the proxy.
//!
//! The kubeconfig has one context, in which the proxy stands for the API server. Users, exec plugins and all else stay
//! as they are. The text is JSON, which is YAML.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::run::identity::Credential;
use crate::run::kubeconfig::{Chosen, Fields};

/// What the command is to believe.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProxyEndpoint<'a> {
    /// Where it is to connect.
    pub(crate) server: &'a str,
    /// Who vouches for what it finds there, PEM.
    pub(crate) authority: &'a str,
    /// What it proves itself with in place of the user's certificate.
    pub(crate) credential: Option<&'a Credential>,
}

/// The kubeconfig for the command.
pub(crate) fn kubeconfig(chosen: &Chosen, endpoint: ProxyEndpoint<'_>) -> Vec<u8> {
    let mut cluster = chosen.cluster.clone();
    for replaced in ["certificate-authority", "insecure-skip-tls-verify", "proxy-url", "server"] {
        cluster.remove(replaced);
    }
    cluster.insert("server".to_owned(), endpoint.server.into());
    cluster.insert("certificate-authority-data".to_owned(), data(endpoint.authority));
    let mut user = chosen.user.clone();
    if let Some(credential) = endpoint.credential {
        user.remove("client-certificate");
        user.remove("client-key");
        user.insert("client-certificate-data".to_owned(), data(&credential.certificate));
        user.insert("client-key-data".to_owned(), data(&credential.key));
    }
    let name = |fields: &Fields, kind: &str| fields.get(kind).cloned().unwrap_or_default();
    // A user without a name is nobody, and must stay so.
    let users: Vec<Value> = Some(name(&chosen.context, "user"))
        .filter(|name| name.as_str().is_some_and(|name| !name.is_empty()))
        .map(|name| json!({"name": name, "user": user}))
        .into_iter()
        .collect();
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": chosen.name,
        "contexts": [{"name": chosen.name, "context": chosen.context}],
        "clusters": [{"name": name(&chosen.context, "cluster"), "cluster": cluster}],
        "users": users,
    });
    config.to_string().into_bytes()
}

/// The command's arguments, where those that name an original, alone or behind `=`, name what stands for it.
///
/// `replaced` says what stands for a text; the command's own name is left as it is.
pub(crate) fn arguments(command: &[OsString], replaced: impl Fn(&OsStr) -> Option<OsString>) -> Vec<OsString> {
    let changed = |argument: &OsString| {
        if let Some(whole) = replaced(argument) {
            return whole;
        }
        let parts = argument.to_str().and_then(|text| text.split_once('='));
        let Some((name, value)) = parts.filter(|(name, _)| name.starts_with('-')) else {
            return argument.clone();
        };
        let Some(value) = replaced(OsStr::new(value)) else { return argument.clone() };
        let mut whole = OsString::from(name);
        whole.push("=");
        whole.push(value);
        whole
    };
    let (name, arguments) = command.split_at(command.len().min(1));
    name.iter().cloned().chain(arguments.iter().map(changed)).collect()
}

/// `NO_PROXY` with a host that is to be reached directly.
pub(crate) fn no_proxy(before: Option<&str>, host: &str) -> String {
    match before.filter(|list| !list.trim().is_empty()) {
        Some(list) => format!("{list},{host}"),
        None => host.to_owned(),
    }
}

/// Whether `path` is what `KUBECONFIG` or an argument calls it by.
pub(crate) fn names(argument: &OsStr, path: &Path) -> bool {
    Path::new(argument) == path || crate::run::kubeconfig::source::same(Path::new(argument), path)
}

fn data(pem: &str) -> Value {
    STANDARD.encode(pem).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen() -> Chosen {
        let fields = |value| serde_json::from_value(value).unwrap();
        Chosen {
            name: "dev".into(),
            context: fields(json!({"cluster": "c", "user": "u", "namespace": "ops"})),
            cluster: fields(json!({
                "server": "https://10.0.0.1:6443", "certificate-authority": "/ca", "proxy-url": "http://p",
                "tls-server-name": "api", "disable-compression": true,
            })),
            user: fields(json!({
                "client-certificate": "/crt", "client-key": "/key",
                "exec": {"command": "login", "env": null}, "token": "t",
            })),
        }
    }

    fn generated(credential: Option<&Credential>) -> Value {
        let endpoint = ProxyEndpoint { server: "https://127.0.0.1:1", authority: "PEM", credential };
        serde_json::from_slice(&kubeconfig(&chosen(), endpoint)).unwrap()
    }

    #[test]
    fn only_the_server_and_who_vouches_for_it_are_replaced() {
        let config = generated(None);
        assert_eq!(
            config["clusters"][0],
            json!({"name": "c", "cluster": {
                "server": "https://127.0.0.1:1", "certificate-authority-data": "UEVN",
                "tls-server-name": "api", "disable-compression": true,
            }})
        );
        assert_eq!(config["users"][0]["user"], Value::Object(chosen().user));
        assert_eq!(config["contexts"][0]["context"]["namespace"], "ops");
        assert_eq!(config["current-context"], "dev");
    }

    #[test]
    fn the_users_own_key_is_not_handed_to_the_command() {
        let credential = Credential { certificate: "C".into(), key: "K".into() };
        let config = generated(Some(&credential));
        assert_eq!(
            config["users"][0]["user"],
            json!({
                "client-certificate-data": "Qw==", "client-key-data": "Sw==",
                "exec": {"command": "login", "env": null}, "token": "t",
            })
        );
    }

    #[test]
    fn arguments_that_name_the_original_name_the_other() {
        let command: Vec<OsString> =
            ["f", "--kubeconfig=f", "-kubeconfig", "f", "--x=f=f", "f=f", "-v=3", "gf"].map(OsString::from).into();
        let changed = arguments(&command, |text| (text == "f").then(|| "g".into()));
        let expected = ["f", "--kubeconfig=g", "-kubeconfig", "g", "--x=f=f", "f=f", "-v=3", "gf"];
        assert_eq!(changed, expected.map(OsString::from));
    }

    #[test]
    fn the_host_is_added_to_those_that_need_no_proxy() {
        assert_eq!(no_proxy(None, "a"), "a");
        assert_eq!(no_proxy(Some(" "), "a"), "a");
        assert_eq!(no_proxy(Some("b,c"), "a"), "b,c,a");
    }
}
