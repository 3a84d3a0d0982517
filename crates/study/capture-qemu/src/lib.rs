// SPDX-License-Identifier: GPL-2.0-or-later
//! A plugin for qemu-user (`qemu-x86_64 -plugin …`): it sends every load and store of the program
//! through a model of caches and records what reaches main memory, in the capture file of
//! docs/researchers/trace.md.
//!
//! Each thread of the program has its own filter, used without a lock: a first-level cache
//! (`lines`), or a memory of the pages it recorded (`pages`). Behind it one lock covers the last
//! level and the ring: only references that pass the filter take it, and their order there is the
//! order of the trace.
//!
//! The process that is started is recorded, with all its threads. Children that it forks run on
//! unrecorded, and so do programs started by `exec`, which leave QEMU; both are counted. With
//! `children=1` both are followed: a forked child begins with empty filters of its own
//! (`in_child`), and `exec` begins QEMU again (`follow`).

#![allow(unreachable_pub, reason = "many modules; the root says what leaves the crate")]

mod access;
pub mod cache;
pub mod follow;
pub mod image;
mod line_access;
mod page_access;
pub mod pages;
mod qemu;
mod settings;
pub mod stream;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, OnceLock};

use cache::Cache;
use follow::Call;
use image::Image;
use pages::PageFilter;
use settings::Settings;
use stream::{Counters, Stream};

/// The most threads at one time; QEMU numbers them densely. More end the recording with a message.
const MAX_PROCESSORS: usize = 4096;

const READ: u64 = 0;
const WRITE: u64 = 1;
const WRITE_BACK: u64 = 2;

/// QEMU reads the version of its interface from this symbol.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name is QEMU's")]
pub static qemu_plugin_version: c_int = qemu::INTERFACE_VERSION;

/// False before the recording, in forked children, and after the recorder has gone.
static IS_RECORDING: AtomicBool = AtomicBool::new(false);

/// One thread of the program.
struct Processor {
    /// Its number in the trace.
    thread: u64,
    filter: Filter,
}

/// A thread's filter, before the state that all threads share.
enum Filter {
    /// Its first-level cache, if there is one.
    Lines(Option<Cache>),
    Pages(PageFilter),
}

impl Filter {
    fn new(settings: &Settings) -> Self {
        if settings.page_window > 0 {
            return Self::Pages(PageFilter::new(settings.page_window));
        }
        // `install` refused invalid caches.
        Self::Lines(settings.l1().unwrap_or(None))
    }
}

/// Indexed by QEMU's thread number. Never freed: QEMU may call for a thread until the process ends.
static PROCESSORS: [AtomicPtr<Processor>; MAX_PROCESSORS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_PROCESSORS];

/// State that all threads share.
struct Shared {
    llc: Option<Cache>,
    stream: Stream,
}

/// Never freed: a forked child leaves its parent's, whose lock another thread may hold.
static SHARED: AtomicPtr<Mutex<Shared>> = AtomicPtr::new(std::ptr::null_mut());

static COUNTERS: OnceLock<Counters> = OnceLock::new();

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// The program that runs here; only known if children are followed.
static IMAGE: OnceLock<Image> = OnceLock::new();

/// Returns the state of the thread that QEMU calls `index`; called on that thread.
///
/// # Safety
/// Only in a call by QEMU for this thread, and only once in it: no other reference exists then.
unsafe fn processor<'a>(index: c_uint) -> Option<&'a mut Processor> {
    let place = PROCESSORS.get(index as usize)?;
    // SAFETY: null or a leaked box, and the caller guarantees the only reference.
    match unsafe { place.load(Ordering::Relaxed).as_mut() } {
        None if IS_RECORDING.load(Ordering::Relaxed) && IMAGE.get().is_some() => {
            // The thread that forked, in the child: it begins at its first access.
            let thread = COUNTERS.get()?.next_thread();
            let filter = Filter::new(SETTINGS.get()?);
            Some(place_new(place, Processor { thread, filter }))
        }
        known => known,
    }
}

fn place_new(place: &AtomicPtr<Processor>, processor: Processor) -> &'static mut Processor {
    let processor = Box::leak(Box::new(processor));
    place.store(processor, Ordering::Release);
    processor
}

/// Passes the shared state to `use_it`, unless recording has ended; `use_it` returns whether the
/// recorder still reads.
fn with_shared(use_it: impl FnOnce(&mut Shared) -> bool) {
    if !IS_RECORDING.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: null or a leaked box.
    let Some(shared) = (unsafe { SHARED.load(Ordering::Acquire).as_ref() }) else { return };
    let Ok(mut shared) = shared.lock() else { return };
    if !use_it(&mut shared) {
        IS_RECORDING.store(false, Ordering::Relaxed);
        if !shared.stream.is_stopped() {
            say("the recorder is gone, or an address has more than 50 bits; the program goes on, \
                 unrecorded");
        }
    }
}

extern "C" fn on_line_translation(_: qemu::PluginId, block: *mut qemu::Block) {
    follow::learn_base(block);
    watch(block, line_access::on_access);
}

extern "C" fn on_page_translation(_: qemu::PluginId, block: *mut qemu::Block) {
    follow::learn_base(block);
    watch(block, page_access::on_access);
}

/// Of a program that is followed and not recorded.
extern "C" fn on_other_translation(_: qemu::PluginId, block: *mut qemu::Block) {
    follow::learn_base(block);
}

/// Registers `callback` for each access of a block.
fn watch(block: *mut qemu::Block, callback: qemu::MemoryCallback) {
    // SAFETY: QEMU's block, valid during its call, and its instructions by their index.
    unsafe {
        for index in 0..qemu::qemu_plugin_tb_n_insns(block) {
            qemu::qemu_plugin_register_vcpu_mem_cb(
                qemu::qemu_plugin_tb_get_insn(block, index),
                callback,
                qemu::NO_REGISTERS,
                qemu::LOADS_AND_STORES,
                std::ptr::null_mut(),
            );
        }
    }
}

extern "C" fn on_processor(_: qemu::PluginId, index: c_uint) {
    if IMAGE.get().is_some() && !IS_RECORDING.load(Ordering::Relaxed) {
        return;
    }
    let Some(thread) = COUNTERS.get().map(Counters::next_thread) else { return };
    let Some(place) = PROCESSORS.get(index as usize) else {
        IS_RECORDING.store(false, Ordering::Relaxed);
        say(&format!("more than {MAX_PROCESSORS} threads at once; recording ends here"));
        return;
    };
    let Some(settings) = SETTINGS.get() else { return };
    line_access::begin(index);
    page_access::begin(index);
    // SAFETY: an earlier thread of this number has ended, this one has not begun.
    if let Some(processor) = unsafe { place.load(Ordering::Relaxed).as_mut() } {
        processor.thread = thread;
        // A cache outlives a thread, but a filter's memory of pages does not.
        if settings.page_window > 0 {
            processor.filter = Filter::new(settings);
        }
        return;
    }
    place_new(place, Processor { thread, filter: Filter::new(settings) });
}

#[allow(clippy::too_many_arguments, reason = "QEMU's signature")]
extern "C" fn on_system_call(
    _: qemu::PluginId,
    _: c_uint,
    number: i64,
    first: u64,
    second: u64,
    third: u64,
    fourth: u64,
    fifth: u64,
    _: u64,
    _: u64,
    _: u64,
) {
    let Some(call) = Call::of(number, [first, second, third, fourth, fifth]) else { return };
    let is_lost = match (IMAGE.get(), SETTINGS.get()) {
        (Some(image), Some(settings)) => call.follow(image, &settings.ring),
        _ => true,
    };
    if is_lost {
        COUNTERS.get().inspect(|counters| counters.count_exec());
    }
}

/// Runs in a forked child before anything else there.
extern "C" fn in_child() {
    let is_recorded = IS_RECORDING.swap(false, Ordering::Relaxed);
    let Some(counters) = COUNTERS.get() else { return };
    if !SETTINGS.get().is_some_and(|settings| settings.has_children) {
        counters.count_fork();
        return;
    }
    // Its other threads are gone, and its caches are not those of its parent's addresses.
    for (index, place) in (0..).zip(&PROCESSORS) {
        if !place.swap(std::ptr::null_mut(), Ordering::Relaxed).is_null() {
            line_access::forget(index);
            page_access::begin(index);
        }
    }
    if let Err(reason) = begin_process(counters.stream(), is_recorded) {
        counters.count_fork();
        say(&reason);
    }
}

/// Begins to record this process, or only to follow it.
fn begin_process(mut stream: Stream, mut is_recorded: bool) -> Result<(), String> {
    let settings = SETTINGS.get().ok_or("there are no settings")?;
    if let Some(image) = IMAGE.get() {
        is_recorded &= stream.begin_process(is_recorded, &image.text())?;
    }
    let shared = Box::new(Mutex::new(Shared { llc: settings.llc()?, stream }));
    SHARED.store(Box::into_raw(shared), Ordering::Release);
    IS_RECORDING.store(is_recorded, Ordering::Relaxed);
    Ok(())
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
    if let Some(l1) = settings.l1()? {
        line_access::set_first_level(&l1)?;
    }
    settings.llc()?;
    let stream = Stream::open(&settings.ring)?;
    let image = if settings.has_children { Some(Image::here()?) } else { None };
    let only = settings.only.as_deref().zip(image.as_ref());
    let is_recorded = only.is_none_or(|(name, image)| image.is_called(name));
    let on_translation = match settings.page_window {
        _ if !is_recorded => on_other_translation,
        0 => on_line_translation,
        _ => on_page_translation,
    };
    COUNTERS.get_or_init(|| stream.counters());
    SETTINGS.get_or_init(|| settings);
    image.map(|image| IMAGE.get_or_init(|| image));
    begin_process(stream, is_recorded)?;
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
    let Ok(count) = usize::try_from(count) else { return -1 };
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
