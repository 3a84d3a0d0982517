//! The sidecar as bytes: a static position-independent executable, made by `build.rs`.
//!
//! A crate of its own, because a package that only wants to inject something else (a test program)
//! should not build the sidecar.

/// The ELF file of `farpool-sidecar`.
pub static SIDECAR_ELF: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/farpool-sidecar"));

#[cfg(test)]
mod tests {
    use super::SIDECAR_ELF;

    /// The break is the host program's: no code of the image may ask the kernel for it. glibc asks
    /// by `mov $12, %eax; syscall`.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn nothing_moves_the_break() {
        const BRK: [u8; 7] = [0xb8, 12, 0, 0, 0, 0x0f, 0x05];
        const EXIT_GROUP: [u8; 7] = [0xb8, 231, 0, 0, 0, 0x0f, 0x05];
        let has = |code: [u8; 7]| SIDECAR_ELF.windows(code.len()).any(|bytes| bytes == code);
        assert!(!has(BRK));
        assert!(has(EXIT_GROUP), "the test knows no longer how calls are made");
    }
}
