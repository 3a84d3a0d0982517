//! Finds the program, and refuses one that the pager cannot get into.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Why the program cannot be run on far memory.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error("{0}: no such program; give its path, or check PATH")]
    NotFound(PathBuf),
    #[error("{path}: {error}")]
    Unreadable { path: PathBuf, error: std::io::Error },
    #[error("{0} is a folder; give a program in it")]
    Folder(PathBuf),
    #[error("{path} may not be executed; if it is a program: chmod +x {path}")]
    NotExecutable { path: PathBuf },
    #[error("{path} cannot be started: {error}; {}", start_remedy(.error))]
    NotStarted { path: PathBuf, error: std::io::Error },
    #[error(
        "{0} is statically linked, so no library can be put into it; give --door sidecar, which \
         serves such programs, or build it with dynamic linking. (--when-outside allow starts it \
         without a limit)"
    )]
    Static(PathBuf),
    #[error(
        "{0} changes its user when it starts (setuid or file capabilities), so the system lets no \
         library be put into it; start it as that user instead"
    )]
    SetUser(PathBuf),
    #[error("{path}: interpreters of scripts are nested more than {} deep", MAX_INTERPRETERS)]
    Nested { path: PathBuf },
}

/// Most `#!` lines followed, as in the kernel.
const MAX_INTERPRETERS: usize = 5;
const ELF_HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
const PT_INTERP: u32 = 3;
const PT_DYNAMIC: u32 = 2;
/// Most program headers read; real programs have about a dozen.
const MAX_PROGRAM_HEADERS: u16 = 512;

/// Finds the program as a shell would.
pub fn find(program: &OsStr) -> Result<PathBuf, ProgramError> {
    let path = Path::new(program);
    if path.components().count() > 1 || path.is_absolute() {
        return match path.metadata() {
            Err(_) => Err(ProgramError::NotFound(path.into())),
            Ok(status) if status.is_dir() => Err(ProgramError::Folder(path.into())),
            Ok(_) if !is_executable(path) => Err(ProgramError::NotExecutable { path: path.into() }),
            Ok(_) => Ok(path.into()),
        };
    }
    let search = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&search)
        .map(|directory| directory.join(path))
        .find(|candidate| is_executable(candidate))
        .ok_or_else(|| ProgramError::NotFound(path.into()))
}

/// What the user can do when the kernel refuses to start a program.
fn start_remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOEXEC) => {
            "give a program of this machine, or name a script's interpreter in its first line \
             (#!/bin/sh)"
        }
        Some(libc::ENOENT) => "the interpreter or loader that it names is not there: install it",
        Some(libc::EACCES | libc::EPERM) => {
            "give this user the right to execute it (chmod +x), also on the folders above it and \
             on its interpreter; \
             a file system that is mounted noexec has no programs"
        }
        _ => "try it without farpool",
    }
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|status| status.is_file() && status.mode() & 0o111 != 0)
}

/// Checks that the dynamic linker will load our library into the program.
pub fn check(path: &Path) -> Result<(), ProgramError> {
    let mut path = path.to_owned();
    for _ in 0..MAX_INTERPRETERS {
        let unreadable = |error| ProgramError::Unreadable { path: path.clone(), error };
        let status = path.metadata().map_err(unreadable)?;
        let owner = rustix::process::geteuid().as_raw();
        if status.mode() & 0o4000 != 0 && status.uid() != owner {
            return Err(ProgramError::SetUser(path));
        }
        // A program that may be run but not read cannot be checked; the kernel reports any error.
        let Ok(file) = File::open(&path) else {
            return Ok(());
        };
        match interpreter(&file).map_err(unreadable)? {
            Some(next) => path = next,
            None if is_static(&file).map_err(unreadable)? => {
                return Err(ProgramError::Static(path));
            }
            None => return Ok(()),
        }
    }
    Err(ProgramError::Nested { path })
}

/// The interpreter of a script.
fn interpreter(mut file: &File) -> Result<Option<PathBuf>, std::io::Error> {
    let mut start = [0_u8; 256];
    let length = file.read(&mut start)?;
    let Some(line) = start[..length].strip_prefix(b"#!") else {
        return Ok(None);
    };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or(b"");
    let text = String::from_utf8_lossy(line);
    Ok(text.split_whitespace().next().map(PathBuf::from))
}

/// An ELF program without an interpreter is static.
pub(crate) fn is_static(file: &File) -> Result<bool, std::io::Error> {
    let mut header = [0_u8; ELF_HEADER_BYTES];
    if file.read_exact_at(&mut header, 0).is_err() || &header[..4] != b"\x7fELF" {
        return Ok(false);
    }
    let offset = u64::from_le_bytes(array_at(&header, 32));
    let count = u16::from_le_bytes(array_at(&header, 56));
    let mut dynamic = false;
    for index in 0..count.min(MAX_PROGRAM_HEADERS) {
        let mut entry = [0_u8; PROGRAM_HEADER_BYTES];
        file.read_exact_at(&mut entry, offset + u64::from(index) * PROGRAM_HEADER_BYTES as u64)?;
        match u32::from_le_bytes(array_at(&entry, 0)) {
            PT_INTERP => return Ok(false),
            PT_DYNAMIC => dynamic = true,
            _ => {}
        }
    }
    // The dynamic linker itself, run as a program, has no interpreter but loads libraries.
    let loader = dynamic && file_is_loader(file);
    Ok(!loader)
}

/// The bytes of a field, which must lie within `bytes`.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

fn file_is_loader(file: &File) -> bool {
    use std::os::fd::AsRawFd;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    link.is_ok_and(|path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld-"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_programs_and_scripts_are_accepted() {
        let shell = find(OsStr::new("sh")).expect("sh");
        assert!(check(&shell).is_ok());
        let directory = tempfile::tempdir().expect("tempdir");
        let script = directory.path().join("script");
        std::fs::write(&script, "#!/bin/sh -e\ntrue\n").expect("write");
        assert!(check(&script).is_ok());
    }

    #[test]
    fn a_static_program_is_refused_with_its_name() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("static");
        let mut elf = vec![0_u8; 200];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[32] = 64;
        elf[56] = 1;
        elf[64] = 1;
        std::fs::write(&path, elf).expect("write");
        let error = check(&path).expect_err("static");
        assert!(error.to_string().contains("statically linked"));
        assert!(error.to_string().contains("static"));
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = find(OsStr::new("no-such-program-anywhere")).expect_err("missing");
        assert!(error.to_string().contains("no-such-program-anywhere"));
    }

    #[test]
    fn what_cannot_be_executed_is_named_with_a_remedy() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().expect("tempdir");
        let file = directory.path().join("notes");
        std::fs::write(&file, "notes").expect("write");
        let said = |path: &Path| find(path.as_os_str()).expect_err("no program").to_string();
        assert!(said(&file).contains("chmod +x"), "{}", said(&file));
        assert!(said(directory.path()).contains("is a folder"), "{}", said(directory.path()));
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&file, executable).expect("chmod");
        assert_eq!(find(file.as_os_str()).expect("executable"), file);
        let path = file;
        let error = std::io::Error::from_raw_os_error(libc::ENOEXEC);
        let said = ProgramError::NotStarted { path, error }.to_string();
        assert!(said.contains("#!/bin/sh"), "{said}");
    }

    #[test]
    fn a_script_that_is_its_own_interpreter_is_refused() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("loop");
        std::fs::write(&path, format!("#!{}\n", path.display())).expect("write");
        assert!(matches!(check(&path), Err(ProgramError::Nested { .. })));
    }
}
