//! The segments of a path, and where they stand in it.

use std::ops::Range;

/// A part of a path, in few bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    start: u32,
    end: u32,
}

/// The segments of a path, as ranges of it, without the slashes at its ends.
#[derive(Clone, Debug)]
pub(super) struct Segments<'p> {
    path: &'p str,
    rest: Option<Range<usize>>,
}

impl Span {
    pub(super) fn range(self) -> Range<usize> {
        let number = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        number(self.start)..number(self.end)
    }

    pub(super) fn of(self, path: &str) -> &str {
        &path[self.range()]
    }

    pub(super) fn is_empty(self) -> bool {
        self.start == self.end
    }
}

impl From<Range<usize>> for Span {
    /// The path of a request is shorter than 4 GiB.
    fn from(range: Range<usize>) -> Self {
        let [start, end] = [range.start, range.end].map(|number| u32::try_from(number).unwrap_or(u32::MAX));
        Self { start, end }
    }
}

impl<'p> Segments<'p> {
    pub(super) fn new(path: &'p str) -> Self {
        let start = path.len() - path.trim_start_matches('/').len();
        let end = start + path[start..].trim_end_matches('/').len();
        Self { path, rest: (start < end).then_some(start..end) }
    }

    /// How many segments are left.
    pub(super) fn count(&self) -> usize {
        self.rest.clone().map_or(0, |rest| self.path[rest].split('/').count())
    }

    /// The next segment; empty where none is left.
    pub(super) fn peek(&self) -> Range<usize> {
        let Some(rest) = self.rest.clone() else {
            return 0..0;
        };
        let end = self.path[rest.clone()].find('/').map_or(rest.end, |length| rest.start + length);
        rest.start..end
    }

    /// Takes the next segment; empty where none is left.
    pub(super) fn next(&mut self) -> Range<usize> {
        let segment = self.peek();
        self.rest = self.rest.take().filter(|rest| segment.end < rest.end).map(|rest| segment.end + 1..rest.end);
        segment
    }
}
