//! Who vouches for the manager and for its proxies, and how does everybody come to believe it?

pub mod authority;
pub mod line;
