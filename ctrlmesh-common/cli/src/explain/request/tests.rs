use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    arguments: Arguments,
}

/// What the command says of these flags.
fn said(flags: &[&str]) -> Result<(), String> {
    let line = [&["explain", "pods"], flags, &["--as-pod", "op-0"]].concat();
    let line = Line::try_parse_from(line).map_err(|error| error.to_string())?;
    let verb = line.arguments.request.verb.unwrap();
    check(&line.arguments, verb).map_err(|error| error.to_string())
}

#[test]
fn flags_that_fit_together_are_taken() {
    for flags in [
        &["one", "--verb", "PATCH"][..],
        &["one", "--verb", "patch", "--subresource", "status"],
        &["--verb", "list", "-A", "-l", "a=b", "--field-selector", "metadata.name=one"],
        &["--verb", "deletecollection"],
        &["--verb", "list", "--member-path", "/clusters/m-1"],
        &["--verb", "create"],
    ] {
        assert_eq!(said(flags), Ok(()), "{flags:?}");
    }
}

#[test]
fn flags_that_do_not_are_refused_by_name() {
    for (flags, says) in [
        (&["--verb", "get"][..], "--verb get needs the NAME of an object"),
        (
            &["one", "--verb", "list"],
            "--verb list takes no NAME: leave it out, or select with --field-selector metadata.name=one",
        ),
        (&["--verb", "create", "--subresource", "eviction"], "--subresource needs the NAME"),
        (
            &["one", "--verb", "get", "-A"],
            "--all-namespaces is allowed with --verb list, watch and deletecollection only",
        ),
        (&["one", "--verb", "get", "-l", "a=b"], "--selector is not allowed with --verb get"),
        (&["one", "--verb", "get", "--field-selector", "a=b"], "--field-selector is not allowed with --verb get"),
        (&["a/b", "--verb", "get"], "NAME \"a/b\" is not allowed"),
        (&["one", "--verb", "get", "--member-path", "clusters/m-1"], "--member-path \"clusters/m-1\" is not allowed"),
        (&["one", "--verb", "get", "--member-path", "/clusters/../m-1"], "its segments are words"),
        (&["one", "--verb", "get", "--member-path", "/clusters/m-1?a=b"], "its segments are words"),
        (&["..", "--verb", "get"], "NAME \"..\" is not allowed"),
        (&["one", "--verb", "get", "--subresource", "a/b"], "--subresource \"a/b\" is not allowed"),
        (
            &["one", "--verb", "look"],
            "[possible values: get, list, watch, create, update, patch, delete, deletecollection]",
        ),
        (&["one"], "--verb <VERB>"),
    ] {
        let refused = said(flags).unwrap_err();
        assert!(refused.contains(says), "{flags:?}: {refused}");
    }
}
