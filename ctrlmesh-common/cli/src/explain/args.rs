//! The arguments of `explain`.

use clap::{Args, ValueEnum};

use crate::cluster::ClusterArgs;
use crate::text::Output;

/// What `explain` is told.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Resource of the object, as kubectl takes it: plural, singular, kind or short name, also with .VERSION.GROUP
    #[arg(value_name = "TYPE")]
    pub(super) resource: String,
    /// Name of the object. Needed, but for requests that name none
    #[arg(value_name = "NAME", required_unless_present = "as_pod")]
    pub(super) name: Option<String>,
    /// Ask only about writes of this pod, in the place of all enrolled pods of the root's workload
    #[arg(long, value_name = "POD", conflicts_with = "as_pod")]
    pub(super) for_pod: Option<String>,
    #[command(flatten)]
    pub(super) request: RequestArgs,
    /// How to print: json and yaml are for programs
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub(super) output: Output,
    #[command(flatten)]
    pub(super) cluster: ClusterArgs,
}

/// A request that a pod might send. It is not sent.
#[derive(Args, Debug)]
pub(super) struct RequestArgs {
    /// Explain what becomes of a request that this enrolled pod might send. It is not sent
    #[arg(long, value_name = "POD", requires = "verb")]
    pub(super) as_pod: Option<String>,
    /// Namespace of the pod. The default is that of --namespace
    #[arg(long, value_name = "NAMESPACE", requires = "as_pod")]
    pub(super) as_namespace: Option<String>,
    /// Verb of the request
    #[arg(long, value_name = "VERB", requires = "as_pod", ignore_case = true)]
    pub(super) verb: Option<Verb>,
    /// Path that leads to the member cluster which the request is for, such as
    /// /apis/cluster.karmada.io/v1alpha1/clusters/member-1/proxy
    #[arg(long, value_name = "PATH", requires = "as_pod")]
    pub(super) member_path: Option<String>,
    /// Subresource of the request, such as status
    #[arg(long, value_name = "NAME", requires = "as_pod")]
    pub(super) subresource: Option<String>,
    /// Label selector of the request
    #[arg(short = 'l', long, value_name = "SELECTOR", requires = "as_pod")]
    pub(super) selector: Option<String>,
    /// Field selector of the request
    #[arg(long, value_name = "SELECTOR", requires = "as_pod")]
    pub(super) field_selector: Option<String>,
    /// Whether the request is for the objects of all namespaces
    #[arg(short = 'A', long, requires = "as_pod", conflicts_with = "namespace")]
    pub(super) all_namespaces: bool,
}

/// The verbs of requests for resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub(super) enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
    DeleteCollection,
}

impl Verb {
    pub(super) fn method(self) -> &'static str {
        match self {
            Self::Get | Self::List | Self::Watch => "GET",
            Self::Create => "POST",
            Self::Update => "PUT",
            Self::Patch => "PATCH",
            Self::Delete | Self::DeleteCollection => "DELETE",
        }
    }

    /// As the API has it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Watch => "watch",
            Self::Create => "create",
            Self::Update => "update",
            Self::Patch => "patch",
            Self::Delete => "delete",
            Self::DeleteCollection => "deletecollection",
        }
    }

    /// Whether the request is for a collection, and its selectors are read.
    pub(super) fn is_of_collection(self) -> bool {
        matches!(self, Self::List | Self::Watch | Self::DeleteCollection)
    }
}
