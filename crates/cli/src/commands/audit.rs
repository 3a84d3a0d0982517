//! `farpool audit verify`.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use anyhow::{Context, bail};
use farpool_audit::{Verified, verify};
use serde_json::json;

use crate::args::{AuditAction, VerifyArgs};
use crate::terminal;

pub fn main(action: &AuditAction) -> anyhow::Result<u8> {
    match action {
        AuditAction::Verify(args) => verify_files(args).map(|()| 0),
    }
}

fn verify_files(args: &VerifyArgs) -> anyhow::Result<()> {
    let names: Vec<_> = args.files.iter().map(|file| file.display().to_string()).collect();
    let names = names.join(", ");
    let mut lines: Box<dyn BufRead> = Box::new(BufReader::new(std::io::empty()));
    for path in &args.files {
        let file =
            File::open(path).with_context(|| format!("{} cannot be read", path.display()))?;
        lines = Box::new(lines.chain(BufReader::new(file)));
    }
    let Verified { first, end, contains, open } =
        verify(lines, args.contains).with_context(|| format!("{names} is not what was written"))?;
    if let Some(hash) = args.contains.filter(|_| !contains) {
        bail!(
            "{names} has no line with the hash {hash}: lines were cut off, or all were made anew"
        );
    }
    let listed = |(number, what): (&u64, &String)| json!({ "number": number, "what": what });
    let listed: Vec<_> = open.iter().map(listed).collect();
    let answer =
        json!({ "first": first, "last": end.number, "hash": end.hash, "without_outcome": listed });
    let open = open.iter().map(|(number, what)| {
        format!("line {number} announces {what:?}, and no line says what became of it\n")
    });
    Ok(terminal::print(&match args.json {
        true => format!("{answer}\n"),
        false if first == 0 => "the log is empty\n".to_owned(),
        false => format!(
            "lines {first} to {} are what was written\n{}\
             the last has the hash {}; note it elsewhere, and --contains finds it later\n",
            end.number,
            open.collect::<String>(),
            end.hash
        ),
    })?)
}
