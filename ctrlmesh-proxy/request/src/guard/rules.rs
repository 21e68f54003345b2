//! The rules of one pod, with their states.

use ctrlmesh_common::policy::guard::{Guard, Part};
use serde::{Deserialize, Serialize};

use super::{Breaker, Moment, ProbeId, Refused, Verdict, matches};
use crate::egress::{UrlRequests, Visible};
use crate::request::RequestInfo;

/// The rules of one pod.
#[derive(Clone, Debug, Default)]
pub struct Guards {
    rules: Vec<Rule>,
    /// How many probes there were.
    probes: u64,
    changes: u64,
}

#[derive(Clone, Debug)]
struct Rule {
    guard: Guard,
    urls: UrlRequests,
    breaker: Breaker,
}

/// A request that passes. The indices are those of the guards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admitted {
    /// The rules that the request was charged to.
    pub charged: Vec<usize>,
    /// Where the request is the probe of some breakers; then [`Guards::probe_ended`] must follow.
    pub probe: Option<ProbeId>,
}

/// A breaker that is open, as a file keeps it. Tokens are not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenRule {
    guard: Guard,
    /// `None`: until it is reset.
    until: Option<Moment>,
}

impl Guards {
    /// Begins with the breakers that were open in another process, whose clock may have been another. None is open for
    /// longer than its window from `now` on.
    pub fn restored(open: Vec<OpenRule>, now: Moment) -> Self {
        let rules = open.into_iter().map(|OpenRule { guard, until }| {
            let window = guard.sleeping_window_nanoseconds.unwrap_or(u64::MAX);
            let breaker = Breaker::opened(&guard, until.map(|until| until.min(now.after(window))), now);
            Rule::new(guard, breaker)
        });
        Self { rules: rules.collect(), ..Self::default() }
    }

    /// Takes the guards of another policy. A rule whose own fields did not change keeps its bucket and its state,
    /// unless its reset has a new value. The last value is remembered while there is none.
    pub fn replace(&mut self, guards: &[Guard], now: Moment) {
        let rules = guards.iter().map(|guard| {
            let before = self.rules.iter().find(|rule| rule.guard.is_rule(&guard.breaker, &guard.rule));
            let known = before.filter(|rule| rule.guard.means_the_same(guard));
            let known = known.filter(|rule| guard.reset.is_none() || guard.reset == rule.guard.reset);
            let reset = guard.reset.clone().or_else(|| known.and_then(|rule| rule.guard.reset.clone()));
            let part = newest(before.and_then(|rule| rule.guard.part.as_ref()), guard.part.as_ref());
            let guard = Guard { reset, part: part.cloned(), ..guard.clone() };
            let breaker = known.map(|rule| rule.breaker.clone().with_part_of(&rule.guard, &guard, now));
            let breaker = breaker.unwrap_or_else(|| Breaker::new(&guard, now));
            Rule::new(guard, breaker)
        });
        self.rules = rules.collect();
        self.changes += 1;
    }

    /// Charges a request to the API server to every rule that matches it, if all of them let it pass; else to none.
    ///
    /// # Errors
    /// The refusal with the longest wait, and the index of each rule that refuses.
    pub fn admit(&mut self, request: &RequestInfo<'_>, now: Moment) -> Result<Admitted, (Refused, Vec<usize>)> {
        self.admit_where(|rule| matches(&rule.guard.requests, request), now)
    }

    /// Does the same for a request, or a connection, to another server.
    ///
    /// # Errors
    /// As above.
    pub fn admit_egress(&mut self, visible: &Visible<'_>, now: Moment) -> Result<Admitted, (Refused, Vec<usize>)> {
        self.admit_where(|rule| rule.urls.match_any(visible), now)
    }

    fn admit_where(
        &mut self,
        is_matched: impl Fn(&Rule) -> bool,
        now: Moment,
    ) -> Result<Admitted, (Refused, Vec<usize>)> {
        let matched = self.rules.iter().enumerate().filter(|(_, rule)| is_matched(rule));
        let verdicts: Vec<(usize, Verdict)> =
            matched.map(|(at, rule)| (at, rule.breaker.check(&rule.guard, now))).collect();
        let refusals = verdicts.iter().filter_map(|(at, verdict)| match verdict {
            Verdict::Refuse { cause, retry_at, .. } => Some((*at, *cause, *retry_at)),
            Verdict::Pass | Verdict::Probe => None,
        });
        let rules = &self.rules;
        let longest = refusals.clone().max_by_key(|(at, _, retry_at)| {
            let Guard { breaker, rule, .. } = &rules[*at].guard;
            (retry_at.is_none(), *retry_at, std::cmp::Reverse((breaker, rule)))
        });
        if let Some((at, cause, retry_at)) = longest {
            // Another rule would refuse it all the same.
            let holds = refusals.clone().all(|(at, cause, _)| Refused::new(&rules[at].guard, cause, now, None).holds);
            let refused = Refused { holds, ..Refused::new(&rules[at].guard, cause, now, retry_at) };
            let refusing = refusals.map(|(at, _, _)| at).collect();
            self.refuse(&verdicts, now);
            return Err((refused, refusing));
        }
        Ok(self.pass(&verdicts, now))
    }

    /// Ends a probe: it succeeded, if the API server answered as it answers when it is well.
    pub fn probe_ended(&mut self, probe: ProbeId, succeeded: bool, now: Moment) {
        for Rule { guard, breaker, .. } in &mut self.rules {
            breaker.probe_ended(guard, probe, succeeded, now);
        }
        self.changes += 1;
    }

    /// Gives a probe back that was not sent: another request may be the probe.
    pub fn probe_unsent(&mut self, probe: ProbeId) {
        for Rule { breaker, .. } in &mut self.rules {
            breaker.probe_unsent(probe);
        }
        self.changes += 1;
    }

    /// Grows whenever a rule comes, goes, opens or closes.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Each guard, and whether it is open.
    pub fn states(&self) -> impl Iterator<Item = (&Guard, bool)> {
        self.rules.iter().map(|Rule { guard, breaker, .. }| (guard, breaker.is_open(guard)))
    }

    /// The breakers that have opened by themselves.
    pub fn open(&self) -> Vec<OpenRule> {
        let open = self.rules.iter().filter(|rule| rule.breaker.has_opened());
        open.map(|Rule { guard, breaker, .. }| OpenRule { guard: guard.clone(), until: breaker.until() }).collect()
    }

    fn pass(&mut self, verdicts: &[(usize, Verdict)], now: Moment) -> Admitted {
        let probe = ProbeId(self.probes);
        for (at, verdict) in verdicts {
            let Rule { guard, breaker, .. } = &mut self.rules[*at];
            breaker.pass(guard, *verdict, probe, now);
        }
        let is_probe = verdicts.iter().any(|(_, verdict)| *verdict == Verdict::Probe);
        self.probes += u64::from(is_probe);
        Admitted { charged: verdicts.iter().map(|(at, _)| *at).collect(), probe: is_probe.then_some(probe) }
    }

    fn refuse(&mut self, verdicts: &[(usize, Verdict)], now: Moment) {
        for (at, verdict) in verdicts {
            let Rule { guard, breaker, .. } = &mut self.rules[*at];
            breaker.refuse(guard, *verdict, now);
        }
        self.changes += u64::from(verdicts.iter().any(|(_, verdict)| verdict.opens()));
    }
}

impl Rule {
    fn new(guard: Guard, breaker: Breaker) -> Self {
        Self { urls: UrlRequests::new(&guard.urls), guard, breaker }
    }
}

/// A replica of the manager whose watch lags behind may send an older part, which others have in theirs already.
fn newest<'a>(known: Option<&'a Part>, sent: Option<&'a Part>) -> Option<&'a Part> {
    let known = known.filter(|known| sent.is_some_and(|sent| sent.is_older(known)));
    known.or(sent)
}

#[cfg(test)]
mod tests;
