//! execl, execlp and execle: the members of the exec family with a variable number of arguments.
//!
//! Stable Rust cannot define variadic functions. These few instructions put the arguments that came
//! in registers right below those that came on the stack: then all of them are one array, as exec
//! requires. Nothing is copied or allocated, so there can be any number of them, and a child of
//! vfork may call.
//!
//! They are naked functions, not `global_asm!`, whose symbols a cdylib does not export.

use std::ffi::{c_char, c_int};

use crate::exec::{execv, execve, execvp};

type Words = *const *const c_char;

/// Calls a function with the address of the array, and returns what it returns.
#[cfg(target_arch = "x86_64")]
macro_rules! gather {
    ($function:path) => {
        // The return address lies between the two parts; it is moved below them, and back at the
        // end. The stack is aligned to 16 bytes at the call.
        std::arch::naked_asm!(
            ".cfi_startproc",
            "pop rax",
            ".cfi_adjust_cfa_offset -8",
            ".cfi_register rip, rax",
            "push r9",
            "push r8",
            "push rcx",
            "push rdx",
            "push rsi",
            "push rdi",
            ".cfi_adjust_cfa_offset 48",
            "mov rdi, rsp",
            "push rax",
            ".cfi_adjust_cfa_offset 8",
            ".cfi_rel_offset rip, 0",
            "sub rsp, 8",
            ".cfi_adjust_cfa_offset 8",
            "call {function}",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            "pop rcx",
            ".cfi_adjust_cfa_offset -8",
            ".cfi_register rip, rcx",
            "add rsp, 48",
            ".cfi_adjust_cfa_offset -48",
            "push rcx",
            ".cfi_adjust_cfa_offset 8",
            ".cfi_rel_offset rip, 0",
            "ret",
            ".cfi_endproc",
            function = sym $function,
        )
    };
}

/// Calls a function with the address of the array, and returns what it returns.
#[cfg(target_arch = "aarch64")]
macro_rules! gather {
    ($function:path) => {
        std::arch::naked_asm!(
            ".cfi_startproc",
            "stp x6, x7, [sp, #-16]!",
            "stp x4, x5, [sp, #-16]!",
            "stp x2, x3, [sp, #-16]!",
            "stp x0, x1, [sp, #-16]!",
            ".cfi_adjust_cfa_offset 64",
            "mov x0, sp",
            "stp x29, x30, [sp, #-16]!",
            ".cfi_adjust_cfa_offset 16",
            ".cfi_rel_offset x29, 0",
            ".cfi_rel_offset x30, 8",
            "mov x29, sp",
            "bl {function}",
            "ldp x29, x30, [sp], #16",
            ".cfi_adjust_cfa_offset -16",
            ".cfi_restore x29",
            ".cfi_restore x30",
            "add sp, sp, #64",
            ".cfi_adjust_cfa_offset -64",
            "ret",
            ".cfi_endproc",
            function = sym $function,
        )
    };
}

/// # Safety
/// As execl(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execl() -> c_int {
    gather!(execl_words)
}

/// # Safety
/// As execlp(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execlp() -> c_int {
    gather!(execlp_words)
}

/// # Safety
/// As execle(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execle() -> c_int {
    gather!(execle_words)
}

/// # Safety
/// `words` are the arguments of execl: a path, and strings up to a null.
unsafe extern "C" fn execl_words(words: Words) -> c_int {
    // SAFETY: the arguments after the path are an array that ends with null.
    unsafe { execv(words.read(), words.add(1)) }
}

/// # Safety
/// `words` are the arguments of execlp: a file's name, and strings up to a null.
unsafe extern "C" fn execlp_words(words: Words) -> c_int {
    // SAFETY: the arguments after the name are an array that ends with null.
    unsafe { execvp(words.read(), words.add(1)) }
}

/// # Safety
/// `words` are the arguments of execle: a path, strings up to a null, and an environment.
unsafe extern "C" fn execle_words(words: Words) -> c_int {
    // SAFETY: the arguments after the path are an array that ends with null; the environment
    // follows the null.
    unsafe {
        let arguments = words.add(1);
        let mut end = arguments;
        while !end.read().is_null() {
            end = end.add(1);
        }
        execve(words.read(), arguments, end.add(1).read().cast())
    }
}
