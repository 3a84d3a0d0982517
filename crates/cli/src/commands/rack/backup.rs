//! `farpool control backup` and `restore`.

use std::path::Path;

use anyhow::Context;
use farpool_control::StoreChoice;
use farpool_control::store::backup::{RestoreError, restore_etcd, restore_redb};
use farpool_kernel::write_secret;
use serde_json::json;

use super::{client, show};
use crate::args::{ControlAction, RemoteArgs};
use crate::commands::control::{make_folder, usual_store};
use crate::config::UsageError;
use crate::terminal;
use crate::values::{Size, StoreAt};

pub fn main(action: &ControlAction) -> anyhow::Result<u8> {
    match action {
        ControlAction::Backup { file, remote } => backup(file, remote),
        ControlAction::Restore { file, store, replace } => restore(file, store.as_ref(), *replace),
    }
}

fn backup(file: &Path, remote: &RemoteArgs) -> anyhow::Result<u8> {
    let text = client(remote)?.backup()?;
    // A text that was cut off on the way must not replace a good one.
    farpool_control::store::backup::from_text(&text)?;
    write_secret(file, text.as_bytes())
        .with_context(|| format!("cannot write {}", file.display()))?;
    let bytes = text.len() as u64;
    show(remote, &json!({ "file": file, "bytes": bytes }), |_| {
        format!("{} written to {}\n", Size(bytes), file.display())
    })
}

fn restore(file: &Path, store: Option<&StoreAt>, replace: bool) -> anyhow::Result<u8> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("cannot read the backup {}", file.display()))?;
    let store = match store {
        Some(StoreAt(store)) => store.clone(),
        None => StoreChoice::Redb(usual_store()?),
    };
    let restored = match store {
        StoreChoice::Redb(path) => {
            make_folder(&path)?;
            restore_redb(&path, &text, replace, &mut |_| {})
        }
        StoreChoice::Etcd(endpoints) => restore_etcd(endpoints, &text, replace, &mut |_| {}),
    };
    let count = restored.map_err(|error| match error {
        RestoreError::NotEmpty(_) => {
            anyhow::Error::from(UsageError(format!("{error}; say --replace if you mean it")))
        }
        error => error.into(),
    })?;
    terminal::print(&format!("{count} records restored; start the controller\n"))?;
    Ok(0)
}
