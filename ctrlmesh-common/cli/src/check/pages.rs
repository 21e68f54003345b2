//! The sections of the docs that say more about what to do.

pub(super) const BEFORE: &str = "docs/operate.md#before-you-install";
pub(super) const CERTIFICATES: &str = "docs/operate.md#certificate-authorities";
pub(super) const CHANGE_LABELS: &str = "docs/operate.md#change-label-keys-or-the-hash";
pub(super) const CLOCKS: &str = "docs/inspect.md#clocks";
pub(super) const CONDITIONS: &str = "docs/sharding-config.md#status";
pub(super) const FENCE: &str = "docs/operate.md#fence-writes-in-the-api-server";
pub(super) const INSTALL: &str = "docs/operate.md#install";
pub(super) const INTERCEPTION: &str = "docs/design/interception.md#three-ways";
pub(super) const RIGHTS: &str = "docs/inspect.md#rights";
pub(super) const TROUBLESHOOTING: &str = "docs/troubleshooting.md#installation-and-enrolment";
pub(super) const UPGRADE: &str = "docs/operate.md#upgrade-and-roll-back";
pub(super) const WEBHOOK: &str = "docs/troubleshooting.md#the-webhook-does-not-answer";

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_section_exists() {
        let anchor = |line: &str| {
            let title = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
            title.chars().filter(|letter| letter.is_alphanumeric() || *letter == '-').collect::<String>()
        };
        for page in [
            BEFORE,
            CERTIFICATES,
            CHANGE_LABELS,
            CLOCKS,
            CONDITIONS,
            FENCE,
            INSTALL,
            INTERCEPTION,
            RIGHTS,
            TROUBLESHOOTING,
            UPGRADE,
            WEBHOOK,
        ] {
            let (file, section) = page.split_once('#').unwrap();
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
            let text = fs::read_to_string(file).unwrap();
            let mut titles = text.lines().filter(|line| line.starts_with('#'));
            assert!(titles.any(|line| anchor(line) == section), "{page}");
        }
    }
}
