// SPDX-License-Identifier: GPL-2.0-or-later
//! A plugin for qemu-user (`qemu-x86_64 -plugin …`): it sends every load and store of the program through
//! a model of caches and records what reaches main memory, in the capture file of docs/TRACE.md.
//!
//! Each thread of the program has a first-level cache of its own, which it looks into without a lock.
//! Behind it one lock covers the last level and the ring: only misses come there, and the order in which
//! they do is the order of the trace.
//!
//! The process that is started is recorded, with all its threads. Children that it forks run on
//! unrecorded, and so do programs started by `exec`, which leave QEMU; both are counted.

pub mod cache;
mod qemu;
mod stream;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use cache::{Cache, LINE_BYTES, Outcome};
use stream::{Counters, Stream};

/// Threads at one time; QEMU numbers them densely. More end the recording, loudly.
const MAX_PROCESSORS: usize = 4096;
/// Sets of a first level: 256 KiB in 8 ways. A larger one is refused.
const MAX_L1_SETS: usize = 512;

const READ: u64 = 0;
const WRITE: u64 = 1;
const WRITE_BACK: u64 = 2;

/// QEMU asks for the version of its interface by this name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name is QEMU's")]
pub static qemu_plugin_version: c_int = qemu::INTERFACE_VERSION;

/// False before the recording, in forked children, and when the recorder is gone.
static IS_RECORDING: AtomicBool = AtomicBool::new(false);

/// One thread of the program.
struct Processor {
    /// Its number in the trace.
    thread: u64,
    l1: Option<Cache>,
}

/// By QEMU's number of the thread. Never freed: QEMU may call for a thread until the process ends.
static PROCESSORS: [AtomicPtr<Processor>; MAX_PROCESSORS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_PROCESSORS];

/// What all threads share.
struct Shared {
    llc: Option<Cache>,
    stream: Stream,
}

static SHARED: Mutex<Option<Shared>> = Mutex::new(None);

static COUNTERS: OnceLock<Counters> = OnceLock::new();

/// What QEMU's command line says of the caches; 0 bytes = no such level.
#[derive(Debug, Default, Clone)]
struct Settings {
    ring: String,
    l1_bytes: u64,
    l1_ways: usize,
    llc_bytes: u64,
    llc_ways: usize,
}

static SETTINGS: Mutex<Option<Settings>> = Mutex::new(None);

impl Settings {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut settings = Self::default();
        for argument in arguments {
            let (name, value) =
                argument.split_once('=').ok_or_else(|| format!("{argument}: not NAME=VALUE"))?;
            let number = || value.parse::<u64>().map_err(|_| format!("{argument}: no number"));
            match name {
                "ring" => value.clone_into(&mut settings.ring),
                "l1" => settings.l1_bytes = number()?,
                "l1ways" => settings.l1_ways = usize::try_from(number()?).unwrap_or(0),
                "llc" => settings.llc_bytes = number()?,
                "llcways" => settings.llc_ways = usize::try_from(number()?).unwrap_or(0),
                _ => return Err(format!("{argument}: unknown")),
            }
        }
        Ok(settings)
    }
}

/// A level of `bytes`, none for 0.
fn level(bytes: u64, ways: usize) -> Result<Option<Cache>, String> {
    if bytes == 0 {
        return Ok(None);
    }
    let cache = Cache::new(bytes, ways);
    cache.map(Some).ok_or_else(|| format!("no cache of {bytes} bytes has {ways} ways"))
}

impl Processor {
    fn new(thread: u64, settings: &Settings) -> Self {
        let l1 = level(settings.l1_bytes, settings.l1_ways).unwrap_or(None);
        Self { thread, l1 }
    }

    fn reference(&mut self, line: u64, is_store: bool, front: &Front) {
        let Some(l1) = &mut self.l1 else {
            return self.miss(line, is_store, None, is_store, front);
        };
        let outcome = l1.reference(line, is_store);
        #[allow(clippy::cast_possible_truncation, reason = "masked to the number of sets")]
        let set = (line & l1.set_mask()) as usize % MAX_L1_SETS;
        front.recent[set].store(l1.front(line), Ordering::Relaxed);
        if let Outcome::Miss(changed) = outcome {
            self.miss(line, is_store, changed, false, front);
        }
    }

    /// The reference goes on; `changed` is the line that the first level gave up for it. Without a
    /// first level the last one sees stores itself (`store_below`).
    fn miss(
        &mut self,
        line: u64,
        is_store: bool,
        changed: Option<u64>,
        store_below: bool,
        front: &Front,
    ) {
        if !IS_RECORDING.load(Ordering::Relaxed) {
            return;
        }
        let Ok(mut shared) = SHARED.lock() else { return };
        let Some(Shared { llc, stream }) = shared.as_mut() else { return };
        let access = if is_store { WRITE } else { READ };
        let mut push = |line: u64, access: u64| {
            let ticks = front.ticks.load(Ordering::Relaxed);
            front.ticks.store(0, Ordering::Relaxed);
            stream.push(line, access, self.thread, ticks)
        };
        let mut goes_on = true;
        if let Some(llc) = llc {
            if let Some(changed) = changed.filter(|changed| !llc.take_back(*changed)) {
                goes_on &= push(changed, WRITE_BACK);
            }
            if let Outcome::Miss(changed) = llc.reference(line, store_below) {
                goes_on &= push(line, access);
                if let Some(changed) = changed {
                    goes_on &= push(changed, WRITE_BACK);
                }
            }
        } else {
            goes_on &= push(line, access);
            if let Some(changed) = changed {
                goes_on &= push(changed, WRITE_BACK);
            }
        }
        if !goes_on {
            IS_RECORDING.store(false, Ordering::Relaxed);
            if !stream.is_stopped() {
                say("the recorder is gone; the program goes on, unrecorded");
            }
        }
    }
}

/// What a capture costs is looked at here, for each access of the program: whether it is to the line that
/// its set of the first level was asked for last, so that nothing changes. Plain arrays at fixed addresses:
/// one dependent load more in this path took a quarter longer.
///
/// Its size is a power of two, so that finding a thread's is a shift.
#[repr(align(8192))]
struct Front {
    /// Accesses since the thread's last record.
    ticks: AtomicU64,
    /// The first level's most recent line of each set ([`Cache::front`]); 0 before the first.
    recent: [AtomicU64; MAX_L1_SETS],
}

static FRONTS: [Front; MAX_PROCESSORS] = [const {
    Front { ticks: AtomicU64::new(0), recent: [const { AtomicU64::new(0) }; MAX_L1_SETS] }
}; MAX_PROCESSORS];

/// [`Cache::set_mask`] of the first level.
static L1_SET_MASK: AtomicU64 = AtomicU64::new(0);

/// Where QEMU's description of an access says that it stores, and the logarithm of its bytes. Both are
/// checked against QEMU's own answers in [`on_further_access`], because they are no part of the
/// interface; asking for each access takes two calls and a quarter of the time.
const STORE_BIT: u32 = 17;
const SIZE_BIT: u32 = 4;
const SIZE_MASK: u32 = 7;

/// Descriptions that were checked, one bit each; those that differ in bits from 18 on share one.
static CHECKED: [AtomicU64; 1 << 12] = [const { AtomicU64::new(0) }; 1 << 12];

/// Whether this description says what QEMU says of it; asked once for each.
#[inline]
fn is_known(description: u32) -> bool {
    let place = &CHECKED[(description >> 6) as usize % CHECKED.len()];
    let bit = 1u64 << (description & 63);
    if place.load(Ordering::Relaxed) & bit != 0 {
        return true;
    }
    // SAFETY: QEMU's description of an access, passed back to it.
    let (shift, is_store) = unsafe {
        (qemu::qemu_plugin_mem_size_shift(description), qemu::qemu_plugin_mem_is_store(description))
    };
    place.fetch_or(bit, Ordering::Relaxed);
    is_store == is_store_by(description) && shift == shift_by(description)
}

fn is_store_by(description: u32) -> bool {
    description >> STORE_BIT & 1 == 1
}

fn shift_by(description: u32) -> u32 {
    description >> SIZE_BIT & SIZE_MASK
}

#[allow(clippy::cast_possible_truncation, reason = "masked to the number of sets")]
extern "C" fn on_access(processor: c_uint, description: u32, address: u64, _: *mut c_void) {
    let front = &FRONTS[processor as usize % MAX_PROCESSORS];
    // Only this thread writes it: no atomic addition is needed.
    front.ticks.store(front.ticks.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    let line = address / LINE_BYTES;
    let set = (line & L1_SET_MASK.load(Ordering::Relaxed)) as usize;
    // SAFETY: `install` refuses a first level of more sets than there are places.
    let recent = unsafe { front.recent.get_unchecked(set) }.load(Ordering::Relaxed);
    let is_load = u64::from(!is_store_by(description));
    let is_repeat = recent | is_load == line << 1 | 1;
    let bytes = 1 << shift_by(description);
    if !is_repeat || address % LINE_BYTES + bytes > LINE_BYTES {
        on_further_access(processor, description, address);
    }
}

#[inline(never)]
fn on_further_access(index: c_uint, description: u32, address: u64) {
    let Some(place) = PROCESSORS.get(index as usize) else { return };
    // SAFETY: null or a leaked box. QEMU calls for a processor only on the thread that runs it, so
    // nobody else holds a reference.
    let Some(processor) = (unsafe { place.load(Ordering::Relaxed).as_mut() }) else { return };
    if !is_known(description) {
        say("this QEMU describes accesses in a way that is not known; qemu-user 7.2 is");
        std::process::abort();
    }
    let (shift, is_store) = (shift_by(description), is_store_by(description));
    let last = address + (1 << shift) - 1;
    let front = &FRONTS[index as usize % MAX_PROCESSORS];
    for line in address / LINE_BYTES..=last / LINE_BYTES {
        processor.reference(line, is_store, front);
    }
}

extern "C" fn on_translation(_: qemu::PluginId, block: *mut qemu::Block) {
    // SAFETY: QEMU's block, valid during this call, and its instructions by their index.
    unsafe {
        for index in 0..qemu::qemu_plugin_tb_n_insns(block) {
            qemu::qemu_plugin_register_vcpu_mem_cb(
                qemu::qemu_plugin_tb_get_insn(block, index),
                on_access,
                qemu::NO_REGISTERS,
                qemu::LOADS_AND_STORES,
                std::ptr::null_mut(),
            );
        }
    }
}

extern "C" fn on_processor(_: qemu::PluginId, index: c_uint) {
    let Some(thread) = COUNTERS.get().map(Counters::next_thread) else { return };
    let Some(place) = PROCESSORS.get(index as usize) else {
        IS_RECORDING.store(false, Ordering::Relaxed);
        say(&format!("more than {MAX_PROCESSORS} threads at once; recording ends here"));
        return;
    };
    // SAFETY: as in `on_access`; an earlier thread of this number has ended, this one has not begun.
    if let Some(ended) = unsafe { place.load(Ordering::Acquire).as_mut() } {
        ended.thread = thread;
        return;
    }
    let Some(settings) = SETTINGS.lock().ok().and_then(|settings| settings.clone()) else { return };
    let processor = Box::new(Processor::new(thread, &settings));
    place.store(Box::into_raw(processor), Ordering::Release);
}

#[allow(clippy::too_many_arguments, reason = "QEMU's signature")]
extern "C" fn on_system_call(
    _: qemu::PluginId,
    _: c_uint,
    number: i64,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
) {
    if number == libc::SYS_execve || number == libc::SYS_execveat {
        COUNTERS.get().inspect(|counters| counters.count_exec());
    }
}

/// Runs in a forked child before anything else there.
extern "C" fn in_child() {
    IS_RECORDING.store(false, Ordering::Relaxed);
    COUNTERS.get().inspect(|counters| counters.count_fork());
}

fn say(text: &str) {
    if let Ok(line) = CString::new(format!("farpool-capture-qemu: {text}\n")) {
        // SAFETY: a C string that lives through the call.
        unsafe { qemu::qemu_plugin_outs(line.as_ptr()) };
        eprint!("{}", line.to_string_lossy());
    }
}

fn install(id: qemu::PluginId, arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let settings = Settings::parse(arguments)?;
    if let Some(l1) = level(settings.l1_bytes, settings.l1_ways)? {
        if l1.set_mask() >= MAX_L1_SETS as u64 {
            return Err(format!("a first level of more than {MAX_L1_SETS} sets"));
        }
        L1_SET_MASK.store(l1.set_mask(), Ordering::Relaxed);
    }
    let llc = level(settings.llc_bytes, settings.llc_ways)?;
    let stream = Stream::open(&settings.ring)?;
    COUNTERS.get_or_init(|| stream.counters());
    let poisoned = |_| "a lock is poisoned".to_owned();
    *SHARED.lock().map_err(poisoned)? = Some(Shared { llc, stream });
    *SETTINGS.lock().map_err(|_| "a lock is poisoned".to_owned())? = Some(settings);
    IS_RECORDING.store(true, Ordering::Relaxed);
    // SAFETY: our id and functions that live as long as the process.
    unsafe {
        if libc::pthread_atfork(None, None, Some(in_child)) != 0 {
            return Err("pthread_atfork failed".to_owned());
        }
        qemu::qemu_plugin_register_vcpu_init_cb(id, on_processor);
        qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
        qemu::qemu_plugin_register_vcpu_syscall_cb(id, on_system_call);
    }
    Ok(())
}

/// QEMU's entry.
///
/// # Safety
/// Called by QEMU, once, with `count` C strings at `arguments`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: qemu::PluginId,
    _info: *const c_void,
    count: c_int,
    arguments: *const *const c_char,
) -> c_int {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: as QEMU promises: `count` valid strings.
    let text = |index| unsafe { CStr::from_ptr(*arguments.add(index)) };
    match install(id, (0..count).map(|index| text(index).to_string_lossy().into_owned())) {
        Ok(()) => 0,
        Err(reason) => {
            eprintln!("farpool-capture-qemu: {reason}");
            -1
        }
    }
}
