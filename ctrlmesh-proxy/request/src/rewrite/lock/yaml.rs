//! What does an object in YAML call itself, where that is simple enough to say?
//!
//! Only what people and tools write is read: a mapping in block style, whose keys are words that begin a line. Whatever
//! could mean something else to another reader is refused rather than guessed about, so lines are enough: a key that
//! only looks like one, inside a text, stands beside the one that it hides, and two are refused.

use std::ops::Range;

/// The fields of the metadata that matter here, and where their values stand.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    pub(super) name: Option<Range<usize>>,
    pub(super) generate_name: Option<Range<usize>>,
}

/// A line that says something.
struct Line<'b> {
    /// Where it begins.
    at: usize,
    /// How many blanks it begins with.
    indent: usize,
    /// What stands behind them.
    text: &'b str,
}

/// Where an object names itself; `None` where that cannot be said for sure.
pub(super) fn names(body: &[u8]) -> Option<Names> {
    let text = std::str::from_utf8(body).ok().filter(|text| !has_other_breaks(text))?;
    let mut lines = lines(text).peekable();
    lines.next_if(|line| line.indent == 0 && plain(line.text) == "---");
    let mut names = Names::default();
    let mut found = false;
    while let Some(line) = lines.next() {
        let (key, value) = (line.indent == 0).then(|| pair(line.text)).flatten()?;
        if key == "metadata" {
            if found || !value.is_empty() {
                return None;
            }
            found = true;
            let indent = lines.peek().map_or(0, |line| line.indent);
            while let Some(line) = lines.next_if(|line| line.indent > 0) {
                if line.indent < indent {
                    return None;
                }
                let goes_on = lines.peek().is_some_and(|next| next.indent > indent);
                if line.indent == indent {
                    names.see(&line, goes_on)?;
                }
            }
        } else {
            // What belongs to it.
            while lines.next_if(|line| line.indent > 0).is_some() {}
        }
    }
    found.then_some(names)
}

// === impl Names ===

impl Names {
    /// Takes in one line of the metadata; `goes_on` says that the next belongs to it.
    fn see(&mut self, line: &Line<'_>, goes_on: bool) -> Option<()> {
        let (key, value) = pair(line.text)?;
        let field = match key {
            "name" => &mut self.name,
            "generateName" => &mut self.generate_name,
            _ => return Some(()),
        };
        let bare = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        let bare = bare.or_else(|| value.strip_prefix('\'').and_then(|it| it.strip_suffix('\'')));
        let bare = bare.unwrap_or(value);
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
        if field.is_some() || goes_on || bare.is_empty() || !bare.bytes().all(is_name) {
            return None;
        }
        let rest = &line.text[key.len() + 1..];
        let blanks = rest.len() - rest.trim_start_matches(' ').len();
        let quote = usize::from(bare.len() < value.len());
        let at = line.at + line.indent + key.len() + 1 + blanks + quote;
        *field = Some(at..at + bare.len());
        Some(())
    }
}

/// The lines that are neither empty nor comments.
fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    let mut next = 0;
    let lines = text.split_inclusive('\n').map(move |line| {
        let at = next;
        next += line.len();
        let line = line.trim_end_matches(['\n', '\r']);
        let text = line.trim_start_matches(' ');
        Line { at, indent: line.len() - text.len(), text }
    });
    lines.filter(|line| !plain(line.text).is_empty())
}

/// A key that is a word, and its value.
fn pair(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once(':')?;
    let is_word = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let is_value = value.is_empty() || value.starts_with(' ');
    (is_word && is_value).then(|| (key, plain(value)))
}

/// A text without its comment and the blanks around it.
fn plain(text: &str) -> &str {
    let comment =
        if text.trim_start_matches(' ').starts_with('#') { Some(0) } else { text.find(" #") };
    text[..comment.unwrap_or(text.len())].trim_matches(' ')
}

/// Whether a line ends for some readers where it does not for others.
fn has_other_breaks(text: &str) -> bool {
    let lone = text
        .bytes()
        .zip(text.bytes().skip(1).chain([0]))
        .any(|(one, next)| one == b'\r' && next != b'\n');
    lone || text.contains(['\u{0}', '\u{85}', '\u{2028}', '\u{2029}'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(body: &str) -> Option<&str> {
        names(body.as_bytes()).and_then(|names| names.name).map(|at| &body[at])
    }

    #[test]
    fn a_name_is_found_where_people_and_tools_write_it() {
        for body in [
            "metadata:\n  name: lead\n",
            "---\n# A lock.\napiVersion: v1\nkind: ConfigMap\nmetadata: # of it\n  labels:\n    name: other\n  name: lead  # ours\ndata:\n  a: |\n    metadata:\n      name: x\n",
            "metadata:\r\n    name: \"lead\"\r\n    namespace: ops\r\nkind: ConfigMap",
            "data:\n  name: x\n\nmetadata:\n name:   'lead'\n\n # nothing\n annotations: {name: x}\n",
        ] {
            assert_eq!(name(body), Some("lead"), "{body}");
        }
        let nameless = names(b"metadata:\n  generateName: lead-\nkind: ConfigMap\n").unwrap();
        assert_eq!(nameless, Names { name: None, generate_name: Some(26..31) });
    }

    #[test]
    fn what_could_be_read_otherwise_is_not_read() {
        for body in [
            "",
            "kind: ConfigMap\n",
            "{metadata: {name: lead}}\n",
            "metadata: {name: lead}\n",
            "metadata: &a\n  name: lead\n",
            "metadata:\n  name: lead\nmetadata:\n  name: other\n",
            "metadata:\n  name: lead\n  name: other\n",
            "metadata:\n  name: other\n---\nmetadata:\n  name: lead\n",
            "metadata:\n  name: other\n\"metadata\":\n  name: lead\n",
            "metadata:\n  name: other\nmetadata :\n  name: lead\n",
            "metadata:\n  name: other\n? metadata\n: name: lead\n",
            "metadata:\n  name: other\n  \"name\": lead\n",
            "metadata:\n  name: other\n  <<: *a\n",
            "metadata:\n  name:\n    lead\n",
            "metadata:\n  name: other\n    lead\n",
            "metadata:\n  name: \"le\\x61d\"\n",
            "metadata:\n  name: !!binary bGVhZA==\n",
            "metadata:\n  name: *a\n",
            "metadata:\n    name: other\n  name: lead\n",
            "  metadata:\n    name: lead\n",
            "%YAML 1.1\n---\nmetadata:\n  name: lead\n",
            "\u{feff}metadata:\n  name: lead\n",
            "metadata:\n\tname: lead\n",
            "kind: x\rmetadata:\n  name: other\n",
            "kind: x\u{2028}metadata:\n  name: other\n",
            "data: {\nmetadata:\n  name: other\n  }\nmetadata:\n  name: lead\n",
        ] {
            assert_eq!(name(body), None, "{body}");
        }
    }
}
