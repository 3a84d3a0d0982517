//! New programs, started with an environment that the program chose.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStringExt;

use crate::memory::{Filled, ballast, different, require};

/// The case that each new program runs.
pub const IS_HELD: &str = "is-held";

type Words = *const *const c_char;
type Start = fn(&CString, Words, Words) -> libc::pid_t;

/// However a program is started, it is held to the limit and also has its own variables.
pub fn environments() {
    let region = Filled::new(4 << 20, 1);
    let ballast = ballast();
    let path = std::env::current_exe()
        .ok()
        .and_then(|path| CString::new(path.into_os_string().into_vec()).ok());
    let Some(path) = path else { different("the program's own path") };
    let Ok(name) = CString::new(IS_HELD) else { different("a name") };
    let arguments = [path.as_ptr(), name.as_ptr(), std::ptr::null()];
    let bare = [c"A=b".as_ptr(), std::ptr::null()];
    let preloading = [c"LD_PRELOAD=libm.so.6".as_ptr(), c"A=b".as_ptr(), std::ptr::null()];
    for (what, start) in STARTS {
        for environment in [bare.as_ptr(), preloading.as_ptr()] {
            let child = start(&path, arguments.as_ptr(), environment);
            let mut status = 0;
            // SAFETY: a live place for the status.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            require(status == 0, &format!("{what} started a program that ended with {status:#x}"));
        }
    }
    region.check();
    ballast.check();
}

/// Checks the environment of a program that was started with `A=b` as its own variable.
pub fn is_held() {
    let has = |name: &str, part: &str| std::env::var(name).is_ok_and(|value| value.contains(part));
    require(has("LD_PRELOAD", "farpool"), "LD_PRELOAD");
    require(has("FARPOOL_BOARD", ""), "FARPOOL_BOARD");
    require(has("A", "b"), "the program's own variable");
}

const STARTS: [(&str, Start); 5] = [
    ("execve", |path, arguments, environment| {
        // SAFETY: live arrays that end with null, here and below.
        in_child(|| unsafe { libc::execve(path.as_ptr(), arguments, environment) })
    }),
    ("execvpe", |path, arguments, environment| {
        // SAFETY: as above.
        in_child(|| unsafe { libc::execvpe(path.as_ptr(), arguments, environment) })
    }),
    ("fexecve", |path, arguments, environment| {
        in_child(|| {
            // SAFETY: as above.
            unsafe {
                let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
                libc::fexecve(file, arguments, environment)
            }
        })
    }),
    ("posix_spawn", |path, arguments, environment| {
        spawn(libc::posix_spawn, path, arguments, environment)
    }),
    ("posix_spawnp", |path, arguments, environment| {
        spawn(libc::posix_spawnp, path, arguments, environment)
    }),
];

/// Forks. The child executes another program.
fn in_child(become_another: impl Fn() -> i32) -> libc::pid_t {
    // SAFETY: the process has one thread; the child only calls exec or ends.
    match unsafe { libc::fork() } {
        -1 => different("fork"),
        0 => {
            become_another();
            // SAFETY: ends the child.
            unsafe { libc::_exit(7) }
        }
        child => child,
    }
}

type Spawn = unsafe extern "C" fn(
    *mut libc::pid_t,
    *const c_char,
    *const libc::posix_spawn_file_actions_t,
    *const libc::posix_spawnattr_t,
    *const *mut c_char,
    *const *mut c_char,
) -> i32;

fn spawn(function: Spawn, path: &CString, arguments: Words, environment: Words) -> libc::pid_t {
    let (mut child, none) = (0, std::ptr::null());
    // SAFETY: live arrays that end with null; no actions and no attributes.
    let result = unsafe {
        function(
            &raw mut child,
            path.as_ptr(),
            none,
            std::ptr::null(),
            arguments.cast(),
            environment.cast(),
        )
    };
    require(result == 0, "spawn");
    child
}
