//! Something that many hold, and that is copied only where one of them changes it.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// It is compared by its address first: in a large cluster, most of what one moment has is what the last one had.
#[derive(Debug, Default)]
pub struct Shared<T>(Arc<T>);

/// What they hold.
pub fn each<T>(all: &[Shared<T>]) -> impl DoubleEndedIterator<Item = &T> + Clone {
    all.iter().map(|one| &**one)
}

impl<T: Clone> Shared<T> {
    /// What is held; a copy of it, where others hold it, too.
    pub fn into_inner(self) -> T {
        Arc::unwrap_or_clone(self.0)
    }
}

impl<T> From<T> for Shared<T> {
    fn from(value: T) -> Self {
        Self(Arc::new(value))
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: PartialEq> PartialEq for Shared<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Clone> DerefMut for Shared<T> {
    fn deref_mut(&mut self) -> &mut T {
        Arc::make_mut(&mut self.0)
    }
}

/// Copies of all.
#[cfg(test)]
pub(crate) fn shared<T: Clone>(all: &[T]) -> Vec<Shared<T>> {
    all.iter().cloned().map(Shared::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_changes_it_has_a_copy_of_his_own() {
        let one = Shared::from(vec![1]);
        let mut other = one.clone();
        assert_eq!(one, other);
        other.push(2);
        assert_eq!((&*one, &*other), (&vec![1], &vec![1, 2]));
        other.pop();
        assert_eq!(one, other, "not the same one, but equal");
    }
}
