// SPDX-License-Identifier: GPL-2.0-or-later
//! What is followed through `exec`, and what QEMU is left to start.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use farpool_capture_qemu::follow::resolve;
use farpool_capture_qemu::image::Image;

fn words(line: &str) -> Vec<OsString> {
    line.split(' ').map(OsString::from).collect()
}

#[test]
fn programs_and_scripts_are_found_and_others_left_to_qemu() {
    let folder = std::env::temp_dir().join(format!("farpool-follow-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a folder");
    let put = |name: &str, bytes: &[u8], mode: u32| -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, bytes).expect("a file");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("its mode");
        path
    };
    let shell = std::fs::read("/bin/sh").expect("a shell");
    let script = put("script", b"#! /bin/sh -e\ntrue\n", 0o755);
    let found = resolve(script.clone(), words("name one")).expect("a script");
    assert_eq!(found.file, Path::new("/bin/sh"));
    let expected = ["/bin/sh", "-e", script.to_str().expect("a plain path"), "one"];
    assert_eq!(found.words, expected);
    assert!(resolve(put("program", &shell, 0o755), words("it")).is_some());
    let mut foreign = shell.clone();
    foreign[18] ^= 1;
    let left = [
        put("setuid", &shell, 0o4755),
        put("setgid", &shell, 0o2755),
        put("data", &shell, 0o644),
        put("foreign", &foreign, 0o755),
        put("text", b"true\n", 0o755),
        folder.join("none"),
    ];
    let all = left.iter().all(|path| resolve(path.clone(), words("it")).is_none());
    std::fs::remove_dir_all(&folder).expect("it was there");
    assert!(all);
}

#[test]
fn a_program_is_called_by_its_file_or_its_own_name() {
    let line = "qemu -plugin /lib/it.so,ring=/dev/shm/a -0 -bash /bin/sh -c true";
    let image = Image::of(&words(line)).expect("an image");
    assert_eq!(image.qemu, words("qemu -plugin /lib/it.so,ring=/dev/shm/a"));
    assert_eq!(image.plugin().as_deref(), Some(Path::new("/lib/it.so")));
    assert_eq!(image.text(), "-bash -c true");
    assert!(image.is_called("-bash") && !image.is_called("sh -c") && !image.is_called("true"));
    assert!(Image::of(&words("qemu -cpu max /bin/sh")).is_none());
}
