//! Messages to the user of the keeper.

/// Writes a line to standard error. The reader may have gone (`farpool run … 2>&1 | head`):
/// `eprintln` would then end the keeper, and with it the program.
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), $($argument)*);
    }};
}

pub(crate) use say;
