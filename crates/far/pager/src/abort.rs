//! A panic in the pager ends the program with a message: what the pager was about to do is unknown.

use std::panic::PanicHookInfo;

use crate::sys;

/// In debug builds, and in their sidecars: the pager thread that panics on purpose, so that a test
/// can check the message.
#[cfg(any(debug_assertions, feature = "test-panics"))]
const PANIC_VARIABLE: &str = "FARPOOL_TEST_PANIC";
#[cfg(any(debug_assertions, feature = "test-panics"))]
static ASKED_FOR: std::sync::OnceLock<String> = std::sync::OnceLock::new();

/// Makes every later panic of this library end the program with a message of its own. The standard
/// library's would go to descriptor 2 of the panicking thread, and the pager's threads have none.
pub fn end_loudly() {
    std::panic::set_hook(Box::new(end));
    #[cfg(any(debug_assertions, feature = "test-panics"))]
    if let Ok(thread) = std::env::var(PANIC_VARIABLE) {
        let _ = ASKED_FOR.set(thread);
    }
}

fn end(panic: &PanicHookInfo<'_>) {
    let place = panic.location().map_or_else(String::new, |place| format!(" at {place}"));
    fail_closed(&format!(
        "the pager failed in process {}, thread {}{place}: {}; please report it, with this line",
        std::process::id(),
        sys::thread_name(),
        panic.payload_as_str().unwrap_or("no reason given"),
    ));
}

/// Panics if a test asked for it in the calling thread.
#[inline]
pub fn panic_if_asked() {
    #[cfg(any(debug_assertions, feature = "test-panics"))]
    if ASKED_FOR.get().is_some_and(|thread| *thread == sys::thread_name()) {
        panic!("asked for by {PANIC_VARIABLE}");
    }
}

/// Ends the process: continuing could give the program wrong data.
pub fn fail_closed(reason: &str) -> ! {
    sys::say(&format!("{reason}; the program is stopped, for it could otherwise read wrong data"));
    sys::end_program();
}
