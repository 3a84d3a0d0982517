//! The rules of CONTRIBUTING.md for the form of sources that rustfmt and clippy do not check.

use farpool_tidy::{of_the_product, require_none, sources};

/// Most lines of a file. A longer one has two subjects.
const FILE_LINES: usize = 700;
/// Crates that decide: they take the time as an argument.
const PURE: [&str; 6] = [
    "crates/cache/kv-store/src",
    "crates/ground/policy/src",
    "crates/protocol/wire/src",
    "crates/rack/acms/src",
    "crates/rack/placement/src",
    "crates/study/plan/src",
];
/// Longest line of a comment, in characters: rustfmt holds code to it, and leaves comments as they
/// are.
const COMMENT_COLUMNS: usize = 100;
const CLOCKS_AND_CHANCE: [&str; 5] =
    ["Instant::now", "SystemTime::now", "monotonic_ns", "getrandom", "fill_random"];

#[test]
fn files_are_short() {
    let long = sources(&["rs"]).into_iter().map(|it| (it.text.lines().count(), it.path));
    let long: Vec<String> = long
        .filter(|(lines, _)| *lines > FILE_LINES)
        .map(|(lines, path)| format!("{path}: {lines} lines"))
        .collect();
    require_none("files have at most 700 lines", &long);
}

#[test]
fn comments_are_wrapped() {
    let mut broken = Vec::new();
    for source in sources(&["rs"]) {
        for (index, line) in source.text.lines().enumerate() {
            let is_long = line.chars().count() > COMMENT_COLUMNS;
            if is_long && line.trim_start().starts_with("//") && !is_table_or_formula(line) {
                broken.push(source.place(index));
            }
        }
    }
    require_none("comments have at most 100 columns", &broken);
}

/// A row of a table, a link alone, or what is set as code (by four blanks) cannot be wrapped.
fn is_table_or_formula(comment: &str) -> bool {
    let text = comment.trim_start().trim_start_matches(['/', '!']);
    text.trim_start().starts_with(['|', '[']) || text.starts_with("     ")
}

#[test]
fn pure_crates_have_no_clock() {
    let mut broken = Vec::new();
    for source in of_the_product().iter().filter(|it| PURE.iter().any(|p| it.path.starts_with(p))) {
        for (index, line) in source.text.lines().enumerate() {
            if CLOCKS_AND_CHANCE.iter().any(|it| line.contains(it)) {
                broken.push(source.place(index));
            }
        }
    }
    require_none("pure crates take time and chance as arguments", &broken);
}
