//! `farpool plan`: reads the question, has `farpool-plan` answer it, prints the answer.

mod catalogs;
mod compare;
mod series;

use std::path::Path;

use anyhow::Context;
use farpool_plan::PlanError;

use super::answer::{give, provenance};
use super::sim;
use crate::args::PlanAction;
use crate::config::UsageError;

pub fn main(action: &PlanAction) -> anyhow::Result<u8> {
    match action {
        PlanAction::Pool(args) => series::pool(args),
        PlanAction::Pack(args) => series::pack(args),
        PlanAction::Local(args) => sim::local(args),
        PlanAction::Cost(args) => catalogs::cost(args),
        PlanAction::Dense(args) => catalogs::dense(args),
        PlanAction::Compare(args) => compare::compare(args),
    }
}

/// A question without an answer is a usage error; any other error is one of the data.
fn refused(error: PlanError) -> anyhow::Error {
    match error {
        PlanError::Question(why) => UsageError(why).into(),
        other => other.into(),
    }
}

fn text_of(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))
}

/// Reads the JSON of an answer: what `--json` printed, or what a page of `--report` carries.
pub(super) fn answer_of(path: &Path) -> anyhow::Result<serde_json::Value> {
    const BEGINS: &str = "id=\"answer\">";
    let text = text_of(path)?;
    let json = match text.find(BEGINS) {
        Some(at) => {
            let rest = &text[at + BEGINS.len()..];
            &rest[..rest.find("</script>").unwrap_or(rest.len())]
        }
        None => text.as_str(),
    };
    let wrong = || format!("{} holds no answer of farpool (--json or --report)", path.display());
    serde_json::from_str(json).with_context(wrong)
}
