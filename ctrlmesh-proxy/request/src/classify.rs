//! Prints what the API server makes of request lines, as JSON.

use std::io::{self, BufRead, BufWriter, Write};

use ctrlmesh_common::member_path::PathTemplate;
use serde::Serialize;

use crate::request::RequestInfo;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Classified<'a> {
    /// The member cluster that the path leads to. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<&'a str>,
    resource_request: bool,
    path: &'a str,
    verb: &'a str,
    api_prefix: &'a str,
    api_group: &'a str,
    api_version: &'a str,
    namespace: &'a str,
    resource: &'a str,
    subresource: &'a str,
    name: &'a str,
    field_selector: &'a str,
    label_selector: &'a str,
}

#[derive(Debug, Serialize)]
struct Refused {
    error: bool,
}

/// Reads lines `METHOD TARGET` to the end, and answers each with a line of JSON. A request whose path leads to a member
/// cluster, by one of these templates, is read as the member reads it.
///
/// # Errors
/// Where reading or writing fails.
pub fn run(members: &[PathTemplate], input: &mut impl BufRead, output: &mut impl Write) -> io::Result<()> {
    let mut output = BufWriter::new(output);
    let mut line = Vec::new();
    while input.read_until(b'\n', &mut line)? > 0 {
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        answer(members, text.strip_suffix(b"\r").unwrap_or(text), &mut output)?;
        output.write_all(b"\n")?;
        line.clear();
    }
    output.flush()
}

fn answer(members: &[PathTemplate], line: &[u8], output: &mut impl Write) -> io::Result<()> {
    let space = line.iter().position(|byte| *byte == b' ');
    let info = space.and_then(|at| RequestInfo::parse_bytes(&line[..at], &line[at + 1..]).ok());
    let info = info.and_then(|info| info.behind(members).ok());
    match &info {
        Some(info) => serde_json::to_writer(output, &Classified::of(info))?,
        None => serde_json::to_writer(output, &Refused { error: true })?,
    }
    Ok(())
}

impl<'a> Classified<'a> {
    fn of(info: &'a RequestInfo<'_>) -> Self {
        Self {
            cluster: info.cluster(),
            resource_request: info.is_resource_request(),
            path: info.path(),
            verb: info.verb(),
            api_prefix: info.api_prefix(),
            api_group: info.api_group(),
            api_version: info.api_version(),
            namespace: info.namespace(),
            resource: info.resource(),
            subresource: info.subresource(),
            name: info.name(),
            field_selector: info.field_selector(),
            label_selector: info.label_selector(),
        }
    }
}
