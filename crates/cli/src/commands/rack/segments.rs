//! `farpool segment list`, `show`, `create`, `delete` and `move`.

use anyhow::Context;
use farpool_api::{
    DEFAULT_RATE_BYTES_PER_S, MoveRequest, Segment, SegmentFilter, SegmentId, SegmentList,
    SegmentSpec,
};
use farpool_kernel::fill_random;

use super::{client, name_of, sheet, show, size, size_or_dash, tasks};
use crate::args::{RemoteArgs, SegmentAction, SegmentCreateArgs, SegmentMoveArgs};
use crate::terminal::table;

pub fn main(action: SegmentAction) -> anyhow::Result<u8> {
    match action {
        SegmentAction::List(remote) => list(&remote),
        SegmentAction::Show { id, remote } => {
            show(&remote, &client(&remote)?.segment(id)?, |segment| sheet(&lines(segment)))
        }
        SegmentAction::Create(args) => create(args),
        SegmentAction::Delete { id, remote } => {
            client(&remote)?.delete_segment(id, None)?;
            show(&remote, &serde_json::json!({ "id": id }), |_| {
                format!("segment {id} is being released\n")
            })
        }
        SegmentAction::Move(args) => begin_move(args),
        SegmentAction::Resize { id, size, remote } => resize(id, size.0, &remote),
    }
}

/// Fetches all pages of the list.
fn list(remote: &RemoteArgs) -> anyhow::Result<u8> {
    let client = client(remote)?;
    let mut all = SegmentList { segments: Vec::new(), next_page_token: None };
    let mut filter = SegmentFilter::default();
    loop {
        let page = client.segments(&filter)?;
        all.segments.extend(page.segments);
        filter.page_token = page.next_page_token;
        if filter.page_token.is_none() {
            break;
        }
    }
    show(remote, &all, |list| table(&HEADER, &list.segments.iter().map(row).collect::<Vec<_>>()))
}

fn create(args: SegmentCreateArgs) -> anyhow::Result<u8> {
    let id = args.id.map_or_else(random_id, Ok)?;
    let spec = SegmentSpec {
        client: None,
        host: Some(args.host),
        bytes: args.size.0,
        read_bytes_per_s: DEFAULT_RATE_BYTES_PER_S,
        write_bytes_per_s: DEFAULT_RATE_BYTES_PER_S,
        policy: args.policy,
        avoid: Vec::new(),
        may_split: false,
        apart: false,
    };
    let segment = client(&args.remote)?.put_segment(id, &spec)?;
    show(&args.remote, &segment, |segment| sheet(&lines(segment)))
}

fn resize(id: SegmentId, bytes: u64, remote: &RemoteArgs) -> anyhow::Result<u8> {
    let client = client(remote)?;
    let now = client.segment(id)?;
    // A request for another size is the request that the segment was created with, but for that.
    let Some(spec) = now.spec else {
        anyhow::bail!("this controller cannot change the size of a segment");
    };
    let spec = SegmentSpec { bytes, ..spec };
    let segment = client.resize_segment(id, &spec, Some(now.revision))?;
    show(remote, &segment, |segment| sheet(&lines(segment)))
}

fn begin_move(args: SegmentMoveArgs) -> anyhow::Result<u8> {
    let client = client(&args.remote)?;
    let wish = MoveRequest { policy: args.policy, avoid: args.avoid };
    let task = client.move_segment(args.id, &wish)?;
    tasks::finish(&client, &args.remote, task, args.wait)
}

fn random_id() -> anyhow::Result<SegmentId> {
    let mut bytes = [0; 16];
    fill_random(&mut bytes).context("there are no random numbers for an id; give --id")?;
    Ok(SegmentId(uuid::Builder::from_random_bytes(bytes).into_uuid()))
}

const HEADER: [&str; 8] = ["segment", "host", "node", "state", "size", "used", "epoch", "target"];

fn row(segment: &Segment) -> Vec<String> {
    vec![
        segment.id.to_string(),
        segment.host.clone(),
        segment.place.node.clone(),
        name_of(&segment.state),
        size(segment.place.bytes),
        size_or_dash(segment.used_bytes),
        segment.epoch.to_string(),
        segment.target.as_ref().map_or("-".to_owned(), |target| target.place.node.clone()),
    ]
}

/// The size that a segment takes, and the one that was asked for if that is another.
fn sizes(segment: &Segment) -> String {
    let takes = size(segment.place.bytes);
    match segment.spec.as_ref().map(|spec| spec.bytes) {
        Some(asked) if asked != segment.place.bytes => {
            format!("{takes} ({} asked for)", size(asked))
        }
        _ => takes,
    }
}

fn lines(segment: &Segment) -> Vec<(&'static str, String)> {
    let rate = |bytes| format!("{}/s", size(bytes));
    let mut lines = vec![
        ("segment", segment.id.to_string()),
        ("state", name_of(&segment.state)),
        ("host", segment.host.clone()),
        ("client", segment.client.map_or("-".to_owned(), |client| client.to_string())),
        ("node", segment.place.node.clone()),
        ("addresses", segment.place.addresses.join(" ")),
        ("size", sizes(segment)),
        ("used", size_or_dash(segment.used_bytes)),
        ("reads", rate(segment.place.read_bytes_per_s)),
        ("writes", rate(segment.place.write_bytes_per_s)),
        ("epoch", segment.epoch.to_string()),
        ("revision", segment.revision.to_string()),
    ];
    if let Some(target) = &segment.target {
        lines.push(("moves to", format!("{} (epoch {})", target.place.node, target.epoch)));
    }
    lines.extend(segment.waits_for.iter().map(|what| ("waits for", what.clone())));
    if let Some(deadline_ms) = segment.deadline_ms {
        lines.push(("deadline", format!("{deadline_ms}ms")));
    }
    lines
}
