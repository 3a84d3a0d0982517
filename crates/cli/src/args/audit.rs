//! The command line of `farpool audit`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use farpool_audit::Hash;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool control --audit /var/lib/farpool/audit.log\n  \
farpool audit verify /var/lib/farpool/audit.log\n  \
farpool audit verify audit.log.180233 audit.log --contains 5d41...")]
pub struct AuditArgs {
    #[command(subcommand)]
    pub action: AuditAction,
}

#[derive(Debug, Subcommand)]
pub enum AuditAction {
    /// Check that a log is what was written: no line was changed, removed, inserted or moved
    ///
    /// The hash of the last line, noted somewhere else, tells later with --contains that no lines
    /// were cut off and that the log was not made anew.
    Verify(VerifyArgs),
}

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The log's files, the oldest first
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Require a line with this hash
    #[arg(long, value_name = "HASH")]
    pub contains: Option<Hash>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
