//! The archive (cpio, "newc") with the files that a guest's kernel starts with.
//!
//! It is written here because the console's device file in it cannot be made by other users than
//! root, which a program that makes archives from files would need.

use std::path::Path;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;
/// The console's device number.
const CONSOLE: (u32, u32) = (5, 1);
/// Headers and files begin at multiples of this.
const ALIGNMENT: usize = 4;

/// The archive of a first program and of the modules that it loads.
pub(super) fn archive(init: &[u8], modules: &Path) -> Vec<u8> {
    let mut archive = Vec::new();
    add(&mut archive, "dev", DIRECTORY, (0, 0), &[]);
    add(&mut archive, "dev/console", CHARACTER_DEVICE, CONSOLE, &[]);
    add(&mut archive, "init", PROGRAM, (0, 0), init);
    add(&mut archive, "modules", DIRECTORY, (0, 0), &[]);
    for entry in std::fs::read_dir(modules).into_iter().flatten().flatten() {
        let name = format!("modules/{}", entry.file_name().to_string_lossy());
        let module = std::fs::read(entry.path()).expect("a module of the kernel");
        add(&mut archive, &name, PROGRAM, (0, 0), &module);
    }
    add(&mut archive, "TRAILER!!!", 0, (0, 0), &[]);
    archive
}

fn add(archive: &mut Vec<u8>, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
    let length = |bytes: usize| u32::try_from(bytes).expect("less than 4 GiB");
    // Inode 0 and one link: no two entries are the same file.
    let fields = [
        0,
        mode,
        0,
        0,
        1,
        0,
        length(content.len()),
        0,
        0,
        device.0,
        device.1,
        length(name.len() + 1),
        0,
    ];
    archive.extend(b"070701");
    archive.extend(fields.iter().flat_map(|field| format!("{field:08X}").into_bytes()));
    archive.extend(name.as_bytes());
    archive.push(0);
    align(archive);
    archive.extend(content);
    align(archive);
}

fn align(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(ALIGNMENT), 0);
}
