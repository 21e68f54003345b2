//! Shows requests for people.
//!
//! Pure.

use ctrlmesh_proxy::trace::{TraceLine, TracedRequest};

use crate::text;

/// Below a request, under its target.
const INDENT: &str = "             ";

/// The names of the columns. Their widths do not depend on what comes.
pub(super) fn head() -> String {
    row(["TIME", "STATUS", "VERB", "DECISION", "TOOK", "TARGET"])
}

pub(super) fn line(line: &TraceLine) -> String {
    match line {
        TraceLine::Request(request) => shown(request),
        TraceLine::Omitted(count) => {
            let requests = text::counted(usize::try_from(*count).unwrap_or(usize::MAX), "more request");
            format!("{INDENT}{requests} not shown: --rate shows more of them, other flags fewer\n")
        }
        TraceLine::Error(error) => format!("{error}\n"),
    }
}

fn shown(request: &TracedRequest) -> String {
    let status = request.status.map_or_else(text::dash, |status| status.to_string());
    let took = format!("{:.1}ms", request.milliseconds);
    // Of the date and the time, the time.
    let time = request.time.split_once('T').map_or(request.time.as_str(), |(_, time)| time.trim_end_matches('Z'));
    let first = row([time, &status, &request.verb, &request.decision, &took, &request.target]);
    let notes = [
        request.sent.as_ref().map(|sent| format!("sent as {sent}")),
        request.lock_renamed.then(|| "the lock's name was changed in the body".to_owned()),
        request.reason.as_ref().map(|reason| format!("why: {}", text::line(reason))),
    ];
    let notes = notes.into_iter().flatten().map(|note| format!("{INDENT}{note}\n"));
    [first].into_iter().chain(notes).collect()
}

fn row([time, status, verb, decision, took, target]: [&str; 6]) -> String {
    format!("{time:<13}{status:<7}{verb:<17}{decision:<10}{took:>9}  {target}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_shows_what_was_rewritten_below_it() {
        let request = TracedRequest {
            time: "2026-11-28T09:12:01.123Z".to_owned(),
            verb: "list".to_owned(),
            target: "/api/v1/pods".to_owned(),
            sent: Some("/api/v1/pods?labelSelector=a".to_owned()),
            decision: "rewritten".to_owned(),
            status: Some(200),
            milliseconds: 3.21,
            ..TracedRequest::default()
        };
        let text = head() + &line(&TraceLine::Request(Box::new(request)));
        let expected = "\
TIME         STATUS VERB             DECISION       TOOK  TARGET
09:12:01.123 200    list             rewritten     3.2ms  /api/v1/pods
             sent as /api/v1/pods?labelSelector=a
";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_refusal_says_why_in_one_line() {
        let reason = Some("let the request pass:\n it is another's".to_owned());
        let request = TracedRequest { decision: "refused".to_owned(), reason, ..TracedRequest::default() };
        let text = line(&TraceLine::Request(Box::new(request)));
        assert!(text.contains("why: let the request pass: it is another's\n"), "{text}");
        assert!(text.contains(" -  "), "no status: {text}");
        assert!(line(&TraceLine::Omitted(2)).contains("2 more requests not shown"));
    }
}
