//! Parts of the state that all threads of a pager share; `crate::core` puts them together.

pub mod budget;
pub mod crew;
pub(crate) mod late_pool;
pub mod streams;
pub mod turn;
