//! Tasks: long operations that the reconciler follows. They are not stored, but what they wait for
//! is.

use farpool_api::{SegmentId, SegmentState, Task, TaskId, TaskState};

use super::{Changes, Outcome, State, TASKS_LIMIT};

impl State {
    /// Begins a task. Returns its id, or that of a running task of the same kind and subject.
    pub(super) fn begin_task(&mut self, kind: &str, subject: &str, to: &mut Changes<'_>) -> TaskId {
        let same = |task: &&Task| {
            task.kind == kind && task.subject == subject && task.state == TaskState::Running
        };
        if let Some(task) = self.tasks.iter().find(same) {
            return task.id;
        }
        if self.tasks.len() >= TASKS_LIMIT {
            let ended = self.tasks.iter().position(|task| task.state != TaskState::Running);
            self.tasks.remove(ended.unwrap_or(0));
        }
        let id = TaskId::from_u128((to.random)());
        let (kind, subject) = (kind.to_owned(), subject.to_owned());
        let (state, detail) = (TaskState::Running, String::new());
        self.tasks.push_back(Task { id, kind, subject, state, detail });
        self.check_task(id);
        id
    }

    /// Brings a task up to date.
    pub(super) fn check_task(&mut self, id: TaskId) -> Outcome {
        let Some(index) = self.tasks.iter().position(|task| task.id == id) else {
            return Outcome::Done;
        };
        let task = &self.tasks[index];
        if task.state == TaskState::Running {
            let (state, detail) = match task.kind.as_str() {
                "drain" => self.drain_progress(&task.subject),
                _ => self.move_progress(&task.subject),
            };
            self.tasks[index].state = state;
            self.tasks[index].detail = detail;
        }
        Outcome::Done
    }

    fn drain_progress(&self, node: &str) -> (TaskState, String) {
        let Some(drained) = self.nodes.get(node) else {
            return (TaskState::Done, "the node was deleted".to_owned());
        };
        if !drained.record.draining {
            return (TaskState::Failed, "the node shall not be emptied any more".to_owned());
        }
        match self.on_node.get(node).map_or(0, |all| all.len()) {
            0 => (TaskState::Done, "the node is empty".to_owned()),
            left => (TaskState::Running, format!("{left} segments are on the node")),
        }
    }

    fn move_progress(&self, subject: &str) -> (TaskState, String) {
        let id = subject.parse::<SegmentId>().ok();
        let Some(segment) = id.and_then(|id| self.segments.get(&id)) else {
            return (TaskState::Failed, "the segment was released".to_owned());
        };
        match (self.state_of(segment), &segment.target) {
            (SegmentState::Lost, _) => {
                (TaskState::Failed, "the segment has lost its memory".to_owned())
            }
            (SegmentState::Releasing, _) => {
                (TaskState::Failed, "the segment was released".to_owned())
            }
            (_, Some(target)) if segment.evacuated => {
                (TaskState::Running, format!("{} has it, the old node lets go", target.node))
            }
            (_, Some(target)) => (TaskState::Running, format!("data goes to {}", target.node)),
            (_, None) => (TaskState::Done, format!("it is on {}", segment.current.node)),
        }
    }
}
