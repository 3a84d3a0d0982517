//! With whom a run shares equal pages on blades that pack.

use std::num::NonZeroU64;

use farpool_board::{Sealing, Settings};
use farpool_wire::SharingGroup;
use twox_hash::XxHash3_64;

use crate::RunError;

/// The number that blades know a group by. Groups with the same number would share pages; they are
/// of the same tenant or user anyway.
pub(crate) fn group_named(name: &str) -> SharingGroup {
    let number = XxHash3_64::oneshot(name.as_bytes());
    SharingGroup(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN))
}

/// Refuses a group whose pages are sealed: no two of them are equal then.
///
/// # Errors
/// [`RunError::SharingSealed`].
pub(crate) fn check_sharing(settings: &Settings) -> Result<(), RunError> {
    match (settings.sharing_group, settings.sealing) {
        (Some(_), Sealing::Sealed) => Err(RunError::SharingSealed),
        _ => Ok(()),
    }
}
