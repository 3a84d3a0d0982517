//! Numbers are converted by functions that say what happens to one that does not fit.

use farpool_tidy::{of_the_product, require_none};

/// Falling back to a number turns an impossible value into a plausible wrong one.
#[test]
fn no_number_is_saturated_in_silence() {
    let mut broken = Vec::new();
    for source in of_the_product() {
        if source.path.starts_with("crates/ground/units/") {
            continue;
        }
        // Without white space a call that is broken over lines looks like one that is not.
        let mut lines = Vec::new();
        let mut dense = String::new();
        for (index, line) in source.text.lines().enumerate() {
            let code: String =
                line.split("//").next().unwrap_or_default().split_whitespace().collect();
            lines.extend(std::iter::repeat_n(index, code.len()));
            dense.push_str(&code);
        }
        for (at, _) in dense.match_indices("::try_from(") {
            let call = end_of_call(&dense[at..]);
            if is_silent(&dense[at + call..]) {
                broken.push(source.place(lines[at]));
            }
        }
    }
    require_none("exactly() or at_most() of farpool_units convert numbers", &broken);
}

/// Whether what follows a conversion puts a number in the place of one that does not fit.
fn is_silent(after: &str) -> bool {
    let after = after.strip_prefix(".ok()").unwrap_or(after);
    let Some(other) = after.strip_prefix(".unwrap_or(") else {
        return after.starts_with(".unwrap_or_default()");
    };
    let other = &other[..end_of_call(&format!("({other}")) - 2];
    let is_limit = ["::MAX", "::MIN"].iter().any(|limit| other.contains(limit));
    is_limit || other.starts_with(|first: char| first.is_ascii_digit())
}

/// The length of `name(...)` at the beginning of a text.
fn end_of_call(text: &str) -> usize {
    let mut depth = 0;
    for (at, letter) in text.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' if depth == 1 => return at + 1,
            ')' => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

#[test]
fn the_end_of_a_call_is_found() {
    assert_eq!(end_of_call("u8::try_from(a(b)).x"), "u8::try_from(a(b))".len());
}

#[test]
fn silent_conversions_are_told_from_others() {
    let silent = [".unwrap_or(0)", ".ok().unwrap_or(7);", ".unwrap_or(i64::MAX/4).min(3)"];
    assert!(silent.iter().all(|after| is_silent(after)));
    assert!(is_silent(".unwrap_or_default()"));
    let others = [".ok()?", ".unwrap_or(EXIT_FAILED)", ".unwrap_or(of(0)).max(u32::MAX)", ";"];
    assert!(others.iter().all(|after| !is_silent(after)));
}
