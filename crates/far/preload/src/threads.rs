//! pthread_create: the place to keep a program from growing faster than its resident set can be
//! watched.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::exec::next;
use crate::pager;

type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;

/// The C library's function; null before its first use. It is stored, because dlsym takes the
/// dynamic linker's lock: a thread that holds it, in a constructor, may wait for one that starts a
/// thread.
static CREATE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

fn create() -> Option<Create> {
    let known = CREATE.load(Acquire);
    if known.is_null() {
        let found: Create = next(c"pthread_create")?;
        CREATE.store(found as *mut c_void, Release);
        return Some(found);
    }
    // SAFETY: only the function found above is stored.
    Some(unsafe { std::mem::transmute::<*mut c_void, Create>(known) })
}

/// # Safety
/// As pthread_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    let Some(create) = create() else { return libc::EAGAIN };
    if let Some(pager) = pager() {
        pager.before_thread();
    }
    // SAFETY: the program asked for this call.
    unsafe { create(thread, attributes, start, argument) }
}
