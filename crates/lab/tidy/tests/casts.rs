//! Numbers are converted by functions that say what happens to one that does not fit.

use farpool_tidy::{of_the_product, require_none};

/// `try_from(x).unwrap_or(0)` turns an impossible value into a plausible wrong one.
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
            let after = &dense[at + call..];
            if ["unwrap_or(0)", "unwrap_or_default()"]
                .iter()
                .any(|it| after.starts_with(&format!(".{it}")))
                || (after.starts_with(".unwrap_or(")
                    && after[".unwrap_or(".len()..]
                        .split(')')
                        .next()
                        .is_some_and(|it| it.ends_with("::MAX")))
            {
                broken.push(source.place(lines[at]));
            }
        }
    }
    require_none("exactly() or at_most() of farpool_units convert numbers", &broken);
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
