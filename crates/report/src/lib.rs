//! What `sim` and `plan` answer with: tables for people, JSON, and one self-contained HTML page with plots.
//!
//! Every answer carries its [`Provenance`]: the version of the tool, the parameters and the hash of each input, so that it
//! can be made again from itself.
