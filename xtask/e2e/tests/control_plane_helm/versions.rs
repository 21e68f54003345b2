//! API servers of other releases of Kubernetes take the chart, too.

use anyhow::Result;
use ctrlmesh_testbed::{Options, is_full, skipped};
use xtask::setup::versions::api_server;
use xtask::tools::{self, HELMS};

use crate::accepted::{accepted_by, prepared};
use crate::helm::{Helm, all_values, ask};

#[test]
fn other_releases_of_kubernetes_take_the_chart() -> Result<()> {
    if !is_full() {
        let why = "building three API servers takes many minutes: only with --full";
        skipped("other_releases_of_kubernetes_take_the_chart", why)?;
        return Ok(());
    }
    let values = all_values().display().to_string();
    for release in tools::OTHER_KUBERNETES {
        let plane = prepared(&Options { api_server: Some(api_server(release)?), ..Options::default() })?;
        let version = ask(&plane, &["get", "--raw", "/version"], "")?;
        assert!(version.contains(&format!("\"{release}\"")), "{version}");
        for helm in HELMS {
            let helm = Helm::of(helm, &plane);
            accepted_by(&plane, &helm, &[])?;
            accepted_by(&plane, &helm, &["--values", &values])?;
        }
    }
    Ok(())
}
