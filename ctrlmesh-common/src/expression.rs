//! Regular expressions as Go's package `regexp` reads them, in the spelling of Rust's crate `regex`.
//!
//! The predecessors were written in Go, and both languages have RE2's syntax, but not quite the same. What differs is
//! spelled so that Rust reads what Go reads: a `{` that begins no repetition is itself, so is everything between `\Q` and
//! `\E`, a class has neither classes nor operators inside, `\d`, `\s`, `\w` and `\b` are of ASCII, and characters may be in
//! octal. What only Rust reads (`a**`, `(?x)`, `\u0041`, `\p{Alphabetic}`) is refused. Groups lose their names: nobody asks
//! for them, and the rules for names differ.

use std::collections::BTreeSet;

mod classes;

/// How often something may be repeated by number, repetitions inside repetitions multiplied.
const MAX_REPEAT: u32 = 1000;

/// The classes of ASCII that have names.
const POSIX: [&str; 14] = [
    "alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower", "print", "punct",
    "space", "upper", "word", "xdigit",
];

/// Why Go would not read an expression; the position is a number of characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at character {at}: {reason}")]
pub struct ExpressionError {
    /// Where, from 1.
    pub at: usize,
    /// What is wrong there.
    pub reason: &'static str,
}

/// `text`, an expression of Go's, for the crate `regex`.
///
/// What both languages refuse, such as a group that is not closed, may be left to that crate.
///
/// # Errors
/// Where only the crate would accept it.
pub fn from_go(text: &str) -> Result<String, ExpressionError> {
    let mut reader = Reader { text: text.chars().collect(), ..Reader::default() };
    reader.expression().map_err(|reason| ExpressionError { at: reader.at.max(1), reason })?;
    Ok(reader.out)
}

/// What is left to read, and what was written.
#[derive(Default)]
struct Reader {
    text: Vec<char>,
    at: usize,
    out: String,
    /// How often the last item, or what is repeated most in it, is repeated by number.
    last: u32,
    /// The most of that among the items before, in the group that is open.
    most: u32,
    /// The same for the groups around it.
    outer: Vec<u32>,
}

// === impl Reader ===

impl Reader {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.text.get(self.at + ahead).copied()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek(0);
        self.at += usize::from(next.is_some());
        next
    }

    /// Whether `text` comes next, which is then read.
    fn take(&mut self, text: &str) -> bool {
        let there = text.chars().enumerate().all(|(ahead, one)| self.peek(ahead) == Some(one));
        self.at += if there { text.chars().count() } else { 0 };
        there
    }

    fn expression(&mut self) -> Result<(), &'static str> {
        // Whether the last that was written is a repetition: no other may follow.
        let mut repeated = false;
        while let Some(next) = self.next() {
            let repeats = match next {
                '*' | '+' | '?' => Some(next.to_string()),
                '{' => self.count()?,
                _ => None,
            };
            if let Some(operator) = &repeats {
                if repeated {
                    return Err("a repetition cannot be repeated; put the first into (?:…)");
                }
                self.out.push_str(operator);
                if self.take("?") {
                    self.out.push('?');
                }
                repeated = true;
            } else {
                let before = self.out.len();
                self.most = self.most.max(self.last);
                self.last = 1;
                self.item(next)?;
                repeated &= self.out.len() == before;
            }
        }
        Ok(())
    }

    /// What repeats nothing.
    fn item(&mut self, first: char) -> Result<(), &'static str> {
        match first {
            '\\' => return self.escape(),
            '[' => return self.class(),
            '(' => return self.group(),
            ')' => {
                self.last = self.most;
                self.most = self.outer.pop().unwrap_or_default();
                self.out.push(first);
            }
            '{' | '}' | ']' => self.literal(first),
            other => self.out.push(other),
        }
        Ok(())
    }

    /// The rest of `{2}`, `{2,}` or `{2,3}`; none where that is not what comes, and the brace is itself.
    fn count(&mut self) -> Result<Option<String>, &'static str> {
        let rest = &self.text[self.at..];
        let Some(end) = rest.iter().position(|one| *one == '}') else { return Ok(None) };
        let inner: String = rest[..end].iter().collect();
        let (least, most) = inner.split_once(',').unwrap_or((&inner, &inner));
        let is_number = |text: &str| {
            !text.is_empty()
                && text.bytes().all(|one| one.is_ascii_digit())
                && (text.len() == 1 || !text.starts_with('0'))
        };
        if !is_number(least) || !(most.is_empty() || is_number(most)) {
            return Ok(None);
        }
        let number = |text: &str| text.parse().unwrap_or(u32::MAX);
        let bounded = !most.is_empty();
        let (least, most) = (number(least), number(if bounded { most } else { least }));
        let of_all = if bounded && most == 0 { 1 } else { self.last.saturating_mul(most.max(1)) };
        if least.max(most) > MAX_REPEAT || of_all > MAX_REPEAT && least.max(most) > 1 {
            return Err(
                "at most 1000 repetitions are allowed, those of groups inside each other multiplied",
            );
        }
        self.last = of_all;
        self.at += end + 1;
        Ok(Some(format!("{{{inner}}}")))
    }

    fn group(&mut self) -> Result<(), &'static str> {
        if !self.take("?") {
            self.open("(");
        } else if self.take("P<") || self.take("<") {
            let rest = &self.text[self.at..];
            let end = rest.iter().position(|one| *one == '>');
            let name: String = rest[..end.unwrap_or_default()].iter().collect();
            let is_word = |one: char| one == '_' || one.is_ascii_alphanumeric();
            if name.is_empty() || !name.chars().all(is_word) {
                return Err("a group's name is of letters, digits and _, and ends with >");
            }
            self.at += name.len() + 1;
            self.open("(");
        } else {
            return self.flags();
        }
        Ok(())
    }

    /// Begins a group.
    fn open(&mut self, begin: &str) {
        self.out.push_str(begin);
        self.outer.push(self.most);
        (self.most, self.last) = (1, 1);
    }

    /// `i-s:` of a group, or `i-s)`; what is switched on and off is off, and may be named twice.
    fn flags(&mut self) -> Result<(), &'static str> {
        let (mut on, mut off) = (BTreeSet::new(), None::<BTreeSet<char>>);
        while let Some(next) = self.next() {
            match next {
                'i' | 'm' | 's' | 'U' => {
                    off.as_mut().unwrap_or(&mut on).insert(next);
                }
                '-' if off.is_none() => off = Some(BTreeSet::new()),
                ':' | ')' if off.as_ref().is_none_or(|off| !off.is_empty()) => {
                    let off = off.unwrap_or_default();
                    let mut flags: String = on.difference(&off).collect();
                    if !off.is_empty() {
                        flags.push('-');
                        flags.extend(&off);
                    }
                    if next == ':' {
                        self.open(&format!("(?{flags}:"));
                    } else if !flags.is_empty() {
                        self.out.extend(["(?", &flags, ")"]);
                    }
                    return Ok(());
                }
                _ => break,
            }
        }
        Err("no such group; allowed are (?:…), (?P<name>…) and the flags i, m, s and U")
    }

    /// What stands behind a backslash, outside of classes.
    fn escape(&mut self) -> Result<(), &'static str> {
        match self.peek(0) {
            Some('Q') => {
                self.at += 1;
                while self.peek(0).is_some() && !self.take("\\E") {
                    if let Some(next) = self.next() {
                        self.literal(next);
                    }
                }
                Ok(())
            }
            Some(one @ ('A' | 'z')) => {
                self.at += 1;
                self.out.extend(['\\', one]);
                Ok(())
            }
            Some(one @ ('b' | 'B')) => {
                self.at += 1;
                self.out.push_str(if one == 'b' { r"(?-u:\b)" } else { r"(?-u:\B)" });
                Ok(())
            }
            _ if self.named_class()? => Ok(()),
            _ => {
                let one = self.escaped()?;
                self.literal(one);
                Ok(())
            }
        }
    }

    /// `d`, `s`, `w`, `pL`, `p{Greek}` and what is none of these, behind a backslash; whether it is one of them.
    fn named_class(&mut self) -> Result<bool, &'static str> {
        let Some(letter) = self.peek(0) else { return Ok(false) };
        let members = match letter.to_ascii_lowercase() {
            'd' => "0-9",
            's' => r"\t\n\f\r ",
            'w' => "0-9A-Za-z_",
            'p' => {
                self.at += 1;
                return self.unicode_class(letter).map(|()| true);
            }
            _ => return Ok(false),
        };
        self.at += 1;
        let not = if letter.is_ascii_uppercase() { "^" } else { "" };
        self.out.extend(["[", not, members, "]"]);
        Ok(true)
    }

    /// The name of a class of Unicode's, behind `p` or `P`.
    fn unicode_class(&mut self, letter: char) -> Result<(), &'static str> {
        const UNKNOWN: &str = "there is no such class of Unicode's";
        let first = self.next().ok_or(UNKNOWN)?;
        let name = if first == '{' {
            let rest = &self.text[self.at..];
            let end = rest.iter().position(|one| *one == '}').ok_or(UNKNOWN)?;
            let name = rest[..end].iter().collect();
            self.at += end + 1;
            name
        } else {
            first.to_string()
        };
        let positive = name.strip_prefix('^');
        let other = if letter == 'p' { 'P' } else { 'p' };
        let letter = if positive.is_some() { other } else { letter };
        let name = positive.unwrap_or(&name);
        if !classes::is_known(name) {
            return Err(UNKNOWN);
        }
        self.out.extend(['\\', letter, '{']);
        self.out.extend([name, "}"]);
        Ok(())
    }

    /// The one character that is meant by what stands behind a backslash.
    fn escaped(&mut self) -> Result<char, &'static str> {
        const UNKNOWN: &str = "there is no such escape";
        let first = self.next().ok_or("a backslash at the end")?;
        let octal = |one: Option<char>| one.and_then(|one| one.to_digit(8));
        match first {
            '0'..='7' if first == '0' || octal(self.peek(0)).is_some() => {
                let mut code = first.to_digit(8).unwrap_or_default();
                for _ in 0..2 {
                    let Some(digit) = octal(self.peek(0)) else { break };
                    code = code * 8 + digit;
                    self.at += 1;
                }
                char::from_u32(code).ok_or(UNKNOWN)
            }
            'x' => self.hexadecimal().ok_or("\\x takes two digits, or {…} a character's number"),
            'a' => Ok('\x07'),
            'f' => Ok('\x0c'),
            'n' => Ok('\n'),
            'r' => Ok('\r'),
            't' => Ok('\t'),
            'v' => Ok('\x0b'),
            one if one.is_ascii() && !one.is_ascii_alphanumeric() => Ok(one),
            _ => Err(UNKNOWN),
        }
    }

    fn hexadecimal(&mut self) -> Option<char> {
        let digits: String = if self.take("{") {
            let end = self.text[self.at..].iter().position(|one| *one == '}')?;
            let digits = self.text[self.at..self.at + end].iter().collect();
            self.at += end + 1;
            digits
        } else {
            [self.next()?, self.next()?].iter().collect()
        };
        let all = digits.bytes().all(|one| one.is_ascii_hexdigit());
        all.then(|| u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32)).flatten()
    }

    /// The rest of a class, whose bracket has been read.
    fn class(&mut self) -> Result<(), &'static str> {
        const OPEN: &str = "a class is not closed with ]";
        self.out.push('[');
        if self.take("^") {
            self.out.push('^');
        }
        let mut first = true;
        while first || !self.take("]") {
            first = false;
            if self.posix_class()? {
                continue;
            }
            if self.peek(0) == Some('\\') {
                self.at += 1;
                if self.named_class()? {
                    continue;
                }
                self.at -= 1;
            }
            let from = self.member().ok_or(OPEN)??;
            self.literal(from);
            if self.peek(0) == Some('-') && self.peek(1).is_some_and(|one| one != ']') {
                self.at += 1;
                let to = self.member().ok_or(OPEN)??;
                if to < from {
                    return Err("a range in a class ends before it begins");
                }
                self.out.push('-');
                self.literal(to);
            }
        }
        self.out.push(']');
        Ok(())
    }

    /// A class such as `[:alpha:]`, if one comes next.
    fn posix_class(&mut self) -> Result<bool, &'static str> {
        let rest: String = self.text[self.at..].iter().collect();
        let Some((name, _)) = rest.strip_prefix("[:").and_then(|inner| inner.split_once(":]"))
        else {
            return Ok(false);
        };
        if !POSIX.contains(&name.strip_prefix('^').unwrap_or(name)) {
            return Err("there is no such class between [: and :]");
        }
        self.out.extend(["[:", name, ":]"]);
        self.at += name.len() + 4;
        Ok(true)
    }

    /// One character of a class; none at the end of the text.
    fn member(&mut self) -> Option<Result<char, &'static str>> {
        match self.next()? {
            '\\' => Some(self.escaped()),
            one => Some(Ok(one)),
        }
    }

    /// Writes a character that means itself, wherever it stands.
    fn literal(&mut self, one: char) {
        // `\<` and `\>` would be the ends of words.
        if one.is_ascii_punctuation() && !matches!(one, '<' | '>') {
            self.out.push('\\');
        }
        self.out.push(one);
    }
}

#[cfg(test)]
mod tests;
