//! Finds the file that qemu-user has to load for what a user typed: it does not search PATH and
//! does not read the first line of scripts.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::TraceError;

/// A loadable program, and the arguments to call it with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// The ELF file.
    pub file: PathBuf,
    /// Its argument 0.
    pub name: OsString,
    /// Its arguments, without the name.
    pub arguments: Vec<OsString>,
}

/// The most interpreters that are scripts themselves; the kernel follows as many.
const MAX_INTERPRETERS: usize = 4;
/// The longest first line of a script that is read, as in the kernel.
const MAX_FIRST_LINE_BYTES: u64 = 256;

/// Finds the file behind `program` as a shell would, through PATH and `#!` lines.
///
/// # Errors
/// There is no such program, or it is no ELF file.
pub fn resolve(program: &[OsString], path: Option<&OsStr>) -> Result<Command, TraceError> {
    let (name, arguments) = program
        .split_first()
        .ok_or_else(|| TraceError::Capture("no program was named".to_owned()))?;
    let mut command =
        Command { file: search(name, path)?, name: name.clone(), arguments: arguments.to_vec() };
    for _ in 0..=MAX_INTERPRETERS {
        let first = beginning(&command.file)?;
        if first.starts_with(b"\x7fELF") {
            return Ok(command);
        }
        let Some(line) = first.strip_prefix(b"#!") else { break };
        command = behind_script(&command, line)?;
    }
    let file = command.file.display();
    Err(TraceError::Capture(format!(
        "{file} is neither an ELF program nor a script with a #! line"
    )))
}

fn search(name: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, TraceError> {
    let is_program = |file: &Path| {
        file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    };
    if name.as_bytes().contains(&b'/') {
        let file = PathBuf::from(name);
        let shown = file.display().to_string();
        return if is_program(&file) {
            Ok(file)
        } else {
            Err(TraceError::Capture(format!("{shown}: no such program, or it may not be executed")))
        };
    }
    let folders = path.map(std::env::split_paths).into_iter().flatten();
    folders.map(|folder| folder.join(name)).find(|file| is_program(file)).ok_or_else(|| {
        TraceError::Capture(format!("{}: there is no such program in PATH", name.display()))
    })
}

fn beginning(path: &Path) -> Result<Vec<u8>, TraceError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(TraceError::io(path))?;
    file.take(MAX_FIRST_LINE_BYTES).read_to_end(&mut bytes).map_err(TraceError::io(path))?;
    Ok(bytes)
}

/// Resolves a script as the kernel does: interpreter, its one argument, the script, the rest.
fn behind_script(script: &Command, line: &[u8]) -> Result<Command, TraceError> {
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
    let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
    let (interpreter, argument) = (&line[..end], line[end..].trim_ascii());
    let name = OsString::from_vec(interpreter.to_vec());
    // `env` would start the interpreter by exec, which leaves QEMU: it is looked up here instead.
    let is_env = Path::new(&name).file_name() == Some(OsStr::new("env"));
    let plain = !argument.is_empty() && !argument.contains(&b' ') && !argument.starts_with(b"-");
    let (file, name, argument) = if is_env && plain {
        let name = OsString::from_vec(argument.to_vec());
        (search(&name, std::env::var_os("PATH").as_deref())?, name, None)
    } else {
        let argument = (!argument.is_empty()).then(|| OsString::from_vec(argument.to_vec()));
        (PathBuf::from(&name), name, argument)
    };
    let arguments = argument
        .into_iter()
        .chain([script.file.clone().into_os_string()])
        .chain(script.arguments.iter().cloned())
        .collect();
    Ok(Command { file, name, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_name_is_found_in_path_and_an_unknown_one_refused() {
        let path = Some(OsStr::new("/nowhere:/bin:/usr/bin"));
        let command = resolve(&words("true --really"), path).unwrap();
        assert_eq!(command.file, Path::new("/bin/true"));
        assert_eq!(command.arguments, words("--really"));
        let refusal = resolve(&words("no-such-program"), path).unwrap_err().to_string();
        assert_eq!(refusal, "no-such-program: there is no such program in PATH");
    }

    #[test]
    fn a_script_is_its_interpreter_with_the_script() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("job");
        std::fs::write(&script, "#!/bin/sh -e\ntrue\n").unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        let program = [script.clone().into_os_string(), "x".into()];
        let command = resolve(&program, None).unwrap();
        assert_eq!(command.file, Path::new("/bin/sh"));
        assert_eq!(command.arguments, ["-e".into(), script.clone().into_os_string(), "x".into()]);
        std::fs::write(&script, "#!/usr/bin/env sh\ntrue\n").unwrap();
        let command = resolve(&program, None).unwrap();
        assert_eq!(command.name, "sh");
        assert_eq!(command.arguments, [script.clone().into_os_string(), "x".into()]);
        std::fs::write(&script, "true\n").unwrap();
        let refusal = resolve(&program, None).unwrap_err().to_string();
        assert!(refusal.contains("neither an ELF program nor a script"), "{refusal}");
    }
}
