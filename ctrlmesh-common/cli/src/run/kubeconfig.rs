//! Chooses one context of a kubeconfig, with the cluster and the user that it names.
//!
//! Their fields stay a map, so that the command gets those that nobody here knows.

pub(crate) mod generate;
pub(crate) mod source;

use kube::config::Kubeconfig;
use serde::Serialize;
use serde_json::{Map, Value};

/// The fields of a cluster, a user or a context.
pub(crate) type Fields = Map<String, Value>;

/// One context, and what it names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Chosen {
    pub(crate) name: String,
    pub(crate) context: Fields,
    pub(crate) cluster: Fields,
    /// Empty where the context names no user.
    pub(crate) user: Fields,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ChooseError {
    #[error(
        "the kubeconfig has no current-context: choose one with --context, or with `kubectl config use-context` ({contexts})"
    )]
    NoCurrent { contexts: ContextNames },
    #[error("the kubeconfig has no context {name:?} ({contexts})")]
    NoContext { name: String, contexts: ContextNames },
    #[error("context {context:?} names the {kind} {name:?}, which the kubeconfig does not have")]
    Dangling { context: String, kind: &'static str, name: String },
}

/// The contexts of a kubeconfig, sorted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ContextNames(Vec<String>);

/// Chooses `context`, or else the current context.
pub(crate) fn choose(config: &Kubeconfig, context: Option<&str>) -> Result<Chosen, ChooseError> {
    let name = context.or(config.current_context.as_deref()).unwrap_or_default();
    if name.is_empty() {
        return Err(ChooseError::NoCurrent { contexts: ContextNames::of(config) });
    }
    let context = config.contexts.iter().find(|it| it.name == name);
    let context = fields(context.and_then(|it| it.context.as_ref()))
        .ok_or_else(|| ChooseError::NoContext { name: name.to_owned(), contexts: ContextNames::of(config) })?;
    let dangling =
        |kind, wanted: &str| ChooseError::Dangling { context: name.to_owned(), kind, name: wanted.to_owned() };
    let wanted = text(&context, "cluster").unwrap_or_default();
    let cluster = config.clusters.iter().find(|it| it.name == wanted);
    let cluster = cluster.ok_or_else(|| dangling("cluster", wanted))?;
    let cluster = fields(cluster.cluster.as_ref()).unwrap_or_default();
    let user = match text(&context, "user") {
        Some(wanted) => {
            let user = config.auth_infos.iter().find(|it| it.name == wanted);
            let user = user.ok_or_else(|| dangling("user", wanted))?;
            fields(user.auth_info.as_ref()).unwrap_or_default()
        }
        None => Fields::new(),
    };
    Ok(Chosen { name: name.to_owned(), context, cluster, user })
}

/// A field that is a text, and not an empty one.
pub(crate) fn text<'a>(fields: &'a Fields, name: &str) -> Option<&'a str> {
    fields.get(name)?.as_str().filter(|text| !text.is_empty())
}

/// The fields as they are written in a kubeconfig.
fn fields(value: Option<&impl Serialize>) -> Option<Fields> {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(value?) else { return None };
    fields.retain(|_, value| !value.is_null());
    Some(fields)
}

impl ContextNames {
    fn of(config: &Kubeconfig) -> Self {
        let mut names: Vec<_> = config.contexts.iter().map(|it| it.name.clone()).collect();
        names.sort();
        Self(names)
    }
}

impl std::fmt::Display for ContextNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.as_slice() {
            [] => f.write_str("it has none"),
            names => write!(f, "it has {}", names.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "
current-context: dev
contexts:
- {name: dev, context: {cluster: dev, user: me, namespace: ops}}
- {name: bare, context: {cluster: dev}}
- {name: lost, context: {cluster: nowhere, user: me}}
clusters:
- name: dev
  cluster: {server: 'https://10.0.0.1:6443', later: 1, extensions: [{name: x, extension: {n: 1}}]}
users:
- name: me
  user: {token: t, later: 2, exec: {command: login, args: [a], env: null}}
";

    fn config() -> Kubeconfig {
        Kubeconfig::from_yaml(CONFIG).unwrap()
    }

    #[test]
    fn fields_that_nobody_here_knows_are_kept() {
        let chosen = choose(&config(), None).unwrap();
        assert_eq!(chosen.cluster["extensions"][0]["extension"]["n"], 1);
        assert_eq!((&chosen.cluster["later"], &chosen.user["later"]), (&1.into(), &2.into()));
        assert_eq!(chosen.user["exec"]["args"], serde_json::json!(["a"]));
        assert_eq!(text(&chosen.user, "token"), Some("t"));
        assert_eq!(text(&chosen.context, "namespace"), Some("ops"));
    }

    #[test]
    fn a_context_is_chosen_by_name_or_refused_with_a_list() {
        assert_eq!(choose(&config(), Some("bare")).unwrap().user, Fields::new());
        let error = choose(&config(), Some("prod")).unwrap_err().to_string();
        assert!(error.contains("bare, dev, lost"), "{error}");
        let error = choose(&Kubeconfig::default(), None).unwrap_err().to_string();
        assert!(error.contains("--context") && error.contains("it has none"), "{error}");
        let lost = choose(&config(), Some("lost"));
        assert!(matches!(lost, Err(ChooseError::Dangling { kind: "cluster", .. })));
    }
}
