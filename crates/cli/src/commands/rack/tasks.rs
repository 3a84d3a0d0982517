//! `farpool task list` and `show`, and waiting for a task that a command began.

use std::thread;
use std::time::Duration;

use farpool_api::{Client, Task, TaskState};

use super::{client, name_of, sheet, show};
use crate::args::{RemoteArgs, TaskAction};
use crate::terminal::table;

/// How often a running task is polled.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// Exit code if the task failed.
const FAILED: u8 = 1;

pub fn main(action: &TaskAction) -> anyhow::Result<u8> {
    match action {
        TaskAction::List(remote) => {
            let tasks = client(remote)?.tasks()?;
            show(remote, &tasks, |list| {
                let row = |task: &Task| {
                    let state = name_of(&task.state);
                    vec![task.id.to_string(), task.kind.clone(), task.subject.clone(), state]
                };
                let rows: Vec<_> = list.tasks.iter().map(row).collect();
                table(&["task", "kind", "of", "state"], &rows)
            })
        }
        TaskAction::Show { id, remote } => show(remote, &client(remote)?.task(*id)?, text),
    }
}

/// Shows a task, with `wait` once it has ended. Returns the exit code.
pub fn finish(
    client: &Client,
    remote: &RemoteArgs,
    mut task: Task,
    wait: bool,
) -> anyhow::Result<u8> {
    while wait && task.state == TaskState::Running {
        thread::sleep(ASK_AGAIN);
        task = client.task(task.id)?;
    }
    show(remote, &task, text)?;
    Ok(if task.state == TaskState::Failed { FAILED } else { 0 })
}

fn text(task: &Task) -> String {
    sheet(&[
        ("task", task.id.to_string()),
        (task.kind.as_str(), task.subject.clone()),
        ("state", name_of(&task.state)),
        ("detail", task.detail.clone()),
    ])
}
