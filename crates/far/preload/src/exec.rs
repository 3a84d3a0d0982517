//! exec and spawn with an environment of the program's making: what `farpool run` put into the
//! environment stays in it, so that the limit also holds for the new program.
//!
//! These functions may run in a child of vfork, which shares memory with its parent and must not
//! allocate from the heap; the few bytes they need come straight from the kernel.
//!
//! `execl`, `execlp` and `execle` are in [`crate::variadic`].

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use farpool_board::BOARD_VARIABLE;
use farpool_pager::sys;

use crate::{set_errno, status};

const PRELOAD: &[u8] = b"LD_PRELOAD=";
/// Entries of an environment that are read; the kernel's own limit on its size is reached before.
const MAX_ENTRIES: usize = 1 << 20;

type Environment = *const *const c_char;
type Arguments = *const *const c_char;

/// `NAME=value` of our variables, as they were when this process started.
struct Kept {
    preload: Vec<u8>,
    board: Vec<u8>,
}

static KEPT: OnceLock<Kept> = OnceLock::new();

/// Remembers our variables. To be called once, before the program can change its environment.
pub fn remember() {
    let entry = |name: &str| -> Vec<u8> {
        let value = std::env::var_os(name).unwrap_or_default();
        [name.as_bytes(), b"=", value.as_encoded_bytes(), b"\0"].concat()
    };
    KEPT.get_or_init(|| Kept { preload: entry("LD_PRELOAD"), board: entry(BOARD_VARIABLE) });
}

/// The environment to use instead of the program's.
struct Completed {
    environment: Environment,
    mapped: Option<(usize, usize)>,
}

impl Drop for Completed {
    fn drop(&mut self) {
        if let Some((base, bytes)) = self.mapped {
            sys::unmap(base, bytes);
        }
    }
}

/// The program's environment, with our variables in it.
///
/// # Safety
/// `environment` is null or a null-terminated array of C strings.
unsafe fn complete(environment: Environment) -> Completed {
    let unchanged = Completed { environment, mapped: None };
    let Some(kept) = KEPT.get() else { return unchanged };
    // The kernel takes null for an empty environment, and clearenv(3) leaves null.
    let none = [std::ptr::null()];
    let environment = if environment.is_null() { none.as_ptr() } else { environment };
    // SAFETY: as the caller guarantees.
    let entries = unsafe { entries(environment) };
    let board_name = &kept.board[..=BOARD_VARIABLE.len()];
    let has_board = entries.clone().any(|entry| entry.starts_with(board_name));
    let preload = entries.clone().find_map(|entry| entry.strip_prefix(PRELOAD));
    let ours = kept.preload.strip_prefix(PRELOAD).and_then(|value| value.strip_suffix(b"\0"));
    let ours = ours.unwrap_or(b"");
    let has_preload =
        preload.is_some_and(|value| value.windows(ours.len().max(1)).any(|part| part == ours));
    if has_board && has_preload {
        return unchanged;
    }
    let text_bytes = kept.preload.len() + kept.board.len() + preload.map_or(0, <[u8]>::len) + 2;
    let count = entries.clone().count();
    let bytes = (count + 3) * size_of::<*const c_char>() + text_bytes;
    let Ok(base) = sys::map_local(bytes) else {
        return unchanged;
    };
    // SAFETY: `base` has room for the pointers and the text after them, as computed above.
    unsafe { fill(base, entries, board_name, &join(kept, ours, preload, base, count)) };
    Completed { environment: base as Environment, mapped: Some((base, bytes)) }
}

/// Where the two new strings are in the mapping.
struct Joined {
    preload: *const c_char,
    board: *const c_char,
}

/// Writes our two strings after the room for the pointers.
///
/// # Safety
/// `base` is a mapping with room for `count + 3` pointers and the text.
unsafe fn join(
    kept: &Kept,
    ours: &[u8],
    preload: Option<&[u8]>,
    base: usize,
    count: usize,
) -> Joined {
    let text = (base + (count + 3) * size_of::<*const c_char>()) as *mut u8;
    let mut used = 0;
    let mut put = |bytes: &[u8]| {
        // SAFETY: the mapping's size includes everything that is put.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), text.add(used), bytes.len()) };
        used += bytes.len();
        used
    };
    put(PRELOAD);
    put(ours);
    if let Some(theirs) = preload.filter(|theirs| !theirs.is_empty()) {
        put(b":");
        put(theirs);
    }
    let board_at = put(b"\0");
    put(&kept.board);
    Joined { preload: text.cast(), board: text.wrapping_add(board_at).cast() }
}

/// Writes the pointers: the program's entries except those we replace, then ours.
///
/// # Safety
/// As [`join`].
unsafe fn fill<'a>(
    base: usize,
    entries: impl Iterator<Item = &'a [u8]>,
    board_name: &[u8],
    joined: &Joined,
) {
    let mut at = base as *mut *const c_char;
    let others =
        entries.filter(|entry| !entry.starts_with(PRELOAD) && !entry.starts_with(board_name));
    for entry in others.map(|entry| entry.as_ptr().cast()).chain([joined.preload, joined.board]) {
        // SAFETY: at most count + 2 pointers are written, and the mapping is zeroed after them.
        unsafe {
            at.write(entry);
            at = at.add(1);
        }
    }
}

/// # Safety
/// `environment` is a null-terminated array of C strings that live as long as the iterator is used.
unsafe fn entries<'a>(environment: Environment) -> impl Iterator<Item = &'a [u8]> + Clone {
    (0..MAX_ENTRIES).map_while(move |index| {
        // SAFETY: the array ends with a null, at which this stops.
        let entry = unsafe { environment.add(index).read() };
        // SAFETY: a C string, as the caller guarantees.
        (!entry.is_null()).then(|| unsafe { CStr::from_ptr(entry) }.to_bytes())
    })
}

/// Makes `call` with the completed environment, which lasts as long as the call.
///
/// # Safety
/// As [`complete`].
unsafe fn completed(environment: Environment, call: impl FnOnce(Environment) -> c_int) -> c_int {
    // SAFETY: as the caller guarantees.
    let completed = unsafe { complete(environment) };
    call(completed.environment)
}

/// The C library's own function of a name, the next one after ours.
pub(crate) fn next<T: Copy>(name: &CStr) -> Option<T> {
    const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
    // SAFETY: looks a symbol up by its name.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    // SAFETY: T is a function pointer type of the symbol's C declaration.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

/// # Safety
/// As execveat(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    folder: c_int,
    path: *const c_char,
    arguments: Arguments,
    environment: Environment,
    flags: c_int,
) -> c_int {
    let call = |environment: Environment| {
        // SAFETY: the program asked for this call.
        status(unsafe {
            libc::syscall(libc::SYS_execveat, folder, path, arguments, environment, flags)
        })
    };
    // SAFETY: the program's own array.
    unsafe { completed(environment, call) }
}

/// # Safety
/// As fexecve(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(
    file: c_int,
    arguments: Arguments,
    environment: Environment,
) -> c_int {
    // SAFETY: the program asked for this call.
    unsafe { execveat(file, c"".as_ptr(), arguments, environment, libc::AT_EMPTY_PATH) }
}

/// # Safety
/// As execve(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(
    path: *const c_char,
    arguments: Arguments,
    environment: Environment,
) -> c_int {
    let call = |environment: Environment| {
        // SAFETY: the program asked for this call.
        status(unsafe { libc::syscall(libc::SYS_execve, path, arguments, environment) })
    };
    // SAFETY: the program's own array.
    unsafe { completed(environment, call) }
}

type ExecVpe = unsafe extern "C" fn(*const c_char, Arguments, Environment) -> c_int;

/// # Safety
/// As execvpe(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(
    file: *const c_char,
    arguments: Arguments,
    environment: Environment,
) -> c_int {
    let call = |environment| match next::<ExecVpe>(c"execvpe") {
        // SAFETY: the program asked for this call.
        Some(function) => unsafe { function(file, arguments, environment) },
        None => {
            set_errno(libc::ENOSYS);
            -1
        }
    };
    // SAFETY: the program's own array.
    unsafe { completed(environment, call) }
}

/// # Safety
/// As execv(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: Arguments) -> c_int {
    // SAFETY: the process's own environment.
    unsafe { execve(path, arguments, crate::environ) }
}

/// # Safety
/// As execvp(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(file: *const c_char, arguments: Arguments) -> c_int {
    // SAFETY: the process's own environment.
    unsafe { execvpe(file, arguments, crate::environ) }
}

type Spawn = unsafe extern "C" fn(
    *mut libc::pid_t,
    *const c_char,
    *const c_void,
    *const c_void,
    Arguments,
    Environment,
) -> c_int;

/// The C library's spawn function of a name, with the completed environment.
///
/// # Safety
/// As posix_spawn(3).
unsafe fn spawn(
    name: &CStr,
    pid: *mut libc::pid_t,
    program: *const c_char,
    [actions, attributes]: [*const c_void; 2],
    arguments: Arguments,
    environment: Environment,
) -> c_int {
    let call = |environment| match next::<Spawn>(name) {
        // SAFETY: the program asked for this call.
        Some(spawn) => unsafe { spawn(pid, program, actions, attributes, arguments, environment) },
        None => libc::ENOSYS,
    };
    // SAFETY: the program's own array.
    unsafe { completed(environment, call) }
}

/// # Safety
/// As posix_spawn(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Arguments,
    environment: Environment,
) -> c_int {
    // SAFETY: the program asked for this call.
    unsafe { spawn(c"posix_spawn", pid, path, [actions, attributes], arguments, environment) }
}

/// # Safety
/// As posix_spawnp(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawnp(
    pid: *mut libc::pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Arguments,
    environment: Environment,
) -> c_int {
    // SAFETY: the program asked for this call.
    unsafe { spawn(c"posix_spawnp", pid, file, [actions, attributes], arguments, environment) }
}
