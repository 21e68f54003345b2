//! Validates the paths that lead to member clusters.

use ctrlmesh_common::api::{Clusters, ShardingConfigSpec};
use ctrlmesh_common::member_path::PathTemplate;

use super::{Report, root};

/// Refuses to change which members there are while pods run. What they did before, and what they have read, counted as
/// done and read elsewhere.
pub(super) fn check_change(old: &ShardingConfigSpec, new: &ShardingConfigSpec, report: &mut Report) {
    let message = "is immutable. Delete the ShardingConfig, create another, and make the operator's pods anew";
    if let (Some(old), Some(new)) = (&old.root, &new.root) {
        if old.clusters != new.clusters {
            report.error("spec.root.clusters", message);
        }
        if old.divides_clusters() != new.divides_clusters() {
            report.error("spec.root.unit", message);
        }
    } else if old.clusters != new.clusters {
        report.error("spec.clusters", message);
    }
}

/// The members that a rule names: `*` stands at the end only.
pub(super) fn check_names(field: &str, names: &[String], report: &mut Report) {
    for (at, name) in names.iter().enumerate() {
        if name.strip_suffix('*').unwrap_or(name).contains('*') {
            let message = format!("{name:?} never matches: \"*\" is allowed at the end only, for any end of a name");
            report.error(format!("{field}[{at}]"), message);
        }
    }
}

/// Those of a shard, and which of them are its own.
pub(super) fn check_of_shard(spec: &ShardingConfigSpec, report: &mut Report) {
    check("spec.clusters", &spec.clusters, report);
    if let Some(hashes) = &spec.cluster_hashes {
        root::hashes("spec.clusterHashes", hashes, report);
        if spec.clusters.is_empty() {
            report.warning("spec.clusterHashes", "is not used: without spec.clusters, no member is known");
        }
    }
    if spec.root.is_some() && !(spec.clusters.is_empty() && spec.cluster_hashes.is_none()) {
        report.warning("spec.clusters", "and clusterHashes are ignored in a root, which has root.clusters");
    }
}

/// `field` is that of the list. Of two paths that overlap, nobody could tell which one a request has.
pub(super) fn check(field: &str, clusters: &[Clusters], report: &mut Report) {
    let mut paths: Vec<(usize, PathTemplate)> = Vec::new();
    for (at, one) in clusters.iter().enumerate() {
        let path = match one.path.parse::<PathTemplate>() {
            Ok(path) => path,
            Err(error) => {
                report.error(format!("{field}[{at}].path"), error.to_string());
                continue;
            }
        };
        if let Some((other, _)) = paths.iter().find(|(_, other)| other.overlaps(&path)) {
            let message = format!(
                "could be the same path as {field}[{other}].path; give each a word of its own in the same place"
            );
            report.error(format!("{field}[{at}].path"), message);
        }
        paths.push((at, path));
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::{Root, Unit};

    use super::*;

    #[test]
    fn members_do_not_change_while_pods_run() {
        let changed = |old: &ShardingConfigSpec, new: &ShardingConfigSpec| {
            let mut report = Report::default();
            check_change(old, new, &mut report);
            report.errors.into_iter().map(|error| error.field).collect::<Vec<_>>()
        };
        let clusters = vec![Clusters { path: "/clusters/{cluster}".to_owned() }];
        let spec = |root: Root| ShardingConfigSpec { root: Some(root), ..Default::default() };
        let (none, some) = (spec(Root::default()), spec(Root { clusters: clusters.clone(), ..Root::default() }));
        let divided = spec(Root { clusters: clusters.clone(), unit: Some(Unit::Cluster), ..Root::default() });
        assert_eq!(changed(&none, &some), ["spec.root.clusters"]);
        assert_eq!(changed(&divided, &some), ["spec.root.unit"]);
        assert_eq!(changed(&divided, &none), ["spec.root.clusters", "spec.root.unit"]);
        assert!(changed(&divided, &divided).is_empty());
        let by_hand = ShardingConfigSpec { clusters, ..Default::default() };
        assert_eq!(changed(&by_hand, &ShardingConfigSpec::default()), ["spec.clusters"]);
    }

    #[test]
    fn a_wildcard_stands_at_the_end_of_a_name() {
        let mut report = Report::default();
        check_names("clusters", &["*", "prod-*", "one", "*-prod", "a*b*"].map(str::to_owned), &mut report);
        let fields: Vec<_> = report.errors.iter().map(|error| &*error.field).collect();
        assert_eq!(fields, ["clusters[3]", "clusters[4]"]);
    }

    #[test]
    fn paths_are_templates_that_do_not_overlap() {
        let checked = |paths: &[&str]| {
            let clusters: Vec<Clusters> = paths.iter().map(|path| Clusters { path: (*path).to_owned() }).collect();
            let mut report = Report::default();
            check("spec.clusters", &clusters, &mut report);
            report.errors.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert!(checked(&["/clusters/{cluster}", "/workspaces/{cluster}"]).is_empty());
        let errors = checked(&["/clusters/{cluster}", "/{cluster}", "/clusters/{cluster}/proxy"]);
        assert!(errors[0].starts_with("spec.clusters[1].path: \"/{cluster}\" must begin"), "{errors:?}");
        assert!(errors[1].starts_with("spec.clusters[2].path: could be the same path as spec.clusters[0].path"));
        assert_eq!(errors.len(), 2);
    }
}
