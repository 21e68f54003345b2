//! Writes a request's target for people to read, without what may be secret.

/// The parameters whose values are shown. Those of other ones can be secret: tokens, or the command of an exec.
const SHOWN: [&str; 16] = [
    "allowWatchBookmarks",
    "dryRun",
    "fieldManager",
    "fieldSelector",
    "fieldValidation",
    "follow",
    "force",
    "labelSelector",
    "limit",
    "propagationPolicy",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "timeout",
    "timeoutSeconds",
    "watch",
];

/// Of a longer target, the beginning is shown. Selectors of a shard have up to some kilobytes.
const MAX_BYTES: usize = 8 << 10;

/// Stands for what is not shown.
const HIDDEN: &str = "…";

/// The path, and the query without values that may be secret.
pub(super) fn shown(target: &str) -> String {
    let (path, query) = target.split_once('?').unzip();
    let mut text = path.unwrap_or(target).to_owned();
    for (number, pair) in query.iter().flat_map(|query| query.split('&')).enumerate() {
        text.push(if number == 0 { '?' } else { '&' });
        match pair.split_once('=') {
            Some((name, _)) if !SHOWN.contains(&name) => text.extend([name, "=", HIDDEN]),
            None if !SHOWN.contains(&pair) => text.push_str(HIDDEN),
            _ => text.push_str(pair),
        }
    }
    let text = readable(&text);
    if text.len() <= MAX_BYTES {
        return text;
    }
    format!("{}{HIDDEN}", &text[..text.floor_char_boundary(MAX_BYTES)])
}

/// Undoes escapes of printable ASCII, for people to read.
pub fn readable(target: &str) -> String {
    let mut text = String::with_capacity(target.len());
    let mut rest = target;
    while let Some(at) = rest.find('%') {
        text.push_str(&rest[..at]);
        let escape = rest.get(at + 1..at + 3);
        let byte = escape.and_then(|pair| u8::from_str_radix(pair, 16).ok());
        let byte = byte.filter(|byte| byte.is_ascii_graphic() || *byte == b' ');
        text.push(byte.map_or('%', char::from));
        rest = &rest[at + if byte.is_some() { 3 } else { 1 }..];
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_undone_where_they_can_be_read() {
        assert_eq!(readable("/a?b=c%20in%20%28x%29%00%zz%"), "/a?b=c in (x)%00%zz%");
        assert_eq!(readable("/é%2"), "/é%2");
    }

    #[test]
    fn selectors_are_shown_and_what_may_be_secret_is_not() {
        let target = "/api/v1/pods?labelSelector=a%20in%20%28b%29&limit=500&continue=abc&token=s&watch";
        assert_eq!(shown(target), "/api/v1/pods?labelSelector=a in (b)&limit=500&continue=…&token=…&watch");
        assert_eq!(shown("/api/v1/pods/p/exec?command=cat&command=/key"), "/api/v1/pods/p/exec?command=…&command=…");
        assert_eq!(shown("/healthz"), "/healthz");
        assert_eq!(shown("/api/v1/services/s/proxy/x?SECRET&watch"), "/api/v1/services/s/proxy/x?…&watch");
        // The name of a parameter may be escaped, too.
        assert_eq!(shown("/x?labelSelecto%72=a"), "/x?labelSelector=…");
    }

    #[test]
    fn a_long_target_is_cut() {
        let text = shown(&format!("/{}", "é".repeat(MAX_BYTES)));
        assert!(text.ends_with("é…") && text.len() <= MAX_BYTES + HIDDEN.len(), "{}", text.len());
    }
}
