//! Messages to whoever runs the keeper.

/// Writes a line to standard error. Whoever reads that may have gone (`farpool run … 2>&1 | head`);
/// `eprintln` would end the keeper for it, and the program ends with its keeper.
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), $($argument)*);
    }};
}

pub(crate) use say;
