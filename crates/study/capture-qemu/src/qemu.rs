// SPDX-License-Identifier: GPL-2.0-or-later
//! The part of QEMU's plugin interface (version 1) that is used here; QEMU resolves it when it
//! loads us.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// The ID of a plugin.
pub type PluginId = u64;

/// QEMU's translated block.
#[repr(C)]
#[derive(Debug)]
pub struct Block {
    _opaque: [u8; 0],
}

/// QEMU's instruction of a block.
#[repr(C)]
#[derive(Debug)]
pub struct Instruction {
    _opaque: [u8; 0],
}

/// The interface's version that this plugin was written for.
pub const INTERFACE_VERSION: c_int = 1;
/// A callback that reads no registers.
pub const NO_REGISTERS: c_int = 0;
/// Loads and stores.
pub const LOADS_AND_STORES: c_int = 3;

/// Called for each access of an instruction: processor, description, address, our data.
pub type MemoryCallback = extern "C" fn(c_uint, u32, u64, *mut c_void);
/// Called when a block has been translated.
pub type TranslationCallback = extern "C" fn(PluginId, *mut Block);
/// Called for a processor (a thread of the program).
pub type ProcessorCallback = extern "C" fn(PluginId, c_uint);
/// Called before a system call: its number and eight arguments.
pub type SystemCallCallback =
    extern "C" fn(PluginId, c_uint, i64, u64, u64, u64, u64, u64, u64, u64, u64);

unsafe extern "C" {
    pub fn qemu_plugin_register_vcpu_tb_trans_cb(id: PluginId, callback: TranslationCallback);
    pub fn qemu_plugin_tb_n_insns(block: *const Block) -> usize;
    pub fn qemu_plugin_tb_get_insn(block: *const Block, index: usize) -> *mut Instruction;
    pub fn qemu_plugin_insn_vaddr(instruction: *const Instruction) -> u64;
    pub fn qemu_plugin_insn_haddr(instruction: *const Instruction) -> *mut c_void;
    pub fn qemu_plugin_register_vcpu_mem_cb(
        instruction: *mut Instruction,
        callback: MemoryCallback,
        registers: c_int,
        direction: c_int,
        ours: *mut c_void,
    );
    pub fn qemu_plugin_mem_size_shift(description: u32) -> c_uint;
    pub fn qemu_plugin_mem_is_store(description: u32) -> bool;
    pub fn qemu_plugin_register_vcpu_init_cb(id: PluginId, callback: ProcessorCallback);
    pub fn qemu_plugin_register_vcpu_syscall_cb(id: PluginId, callback: SystemCallCallback);
    pub fn qemu_plugin_outs(text: *const c_char);
}
