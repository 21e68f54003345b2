//! Gives a request another path and query.

use http::Uri;

/// `None` where no request can have this target.
pub(super) fn with_target(uri: &Uri, target: String) -> Option<Uri> {
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(target.try_into().ok()?);
    Uri::from_parts(parts).ok()
}
