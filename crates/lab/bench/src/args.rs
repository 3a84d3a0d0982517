//! Arguments of `farpool bench`.

use crate::stage::Door;
use std::path::PathBuf;

/// Arguments of `farpool bench`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct BenchArgs {
    /// Rows to measure, by name or the beginning of one ("fault", "program.sort") [default: all]
    #[arg(value_name = "ROW")]
    pub rows: Vec<String>,
    /// List the rows and measure nothing
    #[arg(long)]
    pub list: bool,
    /// Shorter runs over less memory: good for a first look, not for judging
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object for each row instead of the table
    #[arg(long)]
    pub json: bool,
    /// Also write what was measured to this file
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Compare two files written by --out and measure nothing
    #[arg(long, num_args = 2, value_names = ["FIRST", "SECOND"], conflicts_with_all = ["out", "rows"])]
    pub compare: Vec<PathBuf>,
    /// Folder on a disk for swap files and the programs' own files
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub dir: PathBuf,
    /// How farpool gets into the programs [default: as `farpool run` does here]
    #[arg(long, value_enum)]
    pub door: Option<Door>,
    /// The farpool binary that runs the programs [default: this one]
    #[arg(long, value_name = "FILE")]
    pub farpool: Option<PathBuf>,
    /// Leave out the rows under the kernel's own swapping
    #[arg(long)]
    pub no_swap: bool,
}
