//! The times at which a fault is done.

use ctrlmesh_common::policy::fault::Times;
use jiff::civil::Date;
use jiff::{ToSpan as _, Zoned};

/// Whether `now`, in the zone of `times`, is one of them.
pub(super) fn hold(times: &Times, now: &Zoned) -> bool {
    let (date, time) = (now.date(), now.time());
    let second = [time.hour(), time.minute(), time.second()].into_iter();
    let second = second.fold(0, |seconds, part| seconds * 60 + u32::from(part.unsigned_abs()));
    let (from, until) = (times.from.unwrap_or_default(), times.until.unwrap_or(u32::MAX));
    if from <= until {
        return (from..until).contains(&second) && is_day(times, date);
    }
    // Over midnight: the day is the one on which it began.
    let yesterday = || date.checked_sub(1.day()).is_ok_and(|date| is_day(times, date));
    second >= from && is_day(times, date) || second < until && yesterday()
}

fn is_day(times: &Times, date: Date) -> bool {
    let lists =
        |list: &[u8], number: i8| list.is_empty() || list.iter().any(|one| i16::from(*one) == i16::from(number));
    lists(&times.weekdays, date.weekday().to_sunday_zero_offset())
        && lists(&times.days, date.day())
        && lists(&times.months, date.month())
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use jiff::tz::TimeZone;

    use super::*;

    fn holds(times: &Times, now: &str) -> bool {
        let zone = TimeZone::get(&times.zone).unwrap();
        hold(times, &now.parse::<Timestamp>().unwrap().to_zoned(zone))
    }

    fn times(from: u32, until: u32) -> Times {
        Times { zone: "UTC".to_owned(), from: Some(from * 3600), until: Some(until * 3600), ..Times::default() }
    }

    #[test]
    fn a_time_of_the_day_holds_from_its_start_to_before_its_end() {
        let times = times(9, 17);
        for (now, expected) in [("08:59:59", false), ("09:00:00", true), ("16:59:59", true), ("17:00:00", false)] {
            assert_eq!(holds(&times, &format!("2026-11-26T{now}Z")), expected, "{now}");
        }
        let open = Times { zone: "UTC".to_owned(), from: Some(3600), ..Times::default() };
        assert!(holds(&open, "2026-11-26T23:59:59Z") && !holds(&open, "2026-11-26T00:59:59Z"));
    }

    #[test]
    fn a_night_belongs_to_the_day_on_which_it_begins() {
        // The 27th is a Friday.
        let friday_nights = Times { weekdays: vec![5], ..times(22, 6) };
        for (now, expected) in [
            ("2026-11-27T05:00:00Z", false),
            ("2026-11-27T21:59:59Z", false),
            ("2026-11-27T22:00:00Z", true),
            ("2026-11-28T05:59:59Z", true),
            ("2026-11-28T06:00:00Z", false),
            ("2026-11-28T23:00:00Z", false),
        ] {
            assert_eq!(holds(&friday_nights, now), expected, "{now}");
        }
        let new_year = Times { days: vec![31], months: vec![12], ..times(22, 6) };
        assert!(holds(&new_year, "2027-01-01T05:00:00Z") && !holds(&new_year, "2026-12-31T05:00:00Z"));
    }

    #[test]
    fn times_are_those_of_their_zone_also_in_summer() {
        let berlin = Times { zone: "Europe/Berlin".to_owned(), weekdays: vec![4], ..times(8, 9) };
        // Winter is one hour ahead of UTC, summer two.
        assert!(holds(&berlin, "2026-11-26T07:30:00Z") && !holds(&berlin, "2026-11-26T08:30:00Z"));
        assert!(holds(&berlin, "2026-07-23T06:30:00Z") && !holds(&berlin, "2026-07-23T07:30:00Z"));
        let sydney = Times { zone: "Australia/Sydney".to_owned(), ..berlin };
        // There it is Thursday already.
        assert!(holds(&sydney, "2026-11-25T21:30:00Z"));
    }

    #[test]
    fn days_and_months_must_all_agree() {
        let times = Times {
            zone: "UTC".to_owned(),
            weekdays: vec![0, 4],
            days: vec![26],
            months: vec![11, 12],
            ..Times::default()
        };
        for (now, expected) in
            [("2026-11-26", true), ("2026-12-26", false), ("2026-11-25", false), ("2026-10-26", false)]
        {
            assert_eq!(holds(&times, &format!("{now}T12:00:00Z")), expected, "{now}");
        }
    }
}
