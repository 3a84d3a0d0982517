//! `farpool --version`: the release, the commit, and the version of each format and protocol.

use std::sync::OnceLock;

/// The formats and protocols that both sides must share, or that are stored on disk, with their
/// versions.
fn formats() -> [(&'static str, String); 6] {
    [
        ("wire", farpool_wire::PROTOCOL_VERSION.to_string()),
        ("board", farpool_board::VERSION.to_string()),
        ("keyvault", farpool_keyvault::frame::VERSION.to_string()),
        ("flash", farpool_kv_tier::flash::layout::VERSION.to_string()),
        ("acms", farpool_acms::message::VERSION.to_string()),
        ("trace", farpool_trace::reader::VERSION.to_string()),
    ]
}

/// The text after `farpool `, as a static string, which clap requires.
pub fn long() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let formats = formats().map(|(name, version)| format!("{name} {version}")).join(", ");
        let (release, commit) = (env!("CARGO_PKG_VERSION"), env!("FARPOOL_COMMIT"));
        format!("{release} (commit {commit})\nformats and protocols: {formats}")
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_release_the_commit_and_every_format_are_named() {
        let text = super::long();
        assert!(text.starts_with(concat!(env!("CARGO_PKG_VERSION"), " (commit ")), "{text}");
        for name in ["wire", "board", "keyvault", "flash", "acms", "trace"] {
            assert!(text.contains(&format!("{name} ")), "{text}");
        }
    }
}
