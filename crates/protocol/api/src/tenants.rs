//! Tenants: who shares the rack, with what promise.

use farpool_policy::redundancy::Redundancy;
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
    /// Most bandwidth that its segments may be granted together, in each direction; no limit if
    /// left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bytes_per_s: Option<u64>,
    /// What its programs store beside what is far, unless they are told otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "redundancy_text")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub redundancy: Option<Redundancy>,
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
    /// Most bandwidth that its segments may be granted together, in each direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bytes_per_s: Option<u64>,
    /// What its programs store beside what is far, unless they are told otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "redundancy_text")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub redundancy: Option<Redundancy>,
    /// Memory that its segments have.
    pub granted_bytes: u64,
    /// Its segments.
    pub segments: u64,
    /// Bandwidth of reads that its segments are granted together.
    #[serde(default)]
    pub granted_read_bytes_per_s: u64,
    /// Bandwidth of writes that they are granted together.
    #[serde(default)]
    pub granted_write_bytes_per_s: u64,
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

/// Redundancy as `farpool run --redundancy` takes it.
mod redundancy_text {
    use farpool_policy::redundancy::Redundancy;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(
        redundancy: &Option<Redundancy>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match redundancy {
            Some(redundancy) => to.collect_str(redundancy),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Redundancy>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(de::Error::custom)).transpose()
    }
}
