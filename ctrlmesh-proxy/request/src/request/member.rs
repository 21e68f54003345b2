//! Reads a request to a member cluster behind a path of the API server as the member reads it.

use ctrlmesh_common::member_path::{self, Ambiguous, PathTemplate};
use ctrlmesh_common::resource::MemberKey;

use super::{RequestInfo, TargetError};

/// A member cluster to which a path leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The path that leads to it, without its escapes.
    path: String,
    name: String,
    /// How many bytes of the raw path lead to it.
    prefix: usize,
}

impl Member {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn key(&self) -> MemberKey<'_> {
        MemberKey { path: &self.path, name: &self.name }
    }
}

impl<'a> RequestInfo<'a> {
    /// The request as the member cluster reads it to which the path leads; as it is, where it leads to none.
    ///
    /// # Errors
    /// Where it cannot be told whether the path leads to a member, or the member answers 400 because of what is behind.
    pub fn behind(self, templates: &[PathTemplate]) -> Result<Self, TargetError> {
        let found = member_path::find(templates, &self.path).map_err(|Ambiguous| TargetError::AmbiguousMember)?;
        let Some(found) = found else { return Ok(self) };
        let mut slashes = self.raw_path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        // Before each segment stands a slash.
        let prefix = slashes.nth(found.segments).unwrap_or(self.raw_path.len());
        let is_escaped = |three: &[u8]| three.eq_ignore_ascii_case(b"%2f");
        if self.raw_path[..prefix].windows(3).any(is_escaped) {
            return Err(TargetError::AmbiguousMember);
        }
        let path = self.path.split('/').take(found.segments + 1).collect::<Vec<_>>().join("/");
        let member = Member { path, name: found.cluster.to_owned(), prefix };
        self.led_to(Box::new(member))
    }

    /// The request as a member cluster reads it to which its path is known to lead.
    ///
    /// # Errors
    /// Where the member answers 400 because of what is behind.
    pub fn at(self, member: Option<&Member>) -> Result<Self, TargetError> {
        match member {
            Some(member) => self.led_to(Box::new(member.clone())),
            None => Ok(self),
        }
    }

    fn led_to(self, member: Box<Member>) -> Result<Self, TargetError> {
        let raw_path = self.raw_path;
        let behind = raw_path.get(member.prefix..).ok_or(TargetError::AmbiguousMember)?;
        let info = Self::of(self.method, behind, self.query, self.origin_form)?;
        Ok(Self { member: Some(member), raw_path, ..info })
    }

    /// Whether the path leads where it was read to lead, by these templates, too.
    pub fn leads_alike(&self, templates: &[PathTemplate]) -> bool {
        if templates.is_empty() {
            return self.member.is_none();
        }
        let prefix = self.member().map_or("", |member| &member.path);
        let path = format!("{prefix}{}", self.path);
        let read = self.member().map(|member| (&*member.name, member.path.matches('/').count()));
        member_path::find(templates, &path).is_ok_and(|found| found.map(|to| (to.cluster, to.segments)) == read)
    }

    /// The member cluster to which the path leads; `None` for the API server itself.
    pub fn member(&self) -> Option<&Member> {
        self.member.as_deref()
    }

    /// The member's name.
    pub fn cluster(&self) -> Option<&str> {
        self.member().map(Member::name)
    }

    /// What stands in the target before [`RequestInfo::raw_path`]: the path that leads to the member.
    pub fn prefix(&self) -> &'a [u8] {
        self.raw_path.get(..self.member().map_or(0, |member| member.prefix)).unwrap_or_default()
    }
}
