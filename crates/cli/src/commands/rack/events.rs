//! `farpool events`: the events the controller keeps, and with `--follow` new ones as they happen.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use farpool_api::{ApiError, Client, Event, EventStream};
use farpool_units::{plain, utc_text};

use super::client;
use crate::args::EventsArgs;
use crate::terminal;

/// The stream does not mark where past events end; they end when none arrives for this long.
const PAST_IS_OVER: Duration = Duration::from_millis(500);
/// Time before a lost controller is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);

pub fn main(args: &EventsArgs) -> anyhow::Result<u8> {
    let client = client(&args.remote)?;
    let stream = client.events(args.after)?;
    let mut printer =
        Printer { json: args.remote.json, left: args.count.unwrap_or(u64::MAX), last: args.after };
    match args.follow {
        true => follow(&client, stream, &mut printer)?,
        false => past(stream, &mut printer)?,
    }
    Ok(0)
}

/// Prints events until the count is reached.
struct Printer {
    json: bool,
    left: u64,
    /// Id of the last event printed.
    last: u64,
}

impl Printer {
    fn is_done(&self) -> bool {
        self.left == 0
    }

    fn print(&mut self, event: &Event) -> anyhow::Result<()> {
        let line = match self.json {
            true => serde_json::to_string(event)?,
            false => {
                let Event { id, kind, subject, detail, uptime_ms, time_unix_ms } = event;
                let time = match time_unix_ms {
                    0 => format!("{:>6}.{:03}s", uptime_ms / 1000, uptime_ms % 1000),
                    clock => utc_text(*clock),
                };
                // Names and details may come from others.
                plain(&format!("{id}  {time}  {kind}  {subject}: {detail}")).into_owned()
            }
        };
        terminal::print(&format!("{line}\n"))?;
        (self.left, self.last) = (self.left - 1, event.id);
        Ok(())
    }
}

fn past(stream: EventStream, printer: &mut Printer) -> anyhow::Result<()> {
    let (sender, events) = channel();
    // Ends with this process, as it may wait for an event that never arrives.
    thread::spawn(move || stream.map(|event| sender.send(event)).take_while(Result::is_ok).count());
    while !printer.is_done() {
        match events.recv_timeout(PAST_IS_OVER) {
            Ok(event) => printer.print(&event?)?,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    Ok(())
}

/// Continues after the last event when the connection breaks; events the controller has dropped
/// meanwhile are missing.
fn follow(client: &Client, mut stream: EventStream, printer: &mut Printer) -> anyhow::Result<()> {
    loop {
        while !printer.is_done() {
            let Some(Ok(event)) = stream.next() else { break };
            printer.print(&event)?;
        }
        if printer.is_done() {
            return Ok(());
        }
        stream = again(client, printer.last)?;
    }
}

/// Asks until a controller answers; reports once that none does.
fn again(client: &Client, last: u64) -> anyhow::Result<EventStream> {
    let mut is_said = false;
    loop {
        thread::sleep(ASK_AGAIN);
        match client.events(last) {
            Ok(stream) => return Ok(stream),
            Err(ApiError::Problem(problem)) if problem.status != 503 => {
                return Err(ApiError::Problem(problem).into());
            }
            Err(error) => {
                if !std::mem::replace(&mut is_said, true) {
                    eprintln!("farpool: {}; retrying", plain(&error.to_string()));
                }
            }
        }
    }
}
