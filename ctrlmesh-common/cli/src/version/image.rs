//! Reads versions from the tags of images, and compares them.
//!
//! Pure.

use std::cmp::Ordering;

/// The version of this program. The images of one version have it as their tag.
pub(crate) const OWN: &str = env!("CARGO_PKG_VERSION");

/// The tag of an image. `None`: it is named by its digest alone, or not at all.
pub(crate) fn tag(image: &str) -> Option<&str> {
    let named = image.split('@').next()?;
    let last = named.rsplit('/').next()?;
    last.split_once(':').map(|(_, tag)| tag)
}

/// How two versions follow each other. `None`: one of them is not of the form `1.2.3`, and they differ.
pub(crate) fn order(one: &str, other: &str) -> Option<Ordering> {
    if without_v(one) == without_v(other) {
        return Some(Ordering::Equal);
    }
    match numbers(one)?.cmp(&numbers(other)?) {
        // They differ in what follows the numbers, as `-rc.1` does.
        Ordering::Equal => None,
        order => Some(order),
    }
}

/// The first numbers of a version: `6.1.0-18-amd64` is 6, 1 and 0.
pub(crate) fn numbers(version: &str) -> Option<Vec<u64>> {
    let version = without_v(version);
    let end = version.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(version.len());
    version[..end].trim_end_matches('.').split('.').map(|number| number.parse().ok()).collect()
}

/// A tag may be `v1.2.3`.
fn without_v(version: &str) -> &str {
    version.strip_prefix('v').unwrap_or(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_what_follows_the_name() {
        for (image, expected) in [
            ("ctrlmesh.dev/manager:0.1.0", Some("0.1.0")),
            ("registry:5000/ctrlmesh/proxy:v2", Some("v2")),
            ("registry:5000/ctrlmesh/proxy", None),
            ("proxy@sha256:00ff", None),
            ("proxy:0.1.0@sha256:00ff", Some("0.1.0")),
        ] {
            assert_eq!(tag(image), expected, "{image}");
        }
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for (one, other, expected) in [
            ("0.1.0", "0.1.0", Some(Ordering::Equal)),
            ("v0.1.0", "0.1.0", Some(Ordering::Equal)),
            ("0.9.0", "0.10.0", Some(Ordering::Less)),
            ("v1.0.0", "0.10.0", Some(Ordering::Greater)),
            ("0.1.0-rc.1", "0.1.0", None),
            ("latest", "0.1.0", None),
            ("latest", "latest", Some(Ordering::Equal)),
        ] {
            assert_eq!(order(one, other), expected, "{one} {other}");
        }
    }

    #[test]
    fn kernels_and_clusters_begin_with_numbers() {
        assert_eq!(numbers("6.1.0-18-amd64"), Some(vec![6, 1, 0]));
        assert_eq!(numbers("v1.30.4+k3s1"), Some(vec![1, 30, 4]));
        assert_eq!(numbers("edge"), None);
    }
}
