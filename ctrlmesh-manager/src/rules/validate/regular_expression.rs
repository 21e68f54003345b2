//! Compiles regular expressions so that they mean what Go's `regexp` reads in them.
//!
//! Go and the crate `regex` share RE2's syntax, but read some constructs differently. Those are refused. Perl's classes
//! and word boundaries become ASCII, as in Go. The crate itself refuses `\Q…\E`, octal numbers, `\C`, `[\d-z]`, and a
//! `{` that begins no repetition.
//!
//! Expressions with repetitions inside each other, of more than 1000 in all, are accepted although Go refuses them:
//! their meaning is plain, and the size limit bounds them.

use std::borrow::Cow;

use regex::{Regex, RegexBuilder};
use regex_syntax::ast::parse::Parser;
use regex_syntax::ast::{
    self, AssertionKind, Ast, ClassPerl, ClassPerlKind, ClassSetBinaryOp, ClassSetItem, ClassUnicode, ClassUnicodeKind,
    ErrorKind, Flag, Flags, FlagsItemKind, GroupKind, HexLiteralKind, Literal, LiteralKind, RepetitionOp, Span,
    Visitor,
};
use thiserror::Error;

mod unicode_names;

/// How much memory a compiled regular expression may take: proxies hold every one.
const MAX_COMPILED_BYTES: usize = 1 << 20;

/// The most repetitions that Go allows.
const MAX_REPEAT: u32 = 1000;

const FLAGS: &str = "only the flags i, m, s and U are allowed";
const GROUP_NAME: &str = "a group's name is of letters, digits and _";
const REPEATED: &str = "a repetition cannot be repeated; put the first into (?:…)";
const COUNT: &str = "a count is {2}, {2,} or {2,3}, of at most 1000; a { that is meant itself is \\{";
const UNICODE_ESCAPE: &str = "a character's number is \\x41 or \\x{e9}";
const BOUNDARY: &str = "\\<, \\> and \\b{…} are not allowed; < and > need no backslash";
const NESTED: &str = "a class has no class inside; a [ that is meant itself is \\[";
const PROPERTY: &str = "\\p{…} names a general category or a script, such as \\pL, \\p{Lu} or \\p{Greek}";
const RANGE: &str = "a range is between two characters; a - that is meant itself is \\-";
const OPERATOR: &str = "a class has no &&, -- or ~~; put a backslash before each sign";

#[derive(Debug, Error)]
pub(super) enum RegularExpressionError {
    #[error("at character {at}: {reason}")]
    Syntax {
        /// From 1.
        at: usize,
        reason: String,
    },
    #[error("{reason}")]
    Compile { reason: String },
}

/// Compiles `text`, with Go's meaning.
///
/// # Errors
/// If it is no expression, is one that Go reads differently, or needs too much memory.
pub(super) fn compile(text: &str) -> Result<Regex, RegularExpressionError> {
    let ast = Parser::new().parse(text).map_err(|error| match error.kind() {
        ErrorKind::ClassRangeLiteral => syntax(text, error.span(), RANGE),
        kind => syntax(text, error.span(), &kind.to_string()),
    })?;
    let text = ast::visit(&ast, Differences { text, replaced: Vec::new() })?;
    let built = RegexBuilder::new(&text).size_limit(MAX_COMPILED_BYTES).build();
    built.map_err(|error| {
        // The last line says what is wrong; those above draw where.
        let reason = error.to_string().lines().last().unwrap_or_default().to_owned();
        RegularExpressionError::Compile { reason }
    })
}

fn syntax(text: &str, span: &Span, reason: &str) -> RegularExpressionError {
    let at = text.get(..span.start.offset).map_or(0, |before| before.chars().count()) + 1;
    RegularExpressionError::Syntax { at, reason: reason.to_owned() }
}

/// Refuses what Go reads differently, and replaces what Rust can spell with Go's meaning.
struct Differences<'a> {
    text: &'a str,
    replaced: Vec<(Span, Cow<'static, str>)>,
}

impl Differences<'_> {
    fn refuse(&self, span: &Span, reason: &str) -> Result<(), RegularExpressionError> {
        Err(syntax(self.text, span, reason))
    }

    fn flags(&self, flags: &Flags) -> Result<(), RegularExpressionError> {
        let rust_only = |kind: &FlagsItemKind| {
            matches!(kind, FlagsItemKind::Flag(Flag::IgnoreWhitespace | Flag::Unicode | Flag::CRLF))
        };
        match flags.items.iter().find(|item| rust_only(&item.kind)) {
            Some(item) => self.refuse(&item.span, FLAGS),
            None => Ok(()),
        }
    }

    fn literal(&self, literal: &Literal) -> Result<(), RegularExpressionError> {
        match literal.kind {
            LiteralKind::HexFixed(HexLiteralKind::X) | LiteralKind::HexBrace(HexLiteralKind::X) => Ok(()),
            LiteralKind::HexFixed(_) | LiteralKind::HexBrace(_) => self.refuse(&literal.span, UNICODE_ESCAPE),
            _ => Ok(()),
        }
    }

    /// Rust reads `{02}` and `{ 2 }` as counts, Go as text.
    fn count(&self, op: &RepetitionOp) -> Result<(), RegularExpressionError> {
        let written = &self.text[op.span.start.offset..op.span.end.offset];
        let Some(counts) = written.strip_prefix('{') else { return Ok(()) };
        let counts = counts.trim_end_matches('?').trim_end_matches('}');
        let plain = |count: &str| {
            let number = count.parse::<u32>();
            number.is_ok_and(|number| number <= MAX_REPEAT && number.to_string() == count)
        };
        let (least, most) = counts.split_once(',').unwrap_or((counts, ""));
        if plain(least) && (most.is_empty() || plain(most)) {
            return Ok(());
        }
        self.refuse(&op.span, COUNT)
    }

    fn perl_class(&mut self, class: &ClassPerl) {
        let ascii = match (&class.kind, class.negated) {
            (ClassPerlKind::Digit, false) => "[0-9]",
            (ClassPerlKind::Digit, true) => "[^0-9]",
            (ClassPerlKind::Space, false) => r"[\t\n\f\r ]",
            (ClassPerlKind::Space, true) => r"[^\t\n\f\r ]",
            (ClassPerlKind::Word, false) => "[0-9A-Za-z_]",
            (ClassPerlKind::Word, true) => "[^0-9A-Za-z_]",
        };
        self.replaced.push((class.span, ascii.into()));
    }

    fn unicode_class(&mut self, class: &ClassUnicode) -> Result<(), RegularExpressionError> {
        let name = match &class.kind {
            ClassUnicodeKind::OneLetter(letter) => letter.to_string(),
            ClassUnicodeKind::Named(name) => name.clone(),
            ClassUnicodeKind::NamedValue { .. } => return self.refuse(&class.span, PROPERTY),
        };
        let (name, negated) = match name.strip_prefix('^') {
            Some(name) => (name, !class.negated),
            None => (name.as_str(), class.negated),
        };
        let Some(query) = unicode_names::query(name) else { return self.refuse(&class.span, PROPERTY) };
        let letter = if negated { 'P' } else { 'p' };
        self.replaced.push((class.span, format!(r"\{letter}{{{query}}}").into()));
        Ok(())
    }

    fn assertion(&mut self, assertion: &ast::Assertion) -> Result<(), RegularExpressionError> {
        match assertion.kind {
            AssertionKind::WordBoundary => self.replaced.push((assertion.span, r"(?-u:\b)".into())),
            AssertionKind::NotWordBoundary => self.replaced.push((assertion.span, r"(?-u:\B)".into())),
            AssertionKind::StartLine | AssertionKind::EndLine | AssertionKind::StartText | AssertionKind::EndText => {}
            _ => return self.refuse(&assertion.span, BOUNDARY),
        }
        Ok(())
    }
}

impl Visitor for Differences<'_> {
    type Output = String;
    type Err = RegularExpressionError;

    fn finish(mut self) -> Result<String, RegularExpressionError> {
        let mut text = self.text.to_owned();
        self.replaced.sort_by_key(|(span, _)| span.start.offset);
        for (span, replacement) in self.replaced.iter().rev() {
            text.replace_range(span.start.offset..span.end.offset, replacement);
        }
        Ok(text)
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), RegularExpressionError> {
        match ast {
            Ast::Flags(set) => self.flags(&set.flags),
            Ast::Literal(literal) => self.literal(literal),
            Ast::Assertion(assertion) => self.assertion(assertion),
            Ast::ClassPerl(class) => {
                self.perl_class(class);
                Ok(())
            }
            Ast::ClassUnicode(class) => self.unicode_class(class),
            Ast::Repetition(outer) if matches!(*outer.ast, Ast::Repetition(_)) => self.refuse(&outer.op.span, REPEATED),
            Ast::Repetition(repetition) => self.count(&repetition.op),
            Ast::Group(group) => match &group.kind {
                GroupKind::NonCapturing(flags) => self.flags(flags),
                GroupKind::CaptureName { name, .. }
                    if !name.name.chars().all(|one| one == '_' || one.is_ascii_alphanumeric()) =>
                {
                    self.refuse(&name.span, GROUP_NAME)
                }
                GroupKind::CaptureName { .. } | GroupKind::CaptureIndex(_) => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn visit_class_set_item_pre(&mut self, item: &ClassSetItem) -> Result<(), RegularExpressionError> {
        match item {
            ClassSetItem::Literal(literal) => self.literal(literal),
            ClassSetItem::Range(range) => {
                self.literal(&range.start)?;
                self.literal(&range.end)
            }
            ClassSetItem::Perl(class) => {
                self.perl_class(class);
                Ok(())
            }
            ClassSetItem::Unicode(class) => self.unicode_class(class),
            ClassSetItem::Bracketed(nested) => self.refuse(&nested.span, NESTED),
            _ => Ok(()),
        }
    }

    fn visit_class_set_binary_op_pre(&mut self, operation: &ClassSetBinaryOp) -> Result<(), RegularExpressionError> {
        self.refuse(&operation.span, OPERATOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constructs_that_go_reads_differently_are_refused() {
        let cases = [
            ("ab**", "at character 4: a repetition cannot be repeated"),
            ("a{2}{3}", "at character 5: a repetition cannot be repeated"),
            ("a???", "at character 4: a repetition cannot be repeated"),
            ("a{02}", "at character 2: a count is"),
            ("a{ 2 }", "at character 2: a count is"),
            ("a{1001}", "at character 2: a count is"),
            ("(?x)a b", "at character 3: only the flags"),
            ("(?-u:a)", "at character 4: only the flags"),
            ("(?R)a", "at character 3: only the flags"),
            ("(?P<a.b>c)", "at character 5: a group's name"),
            (r"\u0041", "at character 1: a character's number"),
            (r"[a-\u{e9}]", "at character 4: a character's number"),
            (r"é\<a\>", "at character 2: \\<, \\> and \\b{…}"),
            (r"\b{start}a", "at character 1: \\<, \\> and \\b{…}"),
            ("[[a]b]", "at character 2: a class has no class inside"),
            ("[a&&b]", "at character 2: a class has no &&"),
            ("[a~~b]", "at character 2: a class has no &&"),
            ("[+--]", "at character 2: a class has no &&"),
            (r"[\d-z]", "at character 2: a range is between two characters"),
            (r"\p{Alphabetic}", "at character 1: \\p{…} names"),
            (r"a[\p{sc=Greek}]", "at character 3: \\p{…} names"),
            (r"\p{Letter}", "at character 1: \\p{…} names"),
            (r"\p{greek}", "at character 1: \\p{…} names"),
            (r"\p{Grek}", "at character 1: \\p{…} names"),
            (r"\p{Cn}", "at character 1: \\p{…} names"),
            (r"\p{^}", "at character 1: \\p{…} names"),
        ];
        for (expression, expected) in cases {
            let error = compile(expression).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{expression}: {error}");
        }
    }

    #[test]
    fn constructs_that_the_crate_does_not_know_are_refused() {
        let unknown = [
            r"\Qa.b\E",
            r"\101",
            r"\0",
            r"\1",
            r"\C",
            r"\Z",
            "a{,2}",
            "/{id}",
            "{",
            "[a--z",
            "a|*",
            "(a",
            r"a\",
            "[[:foo:]]",
            r"\p{}",
        ];
        for expression in unknown {
            assert!(compile(expression).is_err(), "{expression}");
        }
    }

    #[test]
    fn accepted_expressions_mean_the_same_as_in_go() {
        let texts = ["a", "A", "é", "٣", "3", " ", "\u{a0}", "x{1}", "-", "]", "aa", "λ"];
        let cases: [(&str, &[&str]); 21] = [
            (r"\d", &["3"]),
            (r"\D", &["a", "A", "é", "٣", " ", "\u{a0}", "-", "]", "λ"]),
            (r"\w+", &["a", "A", "3", "aa"]),
            (r"[\w]+", &["a", "A", "3", "aa"]),
            (r"[^\W]", &["a", "A", "3"]),
            (r"\s", &[" "]),
            (r"\bé", &[]),
            (r"\Bé", &["é"]),
            (r"(?i:A)", &["a", "A"]),
            (r"(?<n>a)(?P<m>a)", &["aa"]),
            (r"x\{1}", &["x{1}"]),
            (r"[]-]", &["-", "]"]),
            (r"\x{e9}|\x41", &["A", "é"]),
            (r"a{2}?", &["aa"]),
            (r"[[:alpha:]]\pL?", &["a", "A", "aa"]),
            (r"\p{Greek}", &["λ"]),
            (r"[\p{Greek}-]", &["-", "λ"]),
            (r"\P{^Lu}", &["A"]),
            (r"[^\P{Nd}]", &["٣", "3"]),
            (r"\PL", &["٣", "3", " ", "\u{a0}", "-", "]"]),
            (r"[^\p{^Latin}]+", &["a", "A", "é", "aa"]),
        ];
        for (expression, expected) in cases {
            compile(expression).unwrap();
            let whole = compile(&format!(r"\A(?:{expression})\z")).unwrap();
            let matched: Vec<&str> = texts.into_iter().filter(|text| whole.is_match(text)).collect();
            assert_eq!(matched, expected, "{expression}");
        }
    }

    #[test]
    fn an_expression_that_compiles_to_too_much_is_refused() {
        let error = compile("(a{1000}){1000}").unwrap_err().to_string();
        assert!(error.contains("size limit"), "{error}");
    }
}
