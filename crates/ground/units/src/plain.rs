//! Text from elsewhere, made fit for one line of a terminal or a log.

use std::borrow::Cow;

/// True if a character moves a terminal's cursor, changes its state, or turns the direction of what
/// follows: none belongs in a name.
#[must_use]
pub fn is_unprintable(character: char) -> bool {
    character.is_control()
        || matches!(character,
            // Line and paragraph ends, marks of direction, the byte order mark.
            '\u{2028}' | '\u{2029}' | '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{feff}'
                | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns a text with what is unprintable escaped, such as `\u{1b}`.
#[must_use]
pub fn plain(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unprintable) {
        return Cow::Borrowed(text);
    }
    let escaped = text.chars().fold(String::with_capacity(text.len()), |mut all, character| {
        match is_unprintable(character) {
            true => all.extend(character.escape_default()),
            false => all.push(character),
        }
        all
    });
    Cow::Owned(escaped)
}

/// As [`plain`], but line feeds stay: for texts of several lines.
#[must_use]
pub fn plain_lines(text: &str) -> Cow<'_, str> {
    if !text.chars().any(|character| character != '\n' && is_unprintable(character)) {
        return Cow::Borrowed(text);
    }
    let lines: Vec<Cow<'_, str>> = text.split('\n').map(plain).collect();
    Cow::Owned(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printable_stays_as_it_is() {
        for text in ["", "redis 7.2 (a\\b)", "gr\u{fc}n \u{1f600}"] {
            assert!(matches!(plain(text), Cow::Borrowed(same) if same == text));
        }
        assert!(matches!(plain_lines("a\nb"), Cow::Borrowed("a\nb")));
    }

    #[test]
    fn what_a_terminal_obeys_is_escaped() {
        assert_eq!(plain("\u{1b}[2Jevil\r\nx"), "\\u{1b}[2Jevil\\r\\nx");
        assert_eq!(plain("\u{9b}2J"), "\\u{9b}2J");
        assert_eq!(plain("abc\u{202e}fed"), "abc\\u{202e}fed");
        assert_eq!(plain_lines("a\u{1b}\nb\u{7f}"), "a\\u{1b}\nb\\u{7f}");
        for code in 0..0x300 {
            let character = char::from_u32(code).expect("below the surrogates");
            let text = plain(&character.to_string()).into_owned();
            assert!(text.chars().all(|c| !is_unprintable(c)), "{text}");
        }
    }
}
