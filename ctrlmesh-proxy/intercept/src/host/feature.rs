//! Finds the feature that an older kernel lacks in the verifier's message.
//!
//! The verifier names what it does not know by its number, and by its name only where it knows the helper but not for
//! this kind of program. So the number decides, which is the same in every kernel.

use std::borrow::Cow;

/// What the programs use of the newer kernels: the helper's number, in words, and since when `connect` may.
const HELPERS: [(u32, &str, &str); 9] = [
    (186, "seeing what another program decided (bpf_get_retval in connect programs)", "6.1"),
    (187, "refusing a connection with ECONNREFUSED (bpf_set_retval in connect programs)", "6.1"),
    (160, "reading the heartbeat (bpf_ktime_get_coarse_ns)", "5.11"),
    (124, "taking inbound connections (bpf_sk_assign)", "5.9"),
    (131, "reporting connections (bpf_ringbuf_reserve)", "5.8"),
    (123, "finding the caller's cgroup (bpf_get_current_ancestor_cgroup_id)", "5.7"),
    (80, "finding the caller's cgroup (bpf_get_current_cgroup_id)", "5.7"),
    (84, "looking for a listener (bpf_sk_lookup_tcp)", "5.0"),
    (64, "carrying a prefix's open bits (bpf_bind)", "4.17"),
];

/// What the verifier says before the helper: that there is none of this number, or none for this kind of program.
const COMPLAINTS: [&str; 3] = ["invalid func ", "unknown func ", "program of this type cannot use helper "];

/// Kinds of maps that a kernel may not know: the map, in words, and since when.
const MAPS: [(&str, &str, &str); 1] = [("EVENTS", "reporting connections (a ring buffer)", "5.8")];

/// A feature that is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Feature {
    /// In words.
    pub(crate) name: Cow<'static, str>,
    /// First kernel that has it.
    pub(crate) since: &'static str,
}

/// The feature that the text of an error complains about.
pub(crate) fn missing(text: &str) -> Option<Feature> {
    helper(text).or_else(|| map(text))
}

fn helper(text: &str) -> Option<Feature> {
    let named = COMPLAINTS.iter().find_map(|complaint| text.split_once(complaint))?.1;
    let named = named.split_whitespace().next()?;
    let number: u32 = named.rsplit('#').next()?.parse().ok()?;
    let known = HELPERS.into_iter().find(|(helper, _, _)| *helper == number);
    Some(known.map_or_else(
        || Feature { name: format!("helper function {named}").into(), since: "newer than that" },
        |(_, name, since)| Feature { name: name.into(), since },
    ))
}

/// A map of a kind that is not known is an invalid argument.
fn map(text: &str) -> Option<Feature> {
    let (_, named) = text.split_once("failed to create map `")?;
    let (named, reason) = named.split_once('`')?;
    let invalid = reason.contains("(os error 22)");
    let (_, name, since) = MAPS.into_iter().find(|(map, _, _)| invalid && *map == named)?;
    Some(Feature { name: name.into(), since })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the log of the verifier ends.
    fn log(last: &str) -> String {
        format!(
            "the BPF_PROG_LOAD syscall returned Invalid argument (os error 22). Verifier output: func#0 @0\n0: R1=ctx(id=0,off=0,imm=0) R10=fp0\n\
             0: (bf) r6 = r1\n1: (61) r1 = *(u32 *)(r6 +28)\n2: (55) if r1 != 0x6 goto pc+120\n{last}\n\
             processed 4 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0\n\
             : Invalid argument (os error 22)"
        )
    }

    #[track_caller]
    fn lacks(text: &str, name: &str, since: &str) {
        let feature = missing(text).unwrap();
        assert!(feature.name.contains(name) && feature.since == since, "{feature:?}");
    }

    #[test]
    fn a_helper_that_nothing_may_call_is_known_by_its_number() {
        // Linux 5.8 to 5.17.
        lacks(&log("3: (85) call unknown#186\ninvalid func unknown#186"), "seeing what another program decided", "6.1");
        lacks(
            &log("9: (85) call unknown#187\ninvalid func unknown#187"),
            "refusing a connection with ECONNREFUSED",
            "6.1",
        );
        // Linux 5.10.
        lacks(&log("40: (85) call unknown#160\ninvalid func unknown#160"), "reading the heartbeat", "5.11");
    }

    #[test]
    fn a_helper_of_other_programs_is_known_by_its_number() {
        // Linux 5.18 to 6.0.
        lacks(
            &log("3: (85) call bpf_get_retval#186\nunknown func bpf_get_retval#186"),
            "bpf_get_retval in connect programs",
            "6.1",
        );
        // Linux 5.6.
        lacks(
            &log("6: (85) call bpf_get_current_cgroup_id#80\nunknown func bpf_get_current_cgroup_id#80"),
            "finding the caller's cgroup",
            "5.7",
        );
        // Since Linux 6.10.
        lacks(
            &log("3: (85) call bpf_set_retval#187\nprogram of this type cannot use helper bpf_set_retval#187"),
            "refusing a connection with ECONNREFUSED",
            "6.1",
        );
    }

    #[test]
    fn an_unknown_helper_is_named_as_the_kernel_names_it() {
        lacks(
            &log("3: (85) call unknown#60000\ninvalid func unknown#60000"),
            "helper function unknown#60000",
            "newer than that",
        );
    }

    #[test]
    fn a_ring_buffer_that_is_no_kind_of_map_yet_is_a_feature() {
        let text = "map error: failed to create map `EVENTS`: Invalid argument (os error 22)";
        lacks(text, "a ring buffer", "5.8");
        for text in [
            "failed to create map `EVENTS`: Operation not permitted (os error 1)",
            "failed to create map `PODS`: Invalid argument (os error 22)",
        ] {
            assert_eq!(missing(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_helper_that_is_known_is_no_feature() {
        assert_eq!(missing(&log("12: (85) call bpf_set_retval#187\nR1 is not a scalar")), None);
        assert_eq!(missing(&log("R1 invalid mem access 'inv'")), None);
        assert_eq!(missing("Operation not permitted (os error 1)"), None);
    }
}
