//! Says what became of an object that was created by a dry run.
//!
//! Pure.

use kube::Error;
use kube::api::DynamicObject;

use crate::cluster::answer::Unanswered;

/// How the API server begins a refusal by a webhook. The webhook's name follows in quotes.
const DENIED: &str = "admission webhook ";

/// What the API server says where it cannot ask a webhook. The webhook's name follows in quotes.
const NOT_CALLED: &str = "failed calling webhook ";

/// What it says where the user has no right.
const NO_RIGHT: &str = "cannot create resource ";

/// The outcome of a dry run.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum DryRun {
    /// The webhooks are not asked about the namespace.
    NotAsked,
    /// The object would be created so.
    Admitted {
        object: Box<DynamicObject>,
    },
    /// A webhook refused the object.
    Denied {
        webhook: String,
        message: String,
    },
    /// The API server does not reach a webhook.
    NotCalled {
        webhook: String,
        message: String,
    },
    /// Something else refused the object before the webhooks had their say, or after it.
    Refused {
        message: String,
    },
    Unanswered(Unanswered),
}

impl DryRun {
    /// The outcome of a request that needs this right.
    pub(super) fn of(right: &str, answer: Result<DynamicObject, Error>) -> Self {
        let error = match answer {
            Ok(object) => return Self::Admitted { object: Box::new(object) },
            Err(error) => error,
        };
        let Error::Api(status) = &error else { return Self::Unanswered(Unanswered::of(right, &error)) };
        let message = status.message.clone();
        let quoted = |after: &str| {
            let (_, rest) = message.split_once(after)?;
            rest.strip_prefix('"')?.split_once('"').map(|(name, _)| name.to_owned())
        };
        if let Some(webhook) = quoted(NOT_CALLED) {
            Self::NotCalled { webhook, message }
        } else if let Some(webhook) = quoted(DENIED) {
            Self::Denied { webhook, message }
        } else if message.contains(NO_RIGHT) {
            Self::Unanswered(Unanswered::Forbidden { right: right.to_owned() })
        } else {
            Self::Refused { message }
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn the_message_says_who_refused() {
        let right = "create pods in namespace ops";
        let of = |message: &str| DryRun::of(right, Err(Error::Api(Status::failure(message, "Any").boxed())));
        let denied = "admission webhook \"validate.example.com\" denied the request: spec: no";
        let webhook = "validate.example.com".to_owned();
        assert_eq!(of(denied), DryRun::Denied { webhook: webhook.clone(), message: denied.to_owned() });
        let away = "Internal error occurred: failed calling webhook \"validate.example.com\": failed to call webhook: \
            Post \"https://m.ns.svc:443/validate?timeout=10s\": context deadline exceeded";
        assert_eq!(of(away), DryRun::NotCalled { webhook, message: away.to_owned() });
        let none = "pods is forbidden: User \"jo\" cannot create resource \"pods\" in API group \"\"";
        let forbidden = Unanswered::Forbidden { right: right.to_owned() };
        assert_eq!(of(none), DryRun::Unanswered(forbidden));
        let quota = "pods \"x\" is forbidden: exceeded quota: all";
        assert_eq!(of(quota), DryRun::Refused { message: quota.to_owned() });
    }
}
