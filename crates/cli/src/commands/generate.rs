//! `farpool completions` and `farpool man`: both generated from the definitions in `args.rs`.

use std::path::Path;

use anyhow::Context;
use clap::{Command, CommandFactory};

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::terminal;

/// Prints the completion script of the shell.
pub fn completions(args: &CompletionsArgs) -> anyhow::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "farpool", &mut script);
    terminal::print(&String::from_utf8(script)?)?;
    Ok(0)
}

/// Prints farpool.1, or writes it and one page per subcommand into a folder.
pub fn man(args: &ManArgs) -> anyhow::Result<u8> {
    let mut command = Cli::command();
    command.build();
    match &args.out {
        None => terminal::print(&String::from_utf8(page(&command, "farpool")?)?)?,
        Some(folder) => write_pages(&command, folder)?,
    }
    Ok(0)
}

fn write_pages(command: &Command, folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("the folder {} cannot be made", folder.display()))?;
    write_page(command, "farpool", folder)
}

/// Writes the page of a command and those of its subcommands, such as farpool-node-drain.1.
fn write_page(command: &Command, name: &str, folder: &Path) -> anyhow::Result<()> {
    let path = folder.join(format!("{name}.1"));
    std::fs::write(&path, page(command, name)?)
        .with_context(|| format!("the manual page {} cannot be written", path.display()))?;
    let shown = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    command
        .get_subcommands()
        .filter(shown)
        .try_for_each(|sub| write_page(sub, &format!("{name}-{}", sub.get_name()), folder))
}

/// Returns the page in roff; `name` is its name, such as `farpool-run`.
fn page(command: &Command, name: &str) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    let titled = command.clone().display_name(name.to_owned());
    let source = format!("farpool {}", env!("CARGO_PKG_VERSION"));
    clap_mangen::Man::new(titled).source(source).render(&mut text)?;
    Ok(text)
}
