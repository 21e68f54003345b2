//! Which authorities follow each other, and when?
//!
//! Pure. Whoever must believe an authority is told of it long before it signs anything, and goes on being told of the
//! one before for as long as something that it signed could be shown: `next` is believed and signs nothing, `current`
//! signs, `previous` are believed until they end. Programs read their certificate authorities once, at their start, so
//! an ordinary change leaves them a quarter of an authority's life for that.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;

use crate::certs::authority::{self, Authority, AuthorityError, Names};

/// How long a new authority is only believed, where the current one may not speak for all that there is now: volumes
/// follow their ConfigMap in two minutes, and what has to be restarted can be.
const URGENT: Duration = Duration::from_hours(24);

/// Whom an authority speaks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The API server, to operators.
    Mesh,
    /// The manager, to proxies and to the API server.
    Manager,
}

/// An authority, the one before and the one after.
#[derive(Clone, Debug)]
pub struct Line {
    /// Signs, and is believed.
    pub current: Authority,
    /// Is believed, and will sign.
    pub next: Option<Authority>,
    /// Are believed until they end. PEM, one certificate each.
    pub previous: Vec<String>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// A next authority is to be made.
    Prepare,
    /// The next one is to sign.
    Promote,
    /// One that has ended is to go.
    Forget,
}

/// The data of a Secret.
pub type Data = BTreeMap<String, ByteString>;

/// A Secret that holds no authority.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// A key is missing.
    #[error("{key:?} is missing")]
    Missing {
        /// Which.
        key: String,
    },
    /// What is there is none.
    #[error("read {key:?}")]
    Authority {
        /// Which.
        key: String,
        /// Why.
        #[source]
        source: AuthorityError,
    },
}

// === impl Kind ===

impl Kind {
    /// How its certificates call it.
    pub fn called(self) -> &'static str {
        match self {
            Self::Mesh => "ctrlmesh mesh CA",
            Self::Manager => "ctrlmesh manager CA",
        }
    }

    fn key(self, rest: &str) -> String {
        match self {
            Self::Mesh => format!("mesh{rest}"),
            Self::Manager => format!("manager{rest}"),
        }
    }
}

// === impl Line ===

impl Line {
    /// The first of its line.
    ///
    /// # Errors
    /// Where one of the names cannot be in a certificate.
    pub fn begin(
        kind: Kind,
        names: &Names,
        validity: Duration,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        let current = Authority::make(kind.called(), names, validity, now)?;
        Ok(Self { current, next: None, previous: Vec::new() })
    }

    /// What is to be done, now that `names` must be spoken for.
    pub fn due(&self, names: &Names, now: SystemTime) -> Option<Due> {
        let (begin, end) = self.current.validity();
        let life = end.duration_since(begin).unwrap_or_default();
        let covers = self.current.names().cover(names);
        let next = self.next.as_ref().filter(|next| covers || next.names().cover(names));
        if let Some(next) = next {
            let wait = if covers { life / 4 } else { URGENT.min(life / 4) };
            let last_call = now + life / 8 >= end;
            if last_call || now >= next.validity().0 + wait {
                return Some(Due::Promote);
            }
        } else if !covers || now >= begin + life / 2 {
            return Some(Due::Prepare);
        }
        self.previous.iter().any(|pem| ended(pem, now)).then_some(Due::Forget)
    }

    /// Does what is due.
    ///
    /// # Errors
    /// Where one of the names cannot be in a certificate.
    pub fn step(
        mut self,
        due: Due,
        kind: Kind,
        names: &Names,
        validity: Duration,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        match due {
            Due::Prepare => {
                self.next = Some(Authority::make(kind.called(), names, validity, now)?);
            }
            Due::Promote => {
                if let Some(next) = self.next.take() {
                    self.previous.push(self.current.pem().to_owned());
                    self.current = next;
                }
            }
            Due::Forget => self.previous.retain(|pem| !ended(pem, now)),
        }
        Ok(self)
    }

    /// Whom to believe, in PEM.
    pub fn bundle(&self) -> String {
        let next = self.next.iter().map(Authority::pem);
        let all = [self.current.pem()].into_iter().chain(next);
        all.chain(self.previous.iter().map(String::as_str))
            .flat_map(|pem| [pem.trim_end(), "\n"])
            .collect()
    }

    /// Reads a line from the data of a Secret.
    ///
    /// # Errors
    /// Where something is missing there, or none of ours.
    pub fn read(kind: Kind, data: &Data) -> Result<Self, LineError> {
        let text = |rest: &str| {
            let bytes = data.get(&kind.key(rest))?;
            Some(String::from_utf8_lossy(&bytes.0).into_owned())
        };
        let authority = |certificate: &str, key: &str| {
            let key = text(key).ok_or_else(|| LineError::Missing { key: kind.key(key) })?;
            let pem = text(certificate)
                .ok_or_else(|| LineError::Missing { key: kind.key(certificate) })?;
            Authority::read(pem, key)
                .map_err(|source| LineError::Authority { key: kind.key(certificate), source })
        };
        let next = data.contains_key(&kind.key("-next.crt"));
        Ok(Self {
            current: authority(".crt", ".key")?,
            next: next.then(|| authority("-next.crt", "-next.key")).transpose()?,
            previous: text("-previous.crt").map(|text| certificates(&text)).unwrap_or_default(),
        })
    }

    /// Writes it into the data of a Secret.
    pub fn write(&self, kind: Kind, data: &mut Data) {
        let mut put = |rest: &str, text: Option<&str>| match text {
            Some(text) => {
                drop(data.insert(kind.key(rest), ByteString(text.as_bytes().to_vec())));
            }
            None => drop(data.remove(&kind.key(rest))),
        };
        put(".crt", Some(self.current.pem()));
        put(".key", Some(self.current.key()));
        put("-next.crt", self.next.as_ref().map(Authority::pem));
        put("-next.key", self.next.as_ref().map(Authority::key));
        let previous = self.previous.concat();
        put("-previous.crt", (!previous.is_empty()).then_some(&previous));
    }
}

/// Whether the certificate has ended; one that cannot be read has.
fn ended(pem: &str, now: SystemTime) -> bool {
    authority::end_of(pem.as_bytes()).is_none_or(|end| end <= now)
}

/// The certificates of a bundle, one by one.
fn certificates(bundle: &str) -> Vec<String> {
    const END: &str = "-----END CERTIFICATE-----";
    let blocks = bundle.split_inclusive(END).filter(|block| block.contains(END));
    blocks.map(|block| format!("{}\n", block.trim())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_hours(24);
    const LIFE: Duration = Duration::from_hours(24 * 400);

    fn names() -> Names {
        Names::of(["kubernetes", "10.96.0.1"])
    }

    fn begin(now: SystemTime) -> Line {
        Line::begin(Kind::Mesh, &names(), LIFE, now).unwrap()
    }

    /// Goes through the days, doing what is due; when, and what, in days since the start.
    fn live(
        line: &mut Line,
        names: &Names,
        start: SystemTime,
        days: std::ops::Range<u32>,
    ) -> Vec<(u32, Due)> {
        let mut done = Vec::new();
        for day in days {
            let now = start + DAY * day;
            while let Some(due) = line.due(names, now) {
                *line = line.clone().step(due, Kind::Mesh, names, LIFE, now).unwrap();
                done.push((day, due));
                assert!(done.len() < 100, "{done:?}");
            }
            assert!(line.current.validity().1 > now, "signs on day {day} with what has ended");
        }
        done
    }

    #[test]
    fn authorities_overlap_for_ever() {
        let start = SystemTime::now();
        let mut line = begin(start);
        let done = live(&mut line, &names(), start, 0..1000);
        let expected = [
            (200, Due::Prepare),
            (300, Due::Promote),
            (400, Due::Forget),
            (400, Due::Prepare),
            (500, Due::Promote),
        ];
        let near = |(at, due): &(u32, Due), (day, what): &(u32, Due)| {
            at.abs_diff(*day) <= 1 && due == what
        };
        assert!(done.len() > 8, "{done:?}");
        for one in &expected {
            assert!(done.iter().any(|step| near(step, one)), "{one:?} in {done:?}");
        }
    }

    #[test]
    fn a_new_address_is_spoken_for_after_a_day_and_the_old_authority_is_believed_on() {
        let start = SystemTime::now();
        let mut line = begin(start);
        let old = line.current.pem().to_owned();
        let more = Names::of(["kubernetes", "10.96.0.1", "192.0.2.1"]);
        let done = live(&mut line, &more, start, 0..10);
        assert_eq!(done, [(0, Due::Prepare), (1, Due::Promote)]);
        assert!(line.current.names().cover(&more));
        assert!(line.bundle().contains(old.trim()));
        assert_eq!(live(&mut line, &names(), start, 10..20), [], "an address less changes nothing");
    }

    #[test]
    fn one_that_is_late_is_promoted_before_the_old_one_ends() {
        let start = SystemTime::now();
        let mut line = begin(start);
        let late = start + LIFE - DAY;
        line = line.step(Due::Prepare, Kind::Mesh, &names(), LIFE, late).unwrap();
        assert_eq!(line.due(&names(), late), Some(Due::Promote));
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let start = SystemTime::now();
        let mut line = begin(start);
        let mut data = Data::new();
        for due in [Due::Prepare, Due::Promote, Due::Prepare, Due::Promote, Due::Prepare] {
            line = line.step(due, Kind::Mesh, &names(), LIFE, start).unwrap();
            line.write(Kind::Mesh, &mut data);
            let read = Line::read(Kind::Mesh, &data).unwrap();
            assert_eq!(read.bundle(), line.bundle());
            assert_eq!(read.current.key(), line.current.key());
        }
        assert_eq!(line.bundle().matches("BEGIN").count(), 4);
        let error = Line::read(Kind::Manager, &data).unwrap_err();
        assert!(matches!(error, LineError::Missing { key } if key == "manager.key"));
    }
}
