//! `farpool plan cost` and `dense`: answers from catalogs.

use std::path::Path;

use farpool_plan::{cost, dense, pages};
use farpool_report::{Input, Provenance};

use super::{give, provenance, refused, text_of};
use crate::args::{CostArgs, DenseArgs};
use crate::config::UsageError;
use crate::terminal;

pub fn cost(args: &CostArgs) -> anyhow::Result<u8> {
    let (text, from) = read(&args.catalog, |name| cost::preset(name).map(str::to_owned))?;
    if args.toml {
        terminal::print(&text)?;
        return Ok(0);
    }
    let catalog = cost::Catalog::parse(&args.catalog, &text).map_err(refused)?;
    give(&pages::cost(&catalog, from), &args.answer)
}

pub fn dense(args: &DenseArgs) -> anyhow::Result<u8> {
    let (known, known_text) = dense::GUTIERREZ;
    let known_catalog = || dense::Catalog::parse(Path::new(known), known_text);
    let named = args.catalog.to_str().unwrap_or_default();
    let is_design = !is_file_name(named)
        && known_catalog().is_ok_and(|catalog| catalog.design(named).is_some());
    let preset = |name: &str| (name == known || is_design).then(|| known_text.to_owned());
    let (text, from) = read(&args.catalog, preset)?;
    if args.toml {
        terminal::print(&text)?;
        return Ok(0);
    }
    let catalog = dense::Catalog::parse(&args.catalog, &text).map_err(refused)?;
    let only = args.design.as_deref().or(is_design.then_some(named));
    if let Some(unknown) = only.filter(|name| catalog.design(name).is_none()) {
        let names: Vec<&str> = catalog.designs.iter().map(|design| design.name.as_str()).collect();
        let why = format!("there is no design {unknown:?}; there are {}", names.join(", "));
        return Err(UsageError(why).into());
    }
    give(&pages::dense(&catalog, only, from), &args.answer)
}

/// Returns the text of a file or of the built-in catalog of this name, and where it is from.
fn read(
    path: &Path,
    preset: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<(String, Provenance)> {
    let name = path.to_str().unwrap_or_default();
    let (text, called) = match preset(name).filter(|_| !is_file_name(name)) {
        Some(text) => (text, format!("{name} (comes with farpool)")),
        None => {
            if !is_file_name(name) && !path.exists() {
                let why = format!("{name} is neither a file nor a built-in catalog (see --help)");
                return Err(UsageError(why).into());
            }
            let text = text_of(path)?;
            (text, name.to_owned())
        }
    };
    let input = Input::of_bytes(called, text.as_bytes());
    Ok((text, provenance().input(input)))
}

/// True for a path, false for the name of a built-in catalog.
fn is_file_name(name: &str) -> bool {
    name.contains('/') || name.ends_with(".toml")
}
