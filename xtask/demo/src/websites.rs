//! The example operator's work: what is asked of it, and is all there that there should be?
//!
//! Pure, but for asking.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::api::Api;

/// How many sites a namespace has, and how many pages a site.
pub const SITES: usize = 2;
const PAGES: usize = 2;

/// What the shards divide.
pub fn resources() -> Value {
    json!([{"relateResources": [
        {"apiGroups": ["web.example.com"], "resources": ["websites"]},
        {"apiGroups": [""], "resources": ["configmaps"]},
    ]}])
}

/// The kinds that are labelled: group, version, kind, plural.
pub const KINDS: [(&str, &str, &str, &str); 2] =
    [("", "v1", "ConfigMap", "configmaps"), ("web.example.com", "v1alpha1", "Website", "websites")];

/// The name of the namespace of this number.
pub fn namespace(number: usize) -> String {
    format!("shop-{number:02}")
}

/// The sites of a namespace.
pub fn sites() -> Vec<Value> {
    let site = |number| {
        json!({"apiVersion": "web.example.com/v1alpha1", "kind": "Website",
            "metadata": {"name": format!("site-{number}")},
            "spec": {"title": "as made", "pages": PAGES}})
    };
    (0..SITES).map(site).collect()
}

/// A change of a site, that all its pages have to follow.
pub fn change(title: &str) -> Value {
    json!({"spec": {"title": title}})
}

/// Compares every page of every site with what the operator is to make of it; gives how many pages there are.
///
/// # Errors
/// The first page that is missing, is too much, or is not as it should be.
pub fn check(api: &Api) -> Result<usize> {
    let sites = api.get("/apis/web.example.com/v1alpha1/websites")?;
    let pages = api.get("/api/v1/configmaps?labelSelector=web.example.com%2Fsite")?;
    let (wanted, found) = (wanted(&sites), written(&pages));
    for (page, text) in &wanted {
        let found = found.get(page);
        ensure!(found == Some(text), "page {page}: is {found:?}, and should be {text:?}");
    }
    let extra = found.keys().find(|page| !wanted.contains_key(*page));
    ensure!(extra.is_none(), "page {extra:?} belongs to no site");
    Ok(wanted.len())
}

/// Every page that there should be, with its text.
fn wanted(sites: &Value) -> BTreeMap<String, String> {
    let sites = sites["items"].as_array().into_iter().flatten();
    let pages = sites.flat_map(|site| {
        let (meta, spec) = (&site["metadata"], &site["spec"]);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (namespace, name, title) =
            (text(&meta["namespace"]), text(&meta["name"]), text(&spec["title"]));
        let count = spec["pages"].as_u64().unwrap_or_default();
        (0..count).map(move |page| {
            (
                format!("{namespace}/{name}-page-{page}"),
                format!("<h1>{title}</h1><p>page {page}</p>\n"),
            )
        })
    });
    pages.collect()
}

fn written(pages: &Value) -> BTreeMap<String, String> {
    let pages = pages["items"].as_array().into_iter().flatten();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let page = |page: &Value| {
        let meta = &page["metadata"];
        let name = format!("{}/{}", text(&meta["namespace"]), text(&meta["name"]));
        (name, text(&page["data"]["index.html"]))
    };
    pages.map(page).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_wanted_as_the_operator_writes_them() {
        let site = json!({"metadata": {"namespace": "a", "name": "s"}, "spec": {"title": "T", "pages": 2}});
        let wanted = wanted(&json!({"items": [site]}));
        let page = |number: u32| {
            json!({"metadata": {"namespace": "a", "name": format!("s-page-{number}")},
            "data": {"index.html": format!("<h1>T</h1><p>page {number}</p>\n")}})
        };
        assert_eq!(written(&json!({"items": [page(0), page(1)]})), wanted);
        assert_ne!(written(&json!({"items": [page(0)]})), wanted);
    }
}
