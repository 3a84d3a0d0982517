//! The life of the pager in a process: how it starts, watches, forks, is handed over and leaves.

pub(crate) mod activation;
pub mod attached;
pub(crate) mod blades;
pub mod children;
pub(crate) mod dialing;
pub(crate) mod fetcher;
pub(crate) mod files;
pub mod fork;
pub(crate) mod growth;
pub mod guest;
pub(crate) mod identity;
pub(crate) mod inheritance;
pub(crate) mod process;
pub mod requests;
pub(crate) mod rest;
pub(crate) mod rights;
pub(crate) mod start;
pub mod steward;
pub(crate) mod uffd_guardian;
pub(crate) mod verification;
pub(crate) mod watch;
