//! Reads the samples of a page of metrics in the format of Prometheus or `OpenMetrics`.
//!
//! Pure. Source: <https://prometheus.io/docs/specs/om/open_metrics_spec/>. Timestamps and exemplars are left out.

/// One sample of a page.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample<'a> {
    pub(super) name: &'a str,
    labels: Vec<(&'a str, String)>,
    pub(super) value: f64,
}

impl Sample<'_> {
    /// The value of a label; empty where the sample has none.
    pub(super) fn label(&self, name: &str) -> &str {
        self.labels.iter().find(|(one, _)| *one == name).map_or("", |(_, value)| value)
    }
}

/// The samples whose name begins so. Lines that cannot be read are left out.
pub(super) fn samples<'a>(page: &'a str, prefix: &str) -> impl Iterator<Item = Sample<'a>> {
    page.lines().filter(move |line| line.starts_with(prefix)).filter_map(sample)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name, labels, value })
}

/// What stands between braces, and what follows.
fn labels(mut rest: &str) -> Option<(Vec<(&str, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, value) = rest.split_once("=\"")?;
        let (value, after) = quoted(value)?;
        labels.push((name, value));
        rest = after;
    }
}

/// A text up to its closing quotation mark, and what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut characters) = (String::new(), text.char_indices());
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, text.get(at + 1..)?)),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            character => value.push(character),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_labels_and_a_value() {
        let page =
            "# TYPE a counter\na_total{x=\"1\",y=\"q\\\"\\\\\\n}\"} 4 # {trace_id=\"7\"} 1\na_total 2.5e3\nb 1\n";
        let read: Vec<_> = samples(page, "a").collect();
        assert_eq!(read.len(), 2, "{read:?}");
        assert_eq!((read[0].label("x"), read[0].label("y"), read[0].value), ("1", "q\"\\\n}", 4.0));
        assert_eq!((read[1].name, read[1].label("x"), read[1].value), ("a_total", "", 2500.0));
    }

    #[test]
    fn a_line_that_cannot_be_read_is_left_out() {
        for line in ["a{", "a{x=\"1} 2", "a", "a{x=\"1\"}", "a x", "a{x} 1"] {
            assert_eq!(samples(line, "a").next(), None, "{line}");
        }
    }
}
