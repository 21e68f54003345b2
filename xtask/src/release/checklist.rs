//! Writes the checklist of a release: what is done, and the commands of what is done by hand.

use crate::platform::Platform;

/// Stands in commands for the registry, which the project does not know.
const REGISTRY: &str = "$REGISTRY";

/// How far a line is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Done just now; how it turned out.
    Done(String),
    /// Somebody has to do this.
    ByHand(String),
}

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    what: &'static str,
    state: State,
}

/// What the checklist follows from.
#[derive(Debug)]
pub(super) struct Facts<'a> {
    pub(super) version: &'a str,
    pub(super) commit: &'a str,
    /// The text of `CHANGELOG.md`.
    pub(super) changelog: &'a str,
    /// The platforms, and whether the programs for it ran here.
    pub(super) platforms: &'a [(Platform, bool)],
    /// Name and digest of each image, without the registry.
    pub(super) images: &'a [(String, String)],
    pub(super) chart: &'a str,
    /// Whether a build in another folder gave the same bytes; none where there was none.
    pub(super) is_verified: bool,
}

/// The lines, in the order in which they are to be done.
pub(super) fn items(facts: &Facts<'_>) -> Vec<Item> {
    let mut items = before(facts);
    items.extend(made(facts));
    items.extend(after(facts));
    items
}

fn before(facts: &Facts<'_>) -> Vec<Item> {
    let Facts { version, commit, changelog, .. } = facts;
    let section = format!("## {version}");
    let has_section = changelog.lines().any(|line| line == section || line.starts_with(&format!("{section} ")));
    let changelog = if has_section {
        State::Done(format!("CHANGELOG.md has `{section}`"))
    } else {
        State::ByHand(format!("in CHANGELOG.md, call `## Unreleased` `{section} - DATE`, and commit"))
    };
    vec![
        Item { what: "source", state: State::Done(format!("commit {commit}, and nothing beside it")) },
        Item { what: "changelog", state: changelog },
        Item { what: "checks", state: State::ByHand("cargo xtask lint && cargo xtask test --full".to_owned()) },
    ]
}

fn made(facts: &Facts<'_>) -> Vec<Item> {
    let names = |ran: bool| {
        let of = facts.platforms.iter().filter(move |(_, tried)| *tried == ran);
        of.map(|(platform, _)| platform.name()).collect::<Vec<_>>().join(" and ")
    };
    let (ran, not) = (names(true), names(false));
    let tried = match (ran.as_str(), not.as_str()) {
        (ran, "") => State::Done(format!("for {ran}: each said its version")),
        (_, not) => State::ByHand(format!("built for {not}, but nothing here runs them: start each with --version")),
    };
    let digests = facts.images.iter().map(|(name, digest)| format!("{name}@sha256:{digest}"));
    let same = if facts.is_verified {
        State::Done("a build from a clone in another folder gave the same bytes".to_owned())
    } else {
        State::ByHand("cargo xtask release --dry-run --verify".to_owned())
    };
    let done = |what, said: String| Item { what, state: State::Done(said) };
    vec![
        Item { what: "programs", state: tried },
        done("images", digests.collect::<Vec<_>>().join(", ")),
        done("chart", format!("ctrlmesh@sha256:{}, with the images by digest", facts.chart)),
        done("bills of materials", "a CycloneDX document for each image and platform".to_owned()),
        done("provenance", "an in-toto statement, which nobody has signed".to_owned()),
        done("checksums", "SHA256SUMS".to_owned()),
        Item { what: "same bytes", state: same },
    ]
}

fn after(facts: &Facts<'_>) -> Vec<Item> {
    let Facts { version, commit, images, chart, .. } = facts;
    let by_hand = |what, command: String| Item { what, state: State::ByHand(command) };
    let mut items = vec![by_hand("tag", format!("git tag --sign v{version} {commit} && git push origin v{version}"))];
    for (name, _) in *images {
        let archive = format!("ctrlmesh-{name}-{version}.oci.tar");
        items.push(by_hand(
            "push",
            format!("skopeo copy --all oci-archive:{archive} docker://{REGISTRY}/{name}:{version}"),
        ));
    }
    items.push(by_hand(
        "push",
        format!(
            "skopeo copy oci-archive:ctrlmesh-chart-{version}.oci.tar docker://{REGISTRY}/charts/ctrlmesh:{version}"
        ),
    ));
    let chart = [("charts/ctrlmesh".to_owned(), (*chart).to_owned())];
    for (name, digest) in images.iter().chain(&chart) {
        items.push(by_hand("sign", format!("cosign sign {REGISTRY}/{name}@sha256:{digest}")));
    }
    let statement = format!("ctrlmesh-{version}.intoto.json");
    items.push(by_hand(
        "sign",
        format!(
            "jq .predicate {statement} >predicate.json, and for each of these: \
             cosign attest --type slsaprovenance1 --predicate predicate.json NAME@sha256:DIGEST"
        ),
    ));
    items.push(by_hand("sign", "cosign sign-blob --bundle SHA256SUMS.bundle SHA256SUMS".to_owned()));
    items.push(by_hand("publish", "put all files of the folder, and SHA256SUMS.bundle, beside the tag".to_owned()));
    items
}

/// The checklist as text.
pub(super) fn text(items: &[Item]) -> String {
    let line = |Item { what, state }: &Item| {
        let (mark, said) = match state {
            State::Done(said) => ("done", said),
            State::ByHand(said) => ("by hand", said),
        };
        format!("{mark:<8}{what:<19} {said}\n")
    };
    items.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_of(changelog: &str, is_verified: bool, arm_ran: bool) -> String {
        text(&items(&Facts {
            version: "1.2.3",
            commit: "c0ffee",
            changelog,
            platforms: &[(Platform::Amd64, true), (Platform::Arm64, arm_ran)],
            images: &[("proxy".to_owned(), "12".to_owned())],
            chart: "34",
            is_verified,
        }))
    }

    #[test]
    fn only_what_was_done_is_said_to_be_done() {
        let nothing = made_of("## Unreleased\n", false, false);
        for by_hand in ["call `## Unreleased` `## 1.2.3 - DATE`", "--dry-run --verify", "built for arm64, but"] {
            let line = nothing.lines().find(|line| line.contains(by_hand)).expect(by_hand);
            assert!(line.starts_with("by hand"), "{line}");
        }
        let all = made_of("## 1.2.3 - 2026-12-01\n", true, true);
        for done in ["CHANGELOG.md has", "gave the same bytes", "for amd64 and arm64"] {
            let line = all.lines().find(|line| line.contains(done)).expect(done);
            assert!(line.starts_with("done"), "{line}");
        }
        assert!(made_of("## 1.2.30\n", false, true).contains("by hand changelog"), "another version's section");
    }

    #[test]
    fn publishing_and_signing_are_by_hand_and_name_digests() {
        let text = made_of("", true, true);
        for command in [
            "skopeo copy --all oci-archive:ctrlmesh-proxy-1.2.3.oci.tar docker://$REGISTRY/proxy:1.2.3",
            "cosign sign $REGISTRY/proxy@sha256:12",
            "cosign sign $REGISTRY/charts/ctrlmesh@sha256:34",
            "git tag --sign v1.2.3 c0ffee",
        ] {
            let line = text.lines().find(|line| line.contains(command)).expect(command);
            assert!(line.starts_with("by hand"), "{line}");
        }
    }
}
