//! The names that Kubernetes gives to the pods of a workload, as a regular expression.
//!
//! Other workloads may use the same service account: their pods have other names.

use super::Workload;

/// The characters of generated names and of the hash of a Deployment's template (`apimachinery/pkg/util/rand`).
const GENERATED: &str = "[bcdfghjklmnpqrstvwxz2456789]";

/// How many of them end a generated name.
const RANDOM: usize = 5;

/// Longest part before these (`apiserver/pkg/storage/names`).
const MAX_BASE: usize = 58;

/// Longest hash of a template: 32 bits in decimal.
const MAX_HASH: usize = 10;

/// Matches the names of the pods of `workload`, and no other that Kubernetes makes.
pub(super) fn pattern(workload: &Workload) -> String {
    match workload {
        Workload::StatefulSet(name) => format!("^{}-[0-9]+$", literal(name)),
        Workload::Deployment(name) => format!("^{}$", generated(name)),
    }
}

/// The pods' base is `<name>-<hash>-`, cut to [`MAX_BASE`].
fn generated(name: &str) -> String {
    let base = format!("{name}-");
    let Some(room) = MAX_BASE.checked_sub(base.len()).filter(|room| *room > 0) else {
        let base = base.get(..MAX_BASE).unwrap_or(&base);
        return format!("{}{GENERATED}{{{RANDOM}}}", literal(base));
    };
    // Together with its hyphen, the hash may be longer than what is left.
    let whole = room.saturating_sub(1).min(MAX_HASH);
    let whole = (whole > 0).then(|| format!("{GENERATED}{{1,{whole}}}-{GENERATED}{{{RANDOM}}}"));
    let cut = (room <= MAX_HASH).then(|| format!("{GENERATED}{{{}}}", room + RANDOM));
    let endings: Vec<String> = whole.into_iter().chain(cut).collect();
    match &endings[..] {
        [one] => format!("{}{one}", literal(&base)),
        all => format!("{}({})", literal(&base), all.join("|")),
    }
}

/// Names consist of lower-case letters, digits, hyphens and dots.
fn literal(name: &str) -> String {
    name.replace('.', "[.]")
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;

    fn of_set(name: &str) -> Regex {
        Regex::new(&pattern(&Workload::StatefulSet(name.to_owned()))).unwrap()
    }

    fn of_deployment(name: &str) -> Regex {
        Regex::new(&pattern(&Workload::Deployment(name.to_owned()))).unwrap()
    }

    /// As `names.SimpleNameGenerator` does it.
    fn generate(base: &str) -> String {
        format!("{}x2bz9", &base[..base.len().min(MAX_BASE)])
    }

    #[test]
    fn pods_of_a_stateful_set_end_in_their_ordinal() {
        let pattern = of_set("op.a");
        for name in ["op.a-0", "op.a-12"] {
            assert!(pattern.is_match(name), "{name}");
        }
        for name in ["op.a", "op.a-", "opxa-0", "op.a-b-0", "op.a-0-0", "my-op.a-0", "op.a-0 "] {
            assert!(!pattern.is_match(name), "{name}");
        }
    }

    #[test]
    fn pods_of_a_deployment_have_a_hash_and_a_random_end() {
        let pattern = of_deployment("op");
        for name in ["op-7d9c6b8f5c-x2bz9", "op-5-x2bz9"] {
            assert!(pattern.is_match(name), "{name}");
        }
        let others =
            ["op-0", "op-x2bz9", "op-agent-x2bz9", "op-7d9c6b8f5c-x2bz", "op-a7d9c6b8f5c-x2bz9", "a-op-5-x2bz9"];
        for name in others {
            assert!(!pattern.is_match(name), "{name}");
        }
    }

    #[test]
    fn long_names_are_cut_as_kubernetes_cuts_them() {
        for length in 1..=253 {
            let name = "d".repeat(length);
            let pattern = of_deployment(&name);
            for hash in ["5", "7d9c6b", "7d9c6b8f5c"] {
                let pod = generate(&format!("{name}-{hash}-"));
                assert!(pod.len() <= 63 && pattern.is_match(&pod), "{length}: {pod}");
            }
            assert!(!pattern.is_match(&generate(&format!("e{name}-"))), "{length}");
        }
    }
}
