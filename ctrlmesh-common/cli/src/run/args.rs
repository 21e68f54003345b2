//! The arguments of `run`, and the policy that follows from them.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, ValueEnum};
use ctrlmesh_common::policy::{Limit, Lock, Policy};
use ctrlmesh_common::resource::{ResourceMatch, WILDCARD};
use ctrlmesh_common::selector::Selector;

use crate::run::error::RunError;
use ctrlmesh_proxy::config::CommonArgs;
use ctrlmesh_proxy::policy;
use ctrlmesh_proxy::policy::Source;

/// What `run` is told.
#[derive(Clone, Debug, Args)]
pub(crate) struct RunArgs {
    /// Kubeconfig of the cluster. The default is the file that the command's own arguments name, then KUBECONFIG, then
    /// ~/.kube/config, then the pod's service account
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig, in the place of the current one
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// PEM file with the CA of the API server, in the place of the kubeconfig's
    #[arg(long, value_name = "FILE")]
    pub(crate) certificate_authority: Option<PathBuf>,
    /// YAML or JSON file with ShardingConfigs, one of which the command gets. It is read again when it changes. Not
    /// with --limit or --lock
    #[arg(long, value_name = "FILE", conflicts_with_all = ["limits", "lock"])]
    pub(crate) sharding_config: Option<PathBuf>,
    /// Name of the shard. With --sharding-config it chooses the ShardingConfig; with --lock it is part of the lock's
    /// name
    #[arg(long, value_name = "NAME")]
    pub(crate) shard: Option<String>,
    /// Resources of which the command sees a part, such as pods,deployments.apps or *.example.com or *. May be
    /// repeated; each needs a --selector
    #[arg(long = "limit", value_name = "RESOURCES", requires = "selectors")]
    pub(crate) limits: Vec<Resources>,
    /// Label selector for the resources of the --limit at the same position. May be repeated
    #[arg(long = "selector", value_name = "SELECTOR", requires = "limits")]
    pub(crate) selectors: Vec<String>,
    /// Name of the operator's leader-election lock. The proxy gives each shard a lock of its own. The default namespace
    /// is the kubeconfig's. Needs --shard
    #[arg(long, value_name = "[NAMESPACE/]NAME", requires = "shard")]
    pub(crate) lock: Option<String>,
    /// How connections get to the proxy. The default is ebpf as root where the kernel allows it, otherwise kubeconfig
    #[arg(long, value_name = "HOW")]
    pub(crate) interception: Option<Interception>,
    /// Port on which the proxy listens. The default is any free port
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
    /// Write to standard error what the proxy rewrites, as it happens
    #[arg(long)]
    pub(crate) explain: bool,
    /// Folder on a BPF file system for kernel programs and maps, while the command runs
    #[arg(
        long,
        env = "CTRLMESH_PROXY_RUN_PIN_DIR",
        default_value = "/sys/fs/bpf/ctrlmesh/run",
        hide_env = true,
        value_name = "DIR"
    )]
    pub(crate) pin_dir: PathBuf,
    /// Folder for the generated files of each run. The default is /run/ctrlmesh/run for root, otherwise below
    /// `XDG_RUNTIME_DIR` or the folder for temporary files
    #[arg(long, env = "CTRLMESH_PROXY_RUN_DIR", hide_env = true, value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,
    /// The command to run, with its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// How connections get to the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Interception {
    /// The kernel sends them; needs root
    Ebpf,
    /// `KUBERNETES_SERVICE_HOST` and a service account's files name the proxy
    Env,
    /// A generated kubeconfig names the proxy
    Kubeconfig,
}

/// Some resources, as kubectl writes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resources(Vec<ResourceMatch>);

/// A text that names no resources.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not RESOURCE, RESOURCE.GROUP or *, nor a list of those with commas between")]
pub(crate) struct ResourcesError {
    text: String,
}

/// What the modes of the proxy share, from the environment or by default.
#[derive(Debug, Parser)]
struct Defaults {
    #[command(flatten)]
    common: CommonArgs,
}

impl RunArgs {
    /// The policy of the command, and where it changes; `namespace` is the kubeconfig's.
    pub(crate) fn policy(&self, namespace: &str) -> Result<(Policy, Option<Source>), RunError> {
        if let Some(file) = &self.sharding_config {
            let namespace = namespace.to_owned();
            let source = Source::Shard { file: file.clone(), shard: self.shard.clone(), namespace };
            let failed = |source| RunError::Policy { file: file.clone(), source: Box::new(source) };
            return Ok((policy::load(&source).map_err(failed)?, Some(source)));
        }
        if self.limits.len() != self.selectors.len() {
            let (limits, selectors) = (self.limits.len(), self.selectors.len());
            return Err(RunError::Pairs { limits, selectors });
        }
        let limits = self.limits.iter().zip(&self.selectors).map(|(resources, text)| {
            let failed = |source| RunError::Selector { text: text.clone(), source };
            let selector = Selector::parse(text).map_err(failed)?;
            if selector.is_empty() {
                return Err(RunError::EmptySelector);
            }
            Ok(Limit { relate_resources: resources.0.clone(), selector, changed_at: None })
        });
        let lock = self.lock.as_deref().zip(self.shard.clone()).map(|(lock, shard)| {
            let (namespace, name) = lock.split_once('/').unwrap_or((namespace, lock));
            Lock { namespace: namespace.to_owned(), name: name.to_owned(), shard }
        });
        let limits = limits.collect::<Result<_, _>>()?;
        let policy = Policy { limits, lock, ..Policy::default() };
        policy.check().map_err(RunError::Limits)?;
        let contradicts = |error| RunError::Contradiction(Box::new(error));
        Ok((policy::sensible(policy).map_err(contradicts)?, None))
    }
}

/// Deadlines, threads and the like, as the environment sets them for every mode.
pub(crate) fn common() -> Result<CommonArgs, clap::Error> {
    Defaults::try_parse_from(["run"]).map(|defaults| defaults.common)
}

impl FromStr for Resources {
    type Err = ResourcesError;

    fn from_str(text: &str) -> Result<Self, ResourcesError> {
        let one = |word: &str| {
            let (resource, group) = match word.trim().split_once('.') {
                Some((resource, group)) => (resource, group),
                // Without a group it may be of any: a limit on a resource that nobody serves would limit nothing.
                None => (word.trim(), WILDCARD),
            };
            let matched = ResourceMatch { api_groups: vec![group.to_owned()], resources: vec![resource.to_owned()] };
            matched.check().is_ok().then_some(matched)
        };
        let all: Option<Vec<_>> = text.split(',').map(one).collect();
        all.map(Self).ok_or_else(|| ResourcesError { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        run: RunArgs,
    }

    fn run(line: &str) -> Result<RunArgs, clap::Error> {
        Line::try_parse_from(line.split('|')).map(|line| line.run)
    }

    #[test]
    fn resources_are_written_as_kubectl_writes_them() {
        let Resources(all) = "pods,deployments.apps,*.example.com,*".parse().unwrap();
        let covers = |group, resource| all.iter().position(|it| it.covers(group, resource));
        assert_eq!(covers("", "pods"), Some(0));
        assert_eq!(covers("apps", "deployments"), Some(1));
        assert_eq!(covers("example.com", "widgets"), Some(2));
        assert_eq!(covers("batch", "jobs"), Some(3));
        for wrong in ["", "pods,", "Pods", "pods/log", "a.B"] {
            assert!(wrong.parse::<Resources>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn limits_and_selectors_come_in_pairs() {
        let args = run("run|--limit|pods|--selector|a in (1,2)|--limit|*.x|--selector|b|--|op").unwrap();
        let (policy, source) = args.policy("ops").unwrap();
        assert_eq!(policy.limits.len(), 2);
        assert!(source.is_none());
        let odd = run("run|--limit|pods|--limit|nodes|--selector|a|--|op").unwrap();
        assert!(matches!(odd.policy("ops"), Err(RunError::Pairs { limits: 2, selectors: 1 })));
        assert!(run("run|--limit|pods|--|op").is_err());
        let wrong = run("run|--limit|pods|--selector|a in|--|op").unwrap();
        assert!(matches!(wrong.policy("ops"), Err(RunError::Selector { .. })));
        let empty = run("run|--limit|pods|--selector||--|op").unwrap();
        assert!(matches!(empty.policy("ops"), Err(RunError::EmptySelector)));
    }

    #[test]
    fn the_lock_is_in_the_kubeconfigs_namespace_unless_named() {
        let lock = |line: &str| run(line).unwrap().policy("ops").unwrap().0.lock.unwrap();
        let here = lock("run|--lock|leader|--shard|a|--|op");
        assert_eq!((here.namespace.as_str(), here.name.as_str()), ("ops", "leader"));
        assert_eq!(lock("run|--lock|sys/leader|--shard|a|--|op").namespace, "sys");
        assert!(run("run|--lock|leader|--|op").is_err(), "a lock for all shards is none");
    }

    #[test]
    fn nothing_said_means_that_everything_passes() {
        let (policy, source) = run("run|--|op|--limit|x").unwrap().policy("ops").unwrap();
        assert_eq!((policy, source.is_none()), (Policy::default(), true));
    }
}
