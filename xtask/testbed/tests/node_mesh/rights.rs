//! What our accounts may do, by what flow schema the API server takes their requests, and whom its webhooks never ask.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use ctrlmesh_testbed::audit_log::AuditEvent;
use ctrlmesh_testbed::{Cluster, retry};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, PostParams};
use kube::core::ApiResource;
use kube::discovery::Scope;
use kube::{Client, Discovery};

use crate::mesh::{self, NAMESPACE, kubectl, until};

/// What neither manager nor node proxies may do, as one would ask `kubectl auth can-i`.
const DENIED: [&str; 21] = [
    "get secrets --all-namespaces",
    "list secrets --all-namespaces",
    "get secret/other -n ctrlmesh-system",
    "list secrets -n ctrlmesh-system",
    "delete secret/ctrlmesh-ca -n ctrlmesh-system",
    "get configmaps --all-namespaces",
    "patch configmap/other -n default",
    "create pods --all-namespaces",
    "create pods --subresource=exec --all-namespaces",
    "get nodes",
    "delete namespaces",
    "create serviceaccounts --subresource=token --all-namespaces",
    "impersonate users",
    "escalate clusterroles",
    "create clusterrolebindings",
    "update validatingwebhookconfiguration/other",
    "update validatingwebhookconfiguration/ctrlmesh-labels",
    "delete mutatingwebhookconfiguration/other",
    "patch mutatingadmissionpolicy/other",
    "update lease/other -n ctrlmesh-system",
    "delete customresourcedefinitions",
];

/// What the manager may not do either, though it is near to what it does.
const DENIED_TO_THE_MANAGER: [&str; 21] = [
    "patch nodes",
    "get pods --all-namespaces",
    "update pods --all-namespaces",
    "update pods --subresource=status --all-namespaces",
    "update deployments --all-namespaces",
    "delete statefulsets --all-namespaces",
    "list replicasets --all-namespaces",
    "patch controllerrevisions --all-namespaces",
    "get shardingconfigs --all-namespaces",
    "update shardingconfigs --all-namespaces",
    "get shardingconfigs --subresource=status --all-namespaces",
    "patch shardingconfigs --subresource=status --all-namespaces",
    "get managerstates --subresource=status",
    "get customresourcedefinitions",
    "get namespace/default",
    "patch namespace/default",
    "get configmap/ctrlmesh-root-ca -n default",
    "get configmap/ctrlmesh-fence.ops.op -n default",
    "patch websites --all-namespaces",
    "impersonate serviceaccount/default -n ctrlmesh-system",
    "impersonate serviceaccount/ctrlmesh-manager-background -n default",
];

/// What the account that puts labels right may not do.
const DENIED_IN_THE_BACKGROUND: [&str; 7] = [
    "patch nodes",
    "list pods --all-namespaces",
    "list shardingconfigs --all-namespaces",
    "get namespace/default",
    "create tokenreviews",
    "get secret/ctrlmesh-ca -n ctrlmesh-system",
    "impersonate serviceaccount/ctrlmesh-manager -n ctrlmesh-system",
];

/// What node proxies may not do, though the manager may.
const DENIED_ON_NODES: [&str; 16] = [
    "update nodes",
    "patch nodes --subresource=status",
    "get pods --all-namespaces",
    "delete pods --all-namespaces",
    "patch pods --subresource=status --all-namespaces",
    "patch deployments --all-namespaces",
    "get statefulsets --all-namespaces",
    "get controllerrevisions --all-namespaces",
    "get shardingconfigs --all-namespaces",
    "create tokenreviews",
    "get secret/ctrlmesh-ca -n ctrlmesh-system",
    "patch daemonset/ctrlmesh-node -n ctrlmesh-system",
    "list daemonsets -n ctrlmesh-system",
    "get namespace/default",
    "watch namespace/default",
    "list namespaces",
];

/// What the manager may do.
const NEEDED: [&str; 5] = [
    "impersonate serviceaccount/ctrlmesh-manager-background -n ctrlmesh-system",
    "create tokenreviews",
    "get secret/ctrlmesh-ca -n ctrlmesh-system",
    "watch pods --all-namespaces",
    "patch configmap/ctrlmesh-root-ca -n default",
];

/// What may be asked for, by the names that kubectl takes: the group, and whether it is in namespaces.
type Kinds = BTreeMap<String, (ApiResource, Scope)>;

/// Everything that the cluster serves; where two groups have something of the same name, the first of the alphabet.
async fn kinds(client: &Client) -> Result<Kinds> {
    let served = Discovery::new(client.clone()).run_aggregated().await?;
    let mut kinds = Kinds::new();
    for group in served.groups_alphabetical() {
        for (kind, capabilities) in group.recommended_resources() {
            for name in [kind.plural.clone(), kind.kind.to_lowercase()] {
                kinds.entry(name).or_insert((kind.clone(), capabilities.scope.clone()));
            }
        }
    }
    // A definition that has just been written is not served yet.
    ensure!(kinds.contains_key("websites"), "websites are not served");
    // They are nobody's object: it is only said who may be impersonated. And an older API server does not know these.
    let policies = "mutatingadmissionpolicies";
    for (name, group, plural) in
        [("users", "", "users"), ("mutatingadmissionpolicy", "admissionregistration.k8s.io", policies)]
    {
        let kind =
            ApiResource { group: group.to_owned(), plural: plural.to_owned(), ..ApiResource::erase::<Namespace>(&()) };
        kinds.entry(name.to_owned()).or_insert((kind, Scope::Cluster));
    }
    Ok(kinds)
}

/// What is asked for in the words of `kubectl auth can-i`.
fn asked(kinds: &Kinds, question: &str) -> Result<ResourceAttributes> {
    let (mut words, mut namespace, mut subresource) = (question.split(' '), None, None);
    let (verb, what) = words.next().zip(words.next()).context("a verb, and of what")?;
    while let Some(word) = words.next() {
        match word.split_once('=') {
            Some(("--subresource", name)) => subresource = Some(name.to_owned()),
            _ if word == "--all-namespaces" => namespace = Some(String::new()),
            _ if word == "-n" => namespace = words.next().map(str::to_owned),
            _ => bail!("what is {word}?"),
        }
    }
    let (kind, name) = what.split_once('/').map_or((what, None), |(kind, name)| (kind, Some(name.to_owned())));
    let (kind, scope) = kinds.get(kind).with_context(|| format!("there are no {kind}"))?;
    ensure!((*scope == Scope::Namespaced) == namespace.is_some(), "in which namespace?");
    Ok(ResourceAttributes {
        verb: Some(verb.to_owned()),
        group: Some(kind.group.clone()),
        resource: Some(kind.plural.clone()),
        // As the API server has it of a request: a namespace is in itself.
        namespace: namespace.or_else(|| name.clone().filter(|_| kind.kind == "Namespace")),
        subresource,
        name,
        ..ResourceAttributes::default()
    })
}

/// Whether an account of ours may do what is asked.
async fn may(client: &Client, kinds: &Kinds, account: &str, question: &str) -> Result<bool> {
    let group = |name: &str| format!("system:{name}");
    let accounts = group("serviceaccounts");
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(format!("system:serviceaccount:{NAMESPACE}:{account}")),
            groups: Some(vec![format!("{accounts}:{NAMESPACE}"), accounts, group("authenticated")]),
            resource_attributes: Some(asked(kinds, question).context(question.to_owned())?),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let answer = Api::all(client.clone()).create(&PostParams::default(), &review).await?;
    let status = answer.status.context("no answer")?;
    ensure!(status.evaluation_error.is_none(), "{question}: {status:?}");
    Ok(status.allowed)
}

#[tokio::test]
async fn our_accounts_have_the_rights_that_they_need_and_no_more() -> Result<()> {
    let cluster = mesh::shared();
    let client = cluster.client().await?;
    let kinds = retry(|| kinds(&client)).await?;
    let may = async |account, question| may(&client, &kinds, account, question).await;
    for denied in DENIED {
        for account in ["ctrlmesh-manager", "ctrlmesh-manager-background", "ctrlmesh-node"] {
            ensure!(!may(account, denied).await?, "{account} may {denied}");
        }
    }
    for denied in DENIED_TO_THE_MANAGER {
        ensure!(!may("ctrlmesh-manager", denied).await?, "the manager may {denied}");
    }
    for denied in DENIED_IN_THE_BACKGROUND {
        ensure!(!may("ctrlmesh-manager-background", denied).await?, "in the background, {denied}");
    }
    for denied in DENIED_ON_NODES {
        ensure!(!may("ctrlmesh-node", denied).await?, "a node's proxy may {denied}");
    }
    for needed in NEEDED {
        ensure!(may("ctrlmesh-manager", needed).await?, "the manager may not {needed}");
    }
    ensure!(may("ctrlmesh-node", "get daemonset/ctrlmesh-node -n ctrlmesh-system").await?);
    ensure!(may("ctrlmesh-node", "watch namespace/ctrlmesh-system").await?);
    never_refused(cluster)
}

/// Refuses that the manager ever asked for what it may not do.
fn never_refused(cluster: &Cluster) -> Result<()> {
    let selector = "--selector=app.kubernetes.io/name=ctrlmesh-manager";
    let logs = kubectl(cluster, &["--namespace", NAMESPACE, "logs", selector, "--tail=-1"])?;
    // An event in a namespace that is being removed: by whom the test before this one is tidied up.
    let refused = logs.lines().find(|line| line.contains("is forbidden") && !line.contains("is being terminated"));
    ensure!(refused.is_none(), "{refused:?}");
    Ok(())
}

/// Which flow schema the API server says that it took a request of an account by.
fn flow(cluster: &Cluster, account: &str) -> Result<String> {
    let user = format!("--as=system:serviceaccount:{NAMESPACE}:{account}");
    let mut ask = cluster.kubectl();
    let output = ask.args(["get", "--raw", "/api/v1/namespaces/default", &user, "-v=8"]).output()?;
    let said = String::from_utf8(output.stderr)?.to_lowercase();
    let uid = said.split_once("x-kubernetes-pf-flowschema-uid").context("no flow schema")?.1;
    let uid: String = uid.chars().skip_while(|one| !one.is_ascii_hexdigit()).take(36).collect();
    let schemas = mesh::json(cluster, &["get", "flowschemas"])?;
    let mut schemas = schemas["items"].as_array().context("flow schemas")?.iter();
    let found = schemas.find(|one| one["metadata"]["uid"] == uid.as_str());
    let name = found.and_then(|one| one["metadata"]["name"].as_str());
    Ok(name.with_context(|| format!("no flow schema {uid}"))?.to_owned())
}

#[test]
fn labels_are_repaired_at_low_priority() -> Result<()> {
    let cluster = mesh::shared();
    ensure!(flow(cluster, "ctrlmesh-manager")? == "ctrlmesh-manager");
    ensure!(flow(cluster, "ctrlmesh-manager-background")? == "ctrlmesh-repair");
    cluster.case("labelled", |space| {
        // What somebody takes away is put right again.
        let label = "ctrlmesh.kusionstack.io/sharding-hash";
        let labels = "jsonpath={.metadata.labels.ctrlmesh\\.kusionstack\\.io/sharding-hash}";
        let labelled = || {
            let value = kubectl(cluster, &["get", "namespace", space.name(), "--output", labels])?;
            Ok((!value.is_empty()).then_some(()))
        };
        until("the namespace to be labelled", labelled)?;
        kubectl(cluster, &["label", "namespace", space.name(), &format!("{label}-")])?;
        until("the label to come back", labelled)?;
        if cluster.node().is_none() {
            return Ok(());
        }
        let of_it = |one: &AuditEvent| one.verb == "patch" && one.object.name == space.name();
        let patches = until("the log to say who did it", || {
            let requests = mesh::requests(cluster, NAMESPACE, "ctrlmesh-manager")?.into_iter();
            let patches: Vec<AuditEvent> = requests.filter(of_it).collect();
            Ok((!patches.is_empty()).then_some(patches))
        })?;
        let background = format!("system:serviceaccount:{NAMESPACE}:ctrlmesh-manager-background");
        let is_background = |one: &AuditEvent| one.impersonated_user.username == background;
        ensure!(patches.iter().all(is_background), "{patches:?}");
        let agent = |one: &AuditEvent| one.user_agent.starts_with("ctrlmesh-manager-background/");
        ensure!(patches.iter().all(agent), "{patches:?}");
        Ok(())
    })
}

#[test]
fn no_webhook_is_asked_about_what_the_cluster_itself_needs() -> Result<()> {
    let cluster = mesh::shared();
    for kind in ["validatingwebhookconfiguration", "mutatingwebhookconfiguration"] {
        let configuration = mesh::json(cluster, &["get", kind, "ctrlmesh"])?;
        for webhook in configuration["webhooks"].as_array().context("webhooks")? {
            let needed = &webhook["namespaceSelector"]["matchExpressions"][0];
            ensure!(needed["operator"] == "NotIn" && needed["key"] == "kubernetes.io/metadata.name");
            for namespace in ["kube-system", NAMESPACE] {
                let values = needed["values"].as_array().context("namespaces")?;
                ensure!(values.iter().any(|one| one == namespace), "{webhook}");
            }
        }
    }
    until("the webhooks to believe the manager", || {
        let configuration = mesh::json(cluster, &["get", "mutatingwebhookconfiguration", "ctrlmesh"])?;
        Ok(configuration["webhooks"][0]["clientConfig"]["caBundle"].as_str().map(drop))
    })
}
