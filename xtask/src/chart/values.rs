//! Makes a table of the values of a chart from the comments in its `values.yaml`.
//!
//! Pure. A value is a key with a comment above it; keys without one are groups. It reads what we write: mappings with
//! two spaces, and comments of whole lines.

use anyhow::{Context as _, Result, bail, ensure};

/// Between these lines of a page stands the table.
const BEGIN: &str = "<!-- values -->\n";
const END: &str = "<!-- end of the values -->\n";

/// What the table says of a block: a default of several lines does not fit into a cell.
const BLOCK: &str = "in `values.yaml`";

/// A value in the making.
struct Entry {
    path: String,
    default: String,
    meaning: String,
}

/// The table, in the order of the file.
///
/// # Errors
/// The first value without a comment.
pub(super) fn table(values: &str) -> Result<String> {
    let mut rows = vec!["| value | default | meaning |\n| --- | --- | --- |\n".to_owned()];
    let row = |Entry { path, default, meaning }| format!("| `{path}` | {default} | {meaning} |\n");
    rows.extend(entries(values)?.into_iter().map(row));
    Ok(rows.concat())
}

/// The page with this table in the place of the one that it has.
///
/// # Errors
/// Where the page has no place for one.
pub(super) fn put(page: &str, table: &str) -> Result<String> {
    let (before, rest) = page.split_once(BEGIN).context("the page has no place for the values")?;
    let (_, after) = rest.split_once(END).context("the place for the values does not end")?;
    Ok(format!("{before}{BEGIN}\n{table}\n{END}{after}"))
}

fn entries(values: &str) -> Result<Vec<Entry>> {
    let (mut entries, mut groups, mut comment) = (Vec::<Entry>::new(), Vec::<&str>::new(), Vec::new());
    // How far the key of a block is indented whose lines are passed over.
    let mut block: Option<usize> = None;
    for line in values.lines() {
        let text = line.trim_start();
        let depth = line.len() - text.len();
        if block.is_some_and(|key| depth > key || text.starts_with("- ")) && !text.is_empty() {
            continue;
        }
        block = None;
        if let Some(said) = text.strip_prefix('#') {
            comment.push(said.trim());
            continue;
        }
        if text.is_empty() {
            comment.clear();
            continue;
        }
        let (key, default) = text.split_once(':').with_context(|| format!("no key: {line}"))?;
        groups.truncate(depth / 2);
        ensure!(groups.len() == depth / 2, "not below its group: {line}");
        groups.push(key);
        let (path, default) = (groups.join("."), default.trim());
        match (comment.is_empty(), default.is_empty()) {
            (true, true) => {}
            (true, false) => bail!("{path} has no comment in values.yaml"),
            (false, is_block) => {
                block = is_block.then_some(depth);
                let default = if is_block { BLOCK.to_owned() } else { format!("`{default}`") };
                entries.push(Entry { path, default, meaning: comment.join(" ").replace('|', "\\|") });
                comment.clear();
            }
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_values_and_blocks_are_told_apart() {
        let values = "# Of the file.\n\na:\n  # Two\n  # lines.\n  b: 1\n  # A block.\n  c:\n    d: 2\n  - e\n  f:\n    # Deep.\n    g: \"\"\n# List.\nh: []\n";
        let rows = table(values).unwrap();
        let expected = "| `a.b` | `1` | Two lines. |\n| `a.c` | in `values.yaml` | A block. |\n| `a.f.g` | `\"\"` | Deep. |\n| `h` | `[]` | List. |\n";
        assert!(rows.ends_with(expected), "{rows}");
    }

    #[test]
    fn a_value_without_a_comment_is_named() {
        let error = table("a:\n  # Said.\n  b: 1\n  c: 2\n").unwrap_err().to_string();
        assert!(error.starts_with("a.c has no comment"), "{error}");
    }

    #[test]
    fn a_table_takes_the_place_of_the_one_before() {
        let page = format!("Before.\n{BEGIN}old\n{END}After.\n");
        let once = put(&page, "new\n").unwrap();
        assert_eq!(once, format!("Before.\n{BEGIN}\nnew\n\n{END}After.\n"));
        assert_eq!(put(&once, "new\n").unwrap(), once);
        assert!(put("Nothing.\n", "new\n").is_err());
    }
}
