//! `farpool pki init`, `issue`, `renew`, `revoke` and `show`.

use std::fmt::Write;
use std::path::Path;

use farpool_identity::authority::{
    Authority, AuthorityError, Host, Issued, Record, Register, Request, State,
};
use farpool_identity::{Name, RackName, Reason, Role, UnixTime};
use farpool_units::utc_text;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{IssueArgs, PkiAction, PkiDir, PkiRole};
use crate::config::UsageError;
use crate::terminal::{self, table};

pub fn main(action: &PkiAction) -> anyhow::Result<u8> {
    let now = UnixTime::now();
    match action {
        PkiAction::Init { at, name } => init(at, name, now),
        PkiAction::Issue(args) => issue(args, now),
        PkiAction::Renew { at, names, due, days } => renew(at, names, *due, *days, now),
        PkiAction::Revoke { at, names, reason } => revoke(at, names, (*reason).into(), now),
        PkiAction::Show { at, all } => show(at, *all, now),
    }
    .map(|()| 0)
    .map_err(as_usage)
}

/// What was asked wrongly, as wrong usage; all else as it is.
fn as_usage(error: anyhow::Error) -> anyhow::Error {
    use AuthorityError::{Ambiguous, Days, Hosts};
    match error.downcast_ref::<AuthorityError>() {
        Some(Ambiguous { .. } | Days { .. } | Hosts(_)) => UsageError(error.to_string()).into(),
        _ => error,
    }
}

fn init(at: &PkiDir, name: &RackName, now: UnixTime) -> anyhow::Result<()> {
    let authority = Authority::init(&at.dir, name.clone(), now)?;
    let register = authority.register();
    let dir = at.dir.display();
    let answer = json!({
        "rack": register.rack,
        "dir": at.dir,
        "not_after": time(register.not_after_s),
    });
    say(at, &answer, || {
        format!(
            "the authority of rack {} is in {dir}, valid until {}\n\
             whoever can read {dir}/ca.key can be anybody in the rack: keep it, and a backup of \
             {dir}, safe\n",
            register.rack,
            day(register.not_after_s)
        )
    })
}

fn issue(args: &IssueArgs, now: UnixTime) -> anyhow::Result<()> {
    let role = role(args)?;
    let mut hosts = args.host.clone();
    hosts.extend(args.ip.iter().map(|address| Host::Address(*address)));
    let lacks_address = role.may_serve() && hosts.is_empty();
    let request = Request { role, hosts, days: args.days };
    let issued = Authority::open(&args.at.dir, now)?.issue(request, now)?;
    say(&args.at, &written(&issued), || {
        let mut text = told(&issued);
        if lacks_address {
            text += "without --host and --ip, only clients that ask for it by its name accept it\n";
        }
        text
    })
}

/// The role of the arguments. clap has checked only that there is a name or a tenant.
fn role(args: &IssueArgs) -> anyhow::Result<Role> {
    let wrong = |text: &str| anyhow::Error::from(UsageError(text.to_owned()));
    let (name, tenant) = (args.name.clone(), args.tenant.clone());
    let of_name: fn(Name) -> Role = match args.role {
        PkiRole::Viewer => Role::Viewer,
        PkiRole::Operator => Role::Operator,
        PkiRole::Controller => Role::Controller,
        PkiRole::Node => Role::Node,
        PkiRole::Program => {
            let tenant = tenant.ok_or_else(|| wrong("a program needs --tenant"))?;
            return Ok(Role::Program { tenant, name });
        }
    };
    if tenant.is_some() {
        return Err(wrong("--tenant is for --role program; others need --name"));
    }
    name.map(of_name).ok_or_else(|| wrong("give --name"))
}

fn renew(
    at: &PkiDir,
    names: &[String],
    due: bool,
    days: Option<u64>,
    now: UnixTime,
) -> anyhow::Result<()> {
    let mut authority = Authority::open(&at.dir, now)?;
    // All names first: a misspelled one must not leave the others half done.
    let roles: Vec<Role> = match due {
        true => authority.register().due(now),
        false => {
            let named = names.iter().map(|name| authority.register().named(name));
            named.collect::<Result<_, _>>()?
        }
    };
    let mut renewed = Vec::new();
    for role in &roles {
        renewed.push(authority.renew(role, days, now)?);
    }
    let answer = json!({ "issued": renewed.iter().map(written).collect::<Vec<_>>() });
    say(at, &answer, || match renewed.is_empty() {
        true => "nothing is due\n".to_owned(),
        false => renewed.iter().map(told).collect(),
    })
}

fn revoke(at: &PkiDir, names: &[String], reason: Reason, now: UnixTime) -> anyhow::Result<()> {
    let mut authority = Authority::open(&at.dir, now)?;
    let mut serials = Vec::new();
    for name in names {
        serials.extend(authority.register().serials(name)?);
    }
    let done = authority.revoke(&serials, reason, now)?;
    let list = at.dir.join("revoked.crl");
    let revoked: Vec<Value> = done
        .iter()
        .map(|record| json!({ "serial": record.serial, "identity": record.identity }))
        .collect();
    say(at, &json!({ "revoked": revoked, "list": list }), || {
        let mut text = String::new();
        for Record { serial, identity, .. } in &done {
            // Writing to a text does not fail.
            let _ = writeln!(text, "revoked {}, serial {serial}", identity.role.label());
        }
        if done.is_empty() {
            text += "all of them were revoked before\n";
        }
        let copy = format!("copy {} to every host: until then it accepts them\n", list.display());
        text + &copy
    })
}

/// One certificate as `show` prints it.
#[derive(Serialize)]
struct Row<'a> {
    name: String,
    identity: String,
    serial: String,
    state: State,
    due: bool,
    not_before: String,
    not_after: String,
    hosts: &'a [Host],
    #[serde(skip_serializing_if = "Option::is_none")]
    revoked: Option<Value>,
}

impl<'a> Row<'a> {
    fn of(record: &'a Record, now: UnixTime) -> Self {
        let state = record.state(now);
        Self {
            name: record.identity.role.label(),
            identity: record.identity.to_string(),
            serial: record.serial.to_string(),
            state,
            due: state == State::Valid && record.is_due(now),
            not_before: time(record.not_before_s),
            not_after: time(record.not_after_s),
            hosts: &record.hosts,
            revoked: record.revoked.map(|it| json!({ "at": time(it.at_s), "reason": it.reason })),
        }
    }

    fn cells(&self) -> Vec<String> {
        let state = match self.state {
            State::Valid if self.due => "renew it",
            State::Valid => "valid",
            State::Early => "not yet valid",
            State::Expired => "expired",
            State::Revoked => "revoked",
        };
        let hosts: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
        let until = self.not_after.chars().take(10).collect();
        vec![
            self.name.clone(),
            state.to_owned(),
            until,
            self.serial.clone(),
            if hosts.is_empty() { "-".to_owned() } else { hosts.join(",") },
        ]
    }
}

fn show(at: &PkiDir, all: bool, now: UnixTime) -> anyhow::Result<()> {
    let register = Register::read(&at.dir)?;
    let is_shown = |record: &&Record| {
        let newest = register.last(&record.identity.role);
        all || newest.is_some_and(|newest| newest.serial == record.serial)
    };
    let rows: Vec<Row<'_>> =
        register.issued.iter().filter(is_shown).map(|it| Row::of(it, now)).collect();
    let answer = json!({
        "rack": register.rack,
        "not_after": time(register.not_after_s),
        "issued": rows,
    });
    say(at, &answer, || {
        let title =
            format!("rack {}, authority until {}\n", register.rack, day(register.not_after_s));
        match rows.is_empty() {
            true => title + "nothing was issued yet; see farpool pki issue --help\n",
            false => {
                let header = ["name", "state", "until", "serial", "addresses"];
                title + &table(&header, &rows.iter().map(Row::cells).collect::<Vec<_>>())
            }
        }
    })
}

fn written(issued: &Issued) -> Value {
    let Issued { record, folder } = issued;
    json!({
        "name": record.identity.role.label(),
        "identity": record.identity,
        "serial": record.serial,
        "not_after": time(record.not_after_s),
        "folder": folder,
    })
}

fn told(Issued { record, folder }: &Issued) -> String {
    format!(
        "{}: serial {}, valid until {}; copy {} to its host\n",
        record.identity.role,
        record.serial,
        day(record.not_after_s),
        folder_shown(folder)
    )
}

fn folder_shown(folder: &Path) -> String {
    format!("{}/", folder.display())
}

fn say(at: &PkiDir, answer: &Value, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let text = match at.json {
        true => format!("{}\n", serde_json::to_string_pretty(answer)?),
        false => text(),
    };
    Ok(terminal::print(&text)?)
}

fn time(unix_s: u64) -> String {
    utc_text(unix_s.saturating_mul(1000))
}

fn day(unix_s: u64) -> String {
    time(unix_s).chars().take(10).collect()
}
