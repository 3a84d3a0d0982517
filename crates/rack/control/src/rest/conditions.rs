//! Preconditions in headers: `If-Match` and `If-None-Match`, each `*` or a list of tags.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use farpool_api::ProblemKind;
use farpool_http::Refusal;

use crate::model::{Condition, Tags};

/// Returns the preconditions of a request.
///
/// Errors if a header is neither `*` nor a list of tags.
pub(super) fn conditions(headers: &HeaderMap) -> Result<Condition, Refusal> {
    Ok(Condition {
        // A weak tag matches nothing where something is changed (RFC 9110, 13.1.1).
        if_match: tags(headers, &header::IF_MATCH, false)?,
        if_none_match: tags(headers, &header::IF_NONE_MATCH, true)?,
    })
}

fn tags(headers: &HeaderMap, name: &HeaderName, weak: bool) -> Result<Option<Tags>, Refusal> {
    // A header without a value demands nothing.
    let has_value = |line: &&HeaderValue| !line.as_bytes().trim_ascii().is_empty();
    let mut lines = headers.get_all(name).iter().filter(has_value).peekable();
    if lines.peek().is_none() {
        return Ok(None);
    }
    let mut all = Vec::new();
    for line in lines {
        match line.to_str().ok().and_then(|text| parsed(text, weak)) {
            Some(Tags::Any) => return Ok(Some(Tags::Any)),
            Some(Tags::Of(more)) => all.extend(more),
            None => {
                let detail = format!("{name} is neither * nor a list of tags such as \"1\", \"2\"");
                return Err(Refusal::new(ProblemKind::BadRequest, detail));
            }
        }
    }
    Ok(Some(Tags::Of(all)))
}

/// Returns what a header's value names. None if it is not of that form.
fn parsed(text: &str, weak: bool) -> Option<Tags> {
    let mut rest = text.trim();
    if rest == "*" {
        return Some(Tags::Any);
    }
    let mut all = Vec::new();
    loop {
        let (is_weak, quoted) = match rest.strip_prefix("W/") {
            Some(quoted) => (true, quoted),
            None => (false, rest),
        };
        let (tag, after) = quoted.strip_prefix('"')?.split_once('"')?;
        if tag.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
            return None;
        }
        // The tags that are given are revisions; "01" was never given.
        let revision = tag.parse::<u64>().ok().filter(|number| number.to_string() == tag);
        all.extend(revision.filter(|_| weak || !is_weak));
        rest = after.trim_start();
        if rest.is_empty() {
            return Some(Tags::Of(all));
        }
        rest = rest.strip_prefix(',')?.trim_start();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_tags_are_read() {
        let of = |all: &[u64]| Some(Tags::Of(all.to_vec()));
        assert_eq!(parsed(" * ", false), Some(Tags::Any));
        assert_eq!(parsed("\"1\"", false), of(&[1]));
        assert_eq!(parsed("\"1\", \"x\" ,\"23\"", false), of(&[1, 23]));
        assert_eq!(parsed("W/\"1\", \"2\"", false), of(&[2]));
        assert_eq!(parsed("W/\"1\", \"2\"", true), of(&[1, 2]));
        assert_eq!(parsed("\"\", \"01\", \"+1\", \"a,b\"", false), of(&[]));
        for wrong in
            ["", "1", "\"1", "1\"", "\"1\",", "\"1\" \"2\"", "*, \"1\"", "\"a b\"", "w/\"1\""]
        {
            assert_eq!(parsed(wrong, true), None, "{wrong}");
        }
    }

    #[test]
    fn several_lines_are_one_list() {
        let mut headers = HeaderMap::new();
        headers.append("if-match", "\"1\"".parse().unwrap());
        headers.append("if-match", "\"2\"".parse().unwrap());
        let read = conditions(&headers).unwrap();
        assert_eq!(read.if_match, Some(Tags::Of(vec![1, 2])));
        assert_eq!(read.if_none_match, None);
        headers.append("if-match", "\u{e9}".parse().unwrap());
        assert!(conditions(&headers).is_err());
    }
}
