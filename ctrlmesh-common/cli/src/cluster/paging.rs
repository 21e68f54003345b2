//! Lists objects in pages, so that neither the API server nor the client holds all of them in one answer.

use std::fmt::Debug;

use kube::api::{ListParams, ObjectMeta};
use kube::core::ListMeta;
use kube::{Api, Error};
use serde::de::DeserializeOwned;

/// Objects in one answer. kubectl asks for as many.
pub(crate) const PAGE: u32 = 500;

/// The requests of one list.
struct Pages {
    /// `None`: the last page was read.
    next: Option<ListParams>,
}

impl Pages {
    fn of(params: ListParams) -> Self {
        Self { next: Some(params.limit(PAGE)) }
    }

    /// Goes on behind an answer with this metadata.
    fn after(&mut self, metadata: &ListMeta) {
        let token = metadata.continue_.as_deref().filter(|token| !token.is_empty());
        self.next = self.next.take().zip(token).map(|(params, token)| params.continue_token(token));
    }
}

/// Lists the objects of `api`.
///
/// # Errors
/// The API server does not list them, or not to the end.
pub(crate) async fn list<K>(api: &Api<K>, params: ListParams) -> Result<Vec<K>, Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    let (mut pages, mut all) = (Pages::of(params), Vec::new());
    while let Some(page) = &pages.next {
        let answer = api.list(page).await?;
        pages.after(&answer.metadata);
        all.extend(answer.items);
    }
    Ok(all)
}

/// Calls `each` with the metadata of every object of `api`. It keeps one page at a time.
///
/// # Errors
/// The API server does not list them, or not to the end.
pub(crate) async fn each_metadata<K>(
    api: &Api<K>,
    params: ListParams,
    mut each: impl FnMut(&ObjectMeta),
) -> Result<(), Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    let mut pages = Pages::of(params);
    while let Some(page) = &pages.next {
        let answer = api.list_metadata(page).await?;
        pages.after(&answer.metadata);
        answer.items.iter().for_each(|object| each(&object.metadata));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(token: Option<&str>) -> ListMeta {
        ListMeta { continue_: token.map(str::to_owned), ..ListMeta::default() }
    }

    #[test]
    fn pages_follow_each_other_until_no_token_comes() {
        for last in [None, Some("")] {
            let mut pages = Pages::of(ListParams::default().labels("a=b"));
            let first = pages.next.clone().unwrap();
            assert_eq!((first.limit, first.continue_token), (Some(PAGE), None));
            pages.after(&metadata(Some("more")));
            let second = pages.next.clone().unwrap();
            let label = second.label_selector.as_deref();
            assert_eq!(
                (second.limit, second.continue_token.as_deref(), label),
                (Some(PAGE), Some("more"), Some("a=b"))
            );
            pages.after(&metadata(last));
            assert!(pages.next.is_none());
        }
    }
}
