//! Writes errors for people: the error with its causes, without a backtrace.
//!
//! Pure.

use std::error::Error;

/// The error with its causes in one line. A cause that the text has already is left out, and a refusal that an error
/// prints for debugging is put in the words of the API server.
pub(crate) fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = message(error);
    let mut next = error.source().filter(|_| refusal(error).is_none());
    while let Some(cause) = next {
        let (message, for_debugging) = (message(cause), cause.to_string());
        if for_debugging != message {
            text = text.replace(&for_debugging, &message);
        }
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        next = cause.source().filter(|_| refusal(cause).is_none());
    }
    text
}

fn message(error: &(dyn Error + 'static)) -> String {
    refusal(error).map_or_else(|| error.to_string(), str::to_owned)
}

/// What the API server says where it refuses. The error itself prints the whole answer behind it, for debugging.
fn refusal<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a str> {
    let boxed = || error.downcast_ref::<Box<kube::Error>>().map(AsRef::as_ref);
    let kube::Error::Api(status) = error.downcast_ref::<kube::Error>().or_else(boxed)? else { return None };
    let said = [&status.message, &status.reason].into_iter().map(String::as_str);
    Some(said.into_iter().find(|text| !text.is_empty()).unwrap_or("the API server refuses, and says no reason"))
}

#[cfg(test)]
mod tests {
    use std::io;

    use kube::core::Status;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("read the roots")]
    struct Outer(#[source] kube::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("print: {0}")]
    struct Repeats(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("write")]
    struct Boxed(#[source] Box<kube::Error>);

    #[derive(Debug, thiserror::Error)]
    #[error("watch: {0}")]
    struct Prints(#[source] kube::Error);

    fn refused(message: &str) -> kube::Error {
        kube::Error::Api(Status::failure(message, "Forbidden").with_code(403).boxed())
    }

    #[test]
    fn a_refusal_is_said_in_the_words_of_the_api_server() {
        assert_eq!(causes(&Outer(refused("not for you"))), "read the roots: not for you");
        assert_eq!(causes(&Boxed(Box::new(refused("not for you")))), "write: not for you");
        assert_eq!(causes(&refused("")), "Forbidden");
        assert_eq!(causes(&Prints(refused("not for you"))), "watch: not for you");
    }

    #[test]
    fn a_cause_is_said_once() {
        assert_eq!(causes(&Repeats(io::Error::other("the pipe is closed"))), "print: the pipe is closed");
    }
}
