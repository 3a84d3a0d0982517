// SPDX-License-Identifier: GPL-2.0-or-later
//! Follows `exec`: QEMU 7.2 would leave the program to the processor. Before it does, this plugin
//! replaces the process by QEMU with itself and the new program.
//!
//! What QEMU cannot run as the kernel would is left to QEMU, and goes on unrecorded: programs of
//! another processor or format, those whose file gives rights (setuid, capabilities), those that
//! are named by a descriptor, and those to which QEMU, the plugin or the capture file are out of
//! reach, in another root folder or for another user.

use std::ffi::{CStr, CString, OsStr, OsString, c_char};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::image::{Image, NAME_OPTION};
use crate::qemu;

/// The program's address 0 in this process; none before its first instruction was translated.
static GUEST_BASE: AtomicU64 = AtomicU64::new(u64::MAX);

/// Longest path and longest argument that the kernel takes.
const PATH_BYTES_MAX: usize = 4096;
const WORD_BYTES_MAX: usize = 128 << 10;
/// The most arguments or variables that are read; more are left to the kernel to refuse or take.
const WORDS_MAX: usize = 1 << 20;
const PAGE_BYTES: u64 = 4096;
/// The most interpreters that are scripts themselves, and the longest first line, as in the kernel.
const INTERPRETERS_MAX: usize = 4;
const FIRST_LINE_BYTES: u64 = 256;
const SETUID: u32 = 0o4000;
const SETGID_OF_A_PROGRAM: u32 = 0o2010;

/// The byte of an ELF header that holds its class, and the one for 64 bits.
const CLASS_AT: usize = 4;
const CLASS_64: u8 = 2;
/// Where an ELF header holds the processor, and this machine's.
const MACHINE_AT: usize = 18;
#[cfg(target_arch = "x86_64")]
const MACHINE: [u8; 2] = 62u16.to_le_bytes();
#[cfg(not(target_arch = "x86_64"))]
const MACHINE: [u8; 2] = 183u16.to_le_bytes();

/// Learns where the program's memory is in this process, from a translated instruction.
pub(crate) fn learn_base(block: *mut qemu::Block) {
    if GUEST_BASE.load(Ordering::Relaxed) != u64::MAX {
        return;
    }
    // SAFETY: QEMU's block, valid during its call; it has at least one instruction.
    let (here, there) = unsafe {
        let first = qemu::qemu_plugin_tb_get_insn(block, 0);
        (qemu::qemu_plugin_insn_haddr(first) as u64, qemu::qemu_plugin_insn_vaddr(first))
    };
    if here != 0 {
        GUEST_BASE.store(here.wrapping_sub(there), Ordering::Relaxed);
    }
}

/// A call of `execve` or `execveat`, with the addresses of the program.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    path: u64,
    arguments: u64,
    variables: u64,
    /// The path is relative to a descriptor, or is a descriptor.
    by_descriptor: bool,
}

impl Call {
    /// Returns the call if `number` is one of the two.
    #[must_use]
    pub fn of(number: i64, given: [u64; 5]) -> Option<Self> {
        let [first, second, third, fourth, fifth] = given;
        if number == libc::SYS_execve {
            let by_descriptor = false;
            return Some(Self { path: first, arguments: second, variables: third, by_descriptor });
        }
        // An int in a register of 64 bits.
        #[allow(clippy::cast_possible_truncation)]
        let is_here = first as i32 == libc::AT_FDCWD && fifth == 0;
        (number == libc::SYS_execveat).then_some(Self {
            path: second,
            arguments: third,
            variables: fourth,
            by_descriptor: !is_here,
        })
    }

    /// Replaces this process by QEMU with the program, and does not return. Returns true if the
    /// program will begin unrecorded instead, false if there is none to begin.
    #[must_use]
    pub fn follow(self, image: &Image, ring: &str) -> bool {
        let Some(path) = text_at(self.path, PATH_BYTES_MAX) else { return false };
        if self.by_descriptor {
            return true;
        }
        let path = PathBuf::from(OsString::from_vec(path));
        let path = if path == Path::new("/proc/self/exe") { image.file.clone() } else { path };
        let words = words_at(self.arguments).and_then(|it| Some((it, words_at(self.variables)?)));
        let Some((words, variables)) = words else { return may_run(&path) };
        let Some(program) = resolve(path.clone(), words) else { return may_run(&path) };
        if is_reachable(Path::new(ring), image) {
            replace(image, program, &variables);
        }
        true
    }
}

/// A program that QEMU can load, and its arguments with its name.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    pub file: PathBuf,
    pub words: Vec<OsString>,
}

/// Finds the file that is loaded for `path`, through `#!` lines. None if the kernel would refuse
/// it, or QEMU would run it otherwise than the kernel.
#[must_use]
pub fn resolve(path: PathBuf, words: Vec<OsString>) -> Option<Program> {
    let mut program = Program { file: path, words };
    for _ in 0..=INTERPRETERS_MAX {
        if !may_run(&program.file) || gives_rights(&program.file) {
            return None;
        }
        let mut begins = Vec::new();
        File::open(&program.file).ok()?.take(FIRST_LINE_BYTES).read_to_end(&mut begins).ok()?;
        let Some(line) = begins.strip_prefix(b"#!") else {
            return is_for_qemu(&begins).then_some(program);
        };
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
        let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
        let (interpreter, argument) = (&line[..end], line[end..].trim_ascii());
        let word = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
        let mut words = vec![word(interpreter)];
        words.extend((!argument.is_empty()).then(|| word(argument)));
        words.push(program.file.into_os_string());
        words.extend(program.words.into_iter().skip(1));
        program = Program { file: PathBuf::from(word(interpreter)), words };
    }
    None
}

fn is_for_qemu(begins: &[u8]) -> bool {
    let machine = begins.get(MACHINE_AT..MACHINE_AT + MACHINE.len());
    begins.starts_with(b"\x7fELF")
        && begins.get(CLASS_AT) == Some(&CLASS_64)
        && machine == Some(&MACHINE)
}

fn c_text(path: &Path) -> Option<CString> {
    CString::new(path.as_os_str().as_bytes()).ok()
}

fn is_allowed(path: &Path, rights: i32) -> bool {
    let allows = |path: CString| {
        // SAFETY: a C string that lives through the call.
        unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), rights, libc::AT_EACCESS) == 0 }
    };
    c_text(path).is_some_and(allows)
}

/// True if the kernel would begin this file.
fn may_run(path: &Path) -> bool {
    path.metadata().is_ok_and(|data| data.is_file()) && is_allowed(path, libc::X_OK)
}

/// True if the file's program gets rights that its caller has not.
fn gives_rights(path: &Path) -> bool {
    let mode = path.metadata().map_or(0, |data| data.mode());
    let by_mode = mode & SETUID != 0 || mode & SETGID_OF_A_PROGRAM == SETGID_OF_A_PROGRAM;
    let has_capabilities = |path: CString| {
        // SAFETY: C strings; without a buffer the length of the attribute is returned.
        unsafe {
            let name = c"security.capability".as_ptr();
            libc::getxattr(path.as_ptr(), name, std::ptr::null_mut(), 0) >= 0
        }
    };
    by_mode || c_text(path).is_some_and(has_capabilities)
}

/// True if the new QEMU can open the capture file and the plugin.
fn is_reachable(ring: &Path, image: &Image) -> bool {
    let has_plugin = image.plugin().is_some_and(|plugin| is_allowed(&plugin, libc::R_OK));
    has_plugin && is_allowed(ring, libc::R_OK | libc::W_OK)
}

/// Calls QEMU as it was called for this program, for another one. Returns only if that fails.
fn replace(image: &Image, program: Program, variables: &[OsString]) {
    let Program { file, words } = program;
    let name = words.first().cloned().unwrap_or_else(|| file.clone().into_os_string());
    let rest = words.into_iter().skip(1);
    // QEMU would take it for an option.
    let is_option = file.as_os_str().as_bytes().starts_with(b"-");
    let file = if is_option { Path::new(".").join(file) } else { file };
    let words = image.qemu.iter().cloned().chain([NAME_OPTION.into(), name, file.into()]);
    let c_words = |words: &mut dyn Iterator<Item = OsString>| -> Option<Vec<CString>> {
        words.map(|word| CString::new(word.into_vec()).ok()).collect()
    };
    let (Some(words), Some(variables)) =
        (c_words(&mut words.chain(rest)), c_words(&mut variables.iter().cloned()))
    else {
        return;
    };
    let pointers = |words: &[CString]| -> Vec<*const c_char> {
        words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (words_at, variables_at) = (pointers(&words), pointers(&variables));
    // SAFETY: lists of C strings that live through the call, each ended by null.
    unsafe {
        let qemu = c"/proc/self/exe".as_ptr();
        libc::execve(qemu, words_at.as_ptr(), variables_at.as_ptr());
    }
}

/// Reads memory of the program into `into`; false if not all of it can be read.
fn read(address: u64, into: &mut [u8]) -> bool {
    let base = GUEST_BASE.load(Ordering::Relaxed);
    if base == u64::MAX {
        return false;
    }
    let ours = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let theirs = libc::iovec {
        iov_base: base.wrapping_add(address) as *mut libc::c_void,
        iov_len: into.len(),
    };
    // SAFETY: the kernel writes at most the length of `into` there, and checks the other address.
    let count = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const ours, 1, &raw const theirs, 1, 0)
    };
    usize::try_from(count) == Ok(into.len())
}

/// Reads a C string of the program. None if it is not there, or longer.
fn text_at(address: u64, bytes_max: usize) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    let mut page = vec![0u8; usize::try_from(PAGE_BYTES).ok()?];
    let mut at = address;
    while text.len() < bytes_max {
        // Up to the end of the page: the next one may not be there.
        let length = usize::try_from(PAGE_BYTES - at % PAGE_BYTES).ok()?;
        let part = &mut page[..length];
        if !read(at, part) {
            return None;
        }
        if let Ok(part) = CStr::from_bytes_until_nul(part) {
            text.extend(part.to_bytes());
            return (text.len() < bytes_max).then_some(text);
        }
        text.extend_from_slice(part);
        at = at.checked_add(length as u64)?;
    }
    None
}

/// Reads a list of C strings, ended by null. No list is an empty one, as in Linux.
fn words_at(address: u64) -> Option<Vec<OsString>> {
    let mut words = Vec::new();
    if address == 0 {
        return Some(words);
    }
    while words.len() < WORDS_MAX {
        let mut place = [0u8; 8];
        let at = address.checked_add(words.len() as u64 * 8)?;
        if !read(at, &mut place) {
            return None;
        }
        match u64::from_le_bytes(place) {
            0 => return Some(words),
            word => words.push(OsString::from_vec(text_at(word, WORD_BYTES_MAX)?)),
        }
    }
    None
}
