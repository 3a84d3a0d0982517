//! Tenants: who shares the rack, with what promise.

use serde::{Deserialize, Serialize};

/// The tenant of clients that name none, and of segments without a client.
pub const DEFAULT_TENANT: &str = "default";

/// What a tenant is promised and allowed.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TenantSpec {
    /// Memory that it gets back from others when the rack is full; what it has beyond this it may
    /// have to give up.
    #[serde(default)]
    pub promised_bytes: u64,
    /// Most memory that it may have, whatever it is promised; no limit if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// When the rack is full: who has a lower one gives up what is beyond its promise first, also
    /// to a tenant that is beyond its own.
    #[serde(default)]
    pub priority: u8,
}

/// A tenant, as the controller sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// Memory that it gets back from others when the rack is full.
    pub promised_bytes: u64,
    /// Most memory that it may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// Who has a lower one gives up first.
    pub priority: u8,
    /// Memory that its segments have.
    pub granted_bytes: u64,
    /// Its segments.
    pub segments: u64,
    /// Memory of segments that it was asked to give up, and has not yet.
    pub yielding_bytes: u64,
}

/// All tenants, by name: those with a promise, and those with segments.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TenantList {
    /// All tenants.
    pub tenants: Vec<Tenant>,
}
