//! `farpool tenant list`, `show`, `set` and `delete`.

use farpool_api::{Tenant, TenantSpec};

use super::{client, per_s, sheet, show, size, size_or_dash};
use crate::args::TenantAction;
use crate::terminal::table;
use crate::values::{Redundancy, Size};

pub fn main(action: &TenantAction) -> anyhow::Result<u8> {
    match action {
        TenantAction::List(remote) => {
            let tenants = client(remote)?.tenants()?;
            show(remote, &tenants, |list| {
                table(&HEADER, &list.tenants.iter().map(row).collect::<Vec<_>>())
            })
        }
        TenantAction::Show { name, remote } => {
            show(remote, &client(remote)?.tenant(name)?, |tenant| sheet(&lines(tenant)))
        }
        TenantAction::Set { name, promise, quota, priority, rate, redundancy, remote } => {
            let spec = TenantSpec {
                promised_bytes: promise.map_or(0, |Size(bytes)| bytes),
                quota_bytes: quota.map(|Size(bytes)| bytes),
                priority: *priority,
                rate_bytes_per_s: rate.map(|Size(bytes)| bytes),
                redundancy: redundancy.map(|Redundancy(redundancy)| redundancy),
            };
            show(remote, &client(remote)?.put_tenant(name, &spec)?, |tenant| sheet(&lines(tenant)))
        }
        TenantAction::Delete { name, remote } => {
            client(remote)?.delete_tenant(name)?;
            show(remote, &serde_json::json!({ "name": name }), |_| {
                format!("tenant {name} is promised nothing any more\n")
            })
        }
    }
}

const HEADER: [&str; 10] = [
    "tenant",
    "promised",
    "quota",
    "priority",
    "rate",
    "redundancy",
    "granted",
    "rate granted",
    "segments",
    "gives up",
];

fn row(tenant: &Tenant) -> Vec<String> {
    vec![
        tenant.name.clone(),
        size(tenant.promised_bytes),
        size_or_dash(tenant.quota_bytes),
        tenant.priority.to_string(),
        tenant.rate_bytes_per_s.map_or_else(|| "-".to_owned(), per_s),
        tenant.redundancy.map_or_else(|| "-".to_owned(), |redundancy| redundancy.to_string()),
        size(tenant.granted_bytes),
        per_s(tenant.granted_read_bytes_per_s.max(tenant.granted_write_bytes_per_s)),
        tenant.segments.to_string(),
        size(tenant.yielding_bytes),
    ]
}

fn lines(tenant: &Tenant) -> Vec<(&'static str, String)> {
    HEADER.into_iter().zip(row(tenant)).collect()
}
