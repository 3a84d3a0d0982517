//! The trace simulator: miss counts, miss-ratio curves, and designs of far memory in time.
//!
//! Pages become dense numbers once; each configuration then runs over dense arrays. Time is integer picoseconds: the same
//! trace and parameters give the same bytes on any machine and number of threads.
