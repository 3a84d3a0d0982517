//! Documents name files and tests that exist, are wrapped, and the CHANGELOG has one form.

use farpool_tidy::{require_none, root, sources};

/// Widest line of prose; code, tables and lone links are as wide as they have to be.
const PROSE_COLUMNS: usize = 100;

/// Targets of `[text](target)` in a line.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("](").filter_map(|(at, _)| line[at + 2..].split(')').next())
}

#[test]
fn links_of_documents_lead_somewhere() {
    let mut broken = Vec::new();
    for source in sources(&["md"]) {
        let folder = root().join(&source.path).parent().expect("a folder").to_owned();
        for (index, line) in source.text.lines().enumerate() {
            for link in links(line) {
                let file = link.split('#').next().unwrap_or_default();
                let is_elsewhere = file.is_empty() || file.contains("://") || file.contains(' ');
                if !is_elsewhere && !folder.join(file).exists() {
                    broken.push(format!("{}: {link}", source.place(index)));
                }
            }
        }
    }
    require_none("links lead to files of the repository", &broken);
}

/// Paths of sources and documents that a text names, such as crates/far/pager/src/core.rs.
fn named_paths(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !(c.is_ascii_alphanumeric() || "/._-".contains(c)))
        .map(|word| word.trim_end_matches(['.', '/', '-']))
        .filter(|word| ["crates/", "docs/", "scripts/"].iter().any(|it| word.starts_with(it)))
}

#[test]
fn files_that_are_named_exist() {
    let mut broken = Vec::new();
    let mut texts = sources(&["md"]);
    // What has been is told as it was.
    texts.retain(|it| it.path != "CHANGELOG.md");
    texts.extend(sources(&["rs", "sh", "py"]));
    for source in texts {
        for (index, line) in source.text.lines().enumerate() {
            for path in named_paths(line) {
                let is_pattern = path.ends_with('_')
                    || line.contains(&format!("{path}*"))
                    || line.contains(&format!("{path}{{"))
                    || line.contains(&format!("{path}/{{"));
                if !is_pattern && !root().join(path).exists() {
                    broken.push(format!("{}: {path}", source.place(index)));
                }
            }
        }
    }
    require_none("files that are named exist", &broken);
}

#[test]
fn the_changelog_has_one_form() {
    let text = std::fs::read_to_string(root().join("CHANGELOG.md")).expect("it is there");
    let kinds = ["### Added", "### Changed", "### Fixed", "### Removed"];
    let mut broken = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let is_release = line.starts_with("## ");
        let is_right = match line {
            _ if is_release => line.starts_with("## ["),
            _ if line.starts_with("###") => kinds.contains(&line),
            _ => true,
        };
        if !is_right {
            broken.push(format!("CHANGELOG.md:{}: {line}", index + 1));
        }
    }
    require_none("the CHANGELOG has releases, and Added, Changed, Fixed, Removed in them", &broken);
}

/// Lines of a document that are prose, with their indices: no code, no row of a table and no line
/// of one word, such as an address.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let (mut is_fenced, mut is_indented, mut is_after_gap) = (false, false, true);
    text.lines().enumerate().filter(move |(_, line)| {
        let words = line.trim_start();
        let is_fence = words.starts_with("```");
        is_fenced ^= is_fence;
        if !words.is_empty() {
            // Code begins after an empty line and ends with what is indented less; a continued
            // item of a list has no empty line before it.
            is_indented = line.starts_with("    ") && (is_indented || is_after_gap);
        }
        is_after_gap = words.is_empty();
        let is_code = is_fenced || is_fence || is_indented;
        !is_code && !words.starts_with('|') && words.contains(' ')
    })
}

#[test]
fn prose_is_wrapped() {
    let mut broken = Vec::new();
    for source in sources(&["md"]) {
        for (index, line) in prose(&source.text) {
            if line.chars().count() > PROSE_COLUMNS {
                broken.push(source.place(index));
            }
        }
    }
    require_none("prose of documents has at most 100 columns", &broken);
}

#[test]
fn code_and_tables_are_not_prose() {
    let text = "one two\n\n    in dented\n\n    still code\n\n```\nfenced code\n```\n| a row |\n\
                - an item\n    that goes on\n\nhttps://example.com/a";
    let lines: Vec<&str> = prose(text).map(|(_, line)| line).collect();
    assert_eq!(lines, ["one two", "- an item", "    that goes on"]);
}

/// Tests that a line names by their file, as in `FILE.rs::TEST`.
fn named_tests(line: &str) -> impl Iterator<Item = (&str, &str)> {
    line.split('`').filter_map(|word| {
        let (path, test) = word.split_once(".rs::")?;
        let is_test = test.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_');
        (path.starts_with("crates/") && is_test).then(|| (&word[..path.len() + 3], test))
    })
}

#[test]
fn tests_that_are_named_exist() {
    let mut broken = Vec::new();
    let mut found = 0;
    for source in sources(&["md"]) {
        for (index, line) in source.text.lines().enumerate() {
            for (path, test) in named_tests(line) {
                let text = std::fs::read_to_string(root().join(path)).unwrap_or_default();
                if !text.contains(&format!("fn {test}(")) {
                    broken.push(format!("{}: {path}::{test}", source.place(index)));
                }
                found += 1;
            }
        }
    }
    require_none("tests that documents name exist", &broken);
    assert!(found > 0, "SPECIFICATION.md names tests");
}
