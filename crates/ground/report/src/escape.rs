//! Escapes text from outside for the place it is put in.

/// Escapes `text` for HTML and SVG, inside elements and quoted attributes. Characters that XML does
/// not allow become the replacement character.
pub(crate) fn html(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            '\n' | '\t' => safe.push(character),
            control if control.is_control() => safe.push('\u{fffd}'),
            other => safe.push(other),
        }
    }
    safe
}

/// Escapes JSON for a `<script>` element: nothing in it can end the element or open a comment.
pub(crate) fn json_in_script(json: &str) -> String {
    json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

/// Escapes `text` for one line of a terminal: control characters, which could move the cursor or
/// change colours, become the replacement character.
pub(crate) fn terminal(text: &str) -> String {
    let shown = |character: char| match character {
        control if control.is_control() => '\u{fffd}',
        other => other,
    };
    text.chars().map(shown).collect()
}

/// Encodes `text` for the data of a `data:` address.
pub(crate) fn percent_encoded(text: &str) -> String {
    let mut safe = String::with_capacity(text.len() * 2);
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' => {
                safe.push(char::from(byte));
            }
            other => safe.push_str(&format!("%{other:02X}")),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_comes_in_is_markup_when_it_goes_out() {
        assert_eq!(html("<b a='1\">&\u{1b}"), "&lt;b a=&#39;1&quot;&gt;&amp;\u{fffd}");
        let json = serde_json::json!({"a": "</script><!-- &"}).to_string();
        let safe = json_in_script(&json);
        assert!(!safe.contains('<') && !safe.contains('&'), "{safe}");
        let back: serde_json::Value = serde_json::from_str(&safe).expect("still JSON");
        assert_eq!(back["a"], "</script><!-- &");
        assert_eq!(percent_encoded("a,\"b\"\n<é>"), "a%2C%22b%22%0A%3C%C3%A9%3E");
        assert_eq!(terminal("a\x1b[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
