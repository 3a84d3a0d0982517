//! This process's identity for its blades and on the board.

use farpool_board::{Board, Slot};
use farpool_kernel::fill_random;
use farpool_pool::ClientId;

use crate::error::StartError;
use crate::sys;

/// A random name for this process on its blades.
pub(crate) fn client_id() -> Result<ClientId, std::io::Error> {
    let mut bytes = [0_u8; 16];
    fill_random(&mut bytes)?;
    Ok(ClientId(u128::from_le_bytes(bytes)))
}

pub(crate) fn claim_slot(board: &'static Board) -> Result<&'static Slot, StartError> {
    let (pid, ticks) = sys::program_to_keeper().unwrap_or_else(|| {
        let pid = sys::program_pid();
        (pid, start_ticks(pid))
    });
    let lack =
        || if board.lacks_room() { StartError::NoRoom } else { StartError::TooManyProcesses };
    let slot = board.claim(pid, ticks).ok_or_else(lack)?;
    slot.set_name(sys::thread_name().as_bytes());
    Ok(slot)
}

/// Start time of a process (field 22 of its stat), or 0 if it cannot be read.
fn start_ticks(pid: u32) -> u64 {
    use rustix::fs::{Mode, OFlags};
    let read = || -> Option<u64> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let path = format!("/proc/{pid}/stat");
        let file = rustix::fs::open(path.as_str(), flags, Mode::empty()).ok()?;
        let mut buffer = [0_u8; 1024];
        let length = rustix::io::read(&file, &mut buffer).ok()?;
        let text = String::from_utf8_lossy(buffer.get(..length)?).into_owned();
        // The name (field 2) may hold blanks; fields are counted after its closing parenthesis.
        text.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
    };
    read().unwrap_or(0)
}
