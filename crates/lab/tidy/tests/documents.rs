//! Documents name files and tests that exist, are wrapped, and the CHANGELOG has one form.

use farpool_tidy::{of_the_product, require_none, root, sources};

/// Widest line of prose.
const PROSE_COLUMNS: usize = 100;
/// Widest line of code, tables and lone links; longer text is a list.
const COLUMNS: usize = 120;

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

/// Paths of sources and documents that a text names, such as crates/far/pager/src/core/state.rs.
fn named_paths(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !(c.is_ascii_alphanumeric() || "/._-".contains(c)))
        .map(|word| word.trim_end_matches(['.', '/', '-']))
        .filter(|word| ["crates/", "docs/", "scripts/"].iter().any(|it| word.starts_with(it)))
}

#[test]
fn files_that_are_named_exist() {
    let mut broken = Vec::new();
    let mut texts = sources(&["md"]);
    // The changelog names files as they were.
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

/// Whether a text is a date such as 2026-11-27.
fn is_date(text: &str) -> bool {
    let digits = |it: &str, count| it.len() == count && it.bytes().all(|b| b.is_ascii_digit());
    let parts: Vec<&str> = text.split('-').collect();
    matches!(parts[..], [y, m, d] if digits(y, 4) && digits(m, 2) && digits(d, 2))
}

#[test]
fn the_newest_release_is_the_version_of_the_workspace() {
    let text = page("CHANGELOG.md");
    let mut releases = text.lines().filter_map(|line| line.strip_prefix("## "));
    assert_eq!(releases.next(), Some("[Unreleased]"), "what comes next has a place");
    let newest = releases.next().expect("a release");
    let before = format!("[{}] - ", env!("CARGO_PKG_VERSION"));
    let date = newest.strip_prefix(before.as_str());
    assert!(date.is_some_and(is_date), "CHANGELOG.md: {newest} is not {before}YYYY-MM-DD");
}

/// Lines of a document that are prose, with their indices: no code (a span alone in its line
/// is code, too), no row of a table and no line of one word, such as an address.
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
        let item = words.strip_prefix("- ").unwrap_or(words);
        let is_span =
            item.strip_prefix('`').is_some_and(|rest| rest.find('`') == Some(rest.len() - 1));
        let is_code = is_fenced || is_fence || is_indented || is_span;
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
fn no_line_of_a_document_is_wide() {
    let mut broken = Vec::new();
    for source in sources(&["md"]) {
        for (index, line) in source.text.lines().enumerate() {
            if line.chars().count() > COLUMNS {
                broken.push(source.place(index));
            }
        }
    }
    require_none("no line of a document has more than 120 columns", &broken);
}

#[test]
fn code_and_tables_are_not_prose() {
    let text = "one two\n\n    in dented\n\n    still code\n\n```\nfenced code\n```\n| a row |\n\
                - `a span alone`\n- an item\n    that goes on\n\nhttps://example.com/a";
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

/// Fewest messages that docs/users/troubleshooting.md explains: with fewer, its form has changed.
const LEAST_MESSAGES: usize = 70;

/// The text of a file of the repository.
fn page(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).expect("the file is there")
}

/// All sources of the product as one text, in which strings over several lines are one line.
fn joined_sources() -> String {
    let mut all = String::new();
    for source in of_the_product() {
        let mut parts = source.text.split("\\\n");
        all.push_str(parts.next().unwrap_or_default());
        parts.for_each(|part| all.push_str(part.trim_start()));
    }
    all
}

#[test]
fn messages_that_are_explained_are_those_of_the_program() {
    let sources = joined_sources();
    let (mut broken, mut found) = (Vec::new(), 0);
    for line in page("docs/users/troubleshooting.md").lines() {
        let message = line.strip_prefix("- `").and_then(|rest| rest.strip_suffix('`'));
        found += usize::from(message.is_some());
        let pieces = message.iter().flat_map(|message| message.split("..."));
        for piece in pieces.map(|it| it.trim_matches([' ', ';', ':', ',', '(', ')'])) {
            if piece.len() > 5 && !sources.contains(piece) {
                broken.push(piece.to_owned());
            }
        }
    }
    require_none("messages that are explained are those of the program", &broken);
    assert!(found >= LEAST_MESSAGES, "{found} messages are explained");
}

#[test]
fn every_variable_is_documented() {
    let page = page("docs/operators/configuration.md");
    let tables = ["RUN", "BLADE", "CONTROL", "NODE"].map(|it| format!("FARPOOL_{it}_"));
    let mut broken = Vec::new();
    for source in sources(&["rs"]).iter().filter(|it| it.path.starts_with("crates/cli/src/args")) {
        for rest in source.text.split("env = \"").skip(1) {
            let name = rest.split('"').next().unwrap_or_default();
            let key = tables.iter().find_map(|table| name.strip_prefix(table.as_str()));
            let is_key = key.is_some_and(|key| {
                page.contains(&format!("`{}`", key.to_lowercase().replace('_', "-")))
            });
            if !is_key && !page.contains(&format!("`{name}`")) {
                broken.push(format!("{}: {name}", source.path));
            }
        }
    }
    require_none("docs/operators/configuration.md has every variable", &broken);
}

/// Formats and protocols: the name on the page, the source of the constant, and the text before the
/// number.
const VERSIONS: [(&str, &str, &str); 7] = [
    ("wire", "crates/protocol/wire/src/lib.rs", "pub const PROTOCOL_VERSION: u8 = "),
    ("board", "crates/far/board/src/layout.rs", "pub const VERSION: u32 = "),
    ("table", "crates/far/blade/src/journal/text.rs", "pub(crate) const VERSION: u32 = "),
    ("keyvault", "crates/protocol/keyvault/src/frame.rs", "pub const VERSION: u16 = "),
    ("flash", "crates/cache/kv-tier/src/flash/layout.rs", "pub const VERSION: u32 = "),
    ("acms", "crates/rack/acms/src/datagram.rs", "pub const VERSION: u8 = "),
    ("trace", "crates/study/trace/src/reader.rs", "pub const VERSION: &str = \""),
];

#[test]
fn versions_are_those_of_the_code() {
    let text = page("docs/operators/compatibility.md");
    let mut broken = Vec::new();
    for (name, path, before) in VERSIONS {
        let source = page(path);
        let number: String = match source.split_once(before) {
            Some((_, rest)) => rest.chars().take_while(char::is_ascii_digit).collect(),
            None => "not found".to_owned(),
        };
        if !text.contains(&format!("| {name} | {number} |")) {
            broken.push(format!("{name}: {number} in {path}"));
        }
    }
    require_none("docs/operators/compatibility.md has the versions of the code", &broken);
}
