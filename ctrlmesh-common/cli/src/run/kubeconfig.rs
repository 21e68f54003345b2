//! What does a kubeconfig say, and several of them together?
//!
//! Takes their texts, gives one cluster, user and context. The types are ours rather than a client library's: what is
//! not understood here is handed on to the command as it was written.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

/// The fields of a cluster, a user or a context, as they were written.
pub(super) type Fields = Map<String, Value>;

/// Fields that name files: relative to the kubeconfig's folder.
const CLUSTER_FILES: &[&str] = &["certificate-authority"];
const USER_FILES: &[&str] = &["client-certificate", "client-key", "tokenFile"];

/// One kubeconfig, or several that were merged.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Kubeconfig {
    pub(super) current: String,
    pub(super) clusters: BTreeMap<String, Fields>,
    pub(super) users: BTreeMap<String, Fields>,
    pub(super) contexts: BTreeMap<String, Fields>,
}

/// What one context names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Chosen {
    pub(super) name: String,
    pub(super) context: Fields,
    pub(super) cluster: Fields,
    pub(super) user: Fields,
}

/// Why no cluster and user follow from a kubeconfig.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum ChooseError {
    /// It does not say which context is in use.
    #[error(
        "the kubeconfig has no current-context: choose one with --context, or with `kubectl config use-context` ({contexts})"
    )]
    NoCurrent {
        /// Those that it has.
        contexts: Known,
    },
    /// There is no such context.
    #[error("the kubeconfig has no context {name:?} ({contexts})")]
    NoContext {
        /// What was asked for.
        name: String,
        /// Those that it has.
        contexts: Known,
    },
    /// The context names nothing, or what is not there.
    #[error("context {context:?} names the {kind} {name:?}, which the kubeconfig does not have")]
    Dangling {
        /// The context.
        context: String,
        /// `cluster` or `user`.
        kind: &'static str,
        /// What it names.
        name: String,
    },
}

/// Names to choose from.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Known(Vec<String>);

#[derive(Default, Deserialize)]
struct File {
    #[serde(rename = "current-context")]
    current: Option<String>,
    clusters: Option<Vec<Cluster>>,
    users: Option<Vec<User>>,
    contexts: Option<Vec<Context>>,
}

#[derive(Deserialize)]
struct Cluster {
    name: String,
    cluster: Option<Fields>,
}

#[derive(Deserialize)]
struct User {
    name: String,
    user: Option<Fields>,
}

#[derive(Deserialize)]
struct Context {
    name: String,
    context: Option<Fields>,
}

// === impl Kubeconfig ===

impl Kubeconfig {
    /// Reads the text of a file that is in `folder`, an absolute path.
    pub(super) fn parse(text: &str, folder: &Path) -> Result<Self, Box<serde_saphyr::Error>> {
        let file: Option<File> = serde_saphyr::from_str(text)?;
        let file = file.unwrap_or_default();
        let clusters = file.clusters.into_iter().flatten();
        let clusters = clusters.map(|entry| (entry.name, entry.cluster.unwrap_or_default()));
        let users = file.users.into_iter().flatten();
        let users = users.map(|entry| (entry.name, entry.user.unwrap_or_default()));
        let contexts = file.contexts.into_iter().flatten();
        let contexts = contexts.map(|entry| (entry.name, entry.context.unwrap_or_default()));
        let mut read = Self {
            current: file.current.unwrap_or_default(),
            clusters: clusters.collect(),
            users: users.collect(),
            contexts: contexts.collect(),
        };
        for cluster in read.clusters.values_mut() {
            for field in CLUSTER_FILES {
                absolute(cluster.get_mut(*field), folder);
            }
        }
        for user in read.users.values_mut() {
            for field in USER_FILES {
                absolute(user.get_mut(*field), folder);
            }
            let command = user.get_mut("exec").and_then(|exec| exec.get_mut("command"));
            // A program without a slash is looked for on PATH.
            let command = command.filter(|name| name.as_str().is_some_and(|it| it.contains('/')));
            absolute(command, folder);
        }
        Ok(read)
    }

    /// This one with what `later` adds: whatever stands in both is taken from here, as kubectl does.
    pub(super) fn with(mut self, later: Self) -> Self {
        if self.current.is_empty() {
            self.current = later.current;
        }
        for (mine, theirs) in [
            (&mut self.clusters, later.clusters),
            (&mut self.users, later.users),
            (&mut self.contexts, later.contexts),
        ] {
            for (name, fields) in theirs {
                mine.entry(name).or_insert(fields);
            }
        }
        self
    }

    /// What `context` names, or else the current context.
    pub(super) fn choose(&self, context: Option<&str>) -> Result<Chosen, ChooseError> {
        let name = context.unwrap_or(&self.current);
        let contexts = || Known(self.contexts.keys().cloned().collect());
        if name.is_empty() {
            return Err(ChooseError::NoCurrent { contexts: contexts() });
        }
        let found = self.contexts.get(name);
        let context = found.ok_or_else(|| ChooseError::NoContext {
            name: name.to_owned(),
            contexts: contexts(),
        })?;
        let named = |kind: &'static str, all: &BTreeMap<String, Fields>| {
            let wanted = text(context, kind).unwrap_or_default();
            match all.get(wanted) {
                Some(fields) => Ok(fields.clone()),
                // A context without a user is anonymous.
                None if wanted.is_empty() && kind == "user" => Ok(Fields::new()),
                None => Err(ChooseError::Dangling {
                    context: name.to_owned(),
                    kind,
                    name: wanted.to_owned(),
                }),
            }
        };
        Ok(Chosen {
            name: name.to_owned(),
            cluster: named("cluster", &self.clusters)?,
            user: named("user", &self.users)?,
            context: context.clone(),
        })
    }
}

impl std::fmt::Display for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.as_slice() {
            [] => f.write_str("it has none"),
            names => write!(f, "it has {}", names.join(", ")),
        }
    }
}

/// A field that is a text, and not an empty one.
pub(super) fn text<'a>(fields: &'a Fields, name: &str) -> Option<&'a str> {
    fields.get(name)?.as_str().filter(|text| !text.is_empty())
}

fn absolute(path: Option<&mut Value>, folder: &Path) {
    let Some(value) = path else { return };
    if let Some(path) = value.as_str().filter(|path| !path.is_empty()) {
        *value = folder.join(path).to_string_lossy().into_owned().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "
current-context: dev
contexts:
- {name: dev, context: {cluster: dev, user: me, namespace: ops}}
- {name: bare, context: {cluster: dev}}
- {name: lost, context: {cluster: nowhere, user: me}}
clusters:
- name: dev
  cluster: {server: 'https://10.0.0.1:6443', certificate-authority: pki/ca.crt, extensions: [{name: x, extension: {n: 1}}]}
users:
- name: me
  user: {client-certificate: me.crt, client-key: /abs/me.key, exec: {command: ./login, args: [a, 1]}}
";

    fn one() -> Kubeconfig {
        Kubeconfig::parse(ONE, Path::new("/home/me/.kube")).unwrap()
    }

    #[test]
    fn files_are_relative_to_the_folder_of_the_kubeconfig() {
        let chosen = one().choose(None).unwrap();
        assert_eq!(
            text(&chosen.cluster, "certificate-authority"),
            Some("/home/me/.kube/pki/ca.crt")
        );
        assert_eq!(text(&chosen.user, "client-certificate"), Some("/home/me/.kube/me.crt"));
        assert_eq!(text(&chosen.user, "client-key"), Some("/abs/me.key"));
        assert_eq!(chosen.user["exec"]["command"], "/home/me/.kube/./login");
    }

    #[test]
    fn what_is_not_understood_is_kept() {
        let chosen = one().choose(None).unwrap();
        assert_eq!(chosen.cluster["extensions"][0]["extension"]["n"], 1);
        assert_eq!(chosen.user["exec"]["args"], serde_json::json!(["a", 1]));
    }

    #[test]
    fn of_several_files_the_first_that_says_something_counts() {
        let first = Kubeconfig::parse(
            "{clusters: [{name: dev, cluster: {server: 'https://first'}}], contexts: null}",
            Path::new("/"),
        );
        let merged = first.unwrap().with(one());
        assert_eq!(merged.current, "dev");
        let chosen = merged.choose(None).unwrap();
        assert_eq!(text(&chosen.cluster, "server"), Some("https://first"));
        assert_eq!(text(&chosen.cluster, "certificate-authority"), None, "entries are not mixed");
        assert_eq!(text(&chosen.context, "namespace"), Some("ops"));
    }

    #[test]
    fn a_context_is_chosen_by_name_or_refused_with_those_that_there_are() {
        assert_eq!(one().choose(Some("bare")).unwrap().user, Fields::new());
        let error = one().choose(Some("prod")).unwrap_err().to_string();
        assert!(error.contains("bare, dev, lost"), "{error}");
        let error = Kubeconfig { current: String::new(), ..one() }.choose(None).unwrap_err();
        assert!(error.to_string().contains("--context"), "{error}");
        assert!(matches!(
            one().choose(Some("lost")),
            Err(ChooseError::Dangling { kind: "cluster", .. })
        ));
    }

    #[test]
    fn an_empty_file_says_nothing() {
        assert_eq!(Kubeconfig::parse("", Path::new("/")).unwrap(), Kubeconfig::default());
        assert_eq!(
            Kubeconfig::parse("", Path::new("/")).unwrap().choose(None),
            Err(ChooseError::NoCurrent { contexts: Known(Vec::new()) })
        );
    }
}
