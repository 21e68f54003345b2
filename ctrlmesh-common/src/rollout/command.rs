//! What somebody wants done with a revision, as the annotation on the root says it.

/// A command, with its revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Go on with the next step, or try a revision that failed once more.
    Promote(String),
    /// Go on with the last step.
    PromoteFull(String),
    /// End the trial, as if it had failed.
    Abort(String),
}

impl Command {
    /// The revision that it is about.
    pub fn revision(&self) -> &str {
        match self {
            Self::Promote(revision) | Self::PromoteFull(revision) | Self::Abort(revision) => revision,
        }
    }

    /// Text after the revision does not count. `None` where it is no command.
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let (verb, revision) = (words.next()?, words.next()?.to_owned());
        match verb {
            "promote" => Some(Self::Promote(revision)),
            "promote-full" => Some(Self::PromoteFull(revision)),
            "abort" => Some(Self::Abort(revision)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_names_its_revision_and_the_rest_does_not_count() {
        let a = || "a".to_owned();
        assert_eq!(Command::parse("promote a"), Some(Command::Promote(a())));
        assert_eq!(Command::parse("promote-full a at 10:30"), Some(Command::PromoteFull(a())));
        assert_eq!(Command::parse("abort a again"), Some(Command::Abort(a())));
        for text in ["", "promote", "pause a", "a promote"] {
            assert_eq!(Command::parse(text), None, "{text}");
        }
    }
}
