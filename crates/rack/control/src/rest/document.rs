//! The OpenAPI document, with what the types alone do not say.

use farpool_policy::redundancy::Redundancy;
use serde_json::{Value, json};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{RefOr, SecurityRequirement};

/// The names of nodes, bricks and failure domains.
const NAME: &str = "^[A-Za-z0-9._-]{1,64}$";
/// Names of clients: no character that moves a terminal's cursor or turns the direction of text.
const PRINTABLE: &str = "^[^\\u0000-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\
                         \\u2066-\\u2069\\ufeff]+$";
/// Addresses of blades.
const ADDRESS: &str = "^(tcp://|unix:)[!-~]{1,249}$";
/// Most memory that a brick of the graph may have, in bytes.
const BRICK_LIMIT_BYTES: u64 = ((1 << 31) - 1) * farpool_units::SUPERPAGE_BYTES;

/// The OpenAPI document.
///
/// # Panics
/// It cannot be written as JSON, which a test excludes.
#[must_use]
pub fn openapi() -> Value {
    let mut document = super::router().into_openapi();
    let components = document.components.get_or_insert_default();
    let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
    components.security_schemes.insert("token".to_owned(), RefOr::T(SecurityScheme::Http(scheme)));
    let certificate = SecurityScheme::MutualTls {
        description: Some("a certificate of the rack, whose role decides what may be asked".into()),
        deprecated: None,
        extensions: None,
    };
    components.security_schemes.insert("certificate".to_owned(), RefOr::T(certificate));
    // A controller on loopback may run without a token and without certificates.
    let none = SecurityRequirement::default();
    let of = |name: &str| SecurityRequirement::new(name, Vec::<String>::new());
    document.security = Some(vec![none, of("token"), of("certificate")]);
    let mut document = serde_json::to_value(&document).expect("the document is plain data");
    complete(&mut document["components"]["schemas"]);
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    let operations = paths.flat_map(|(_, path)| path.as_object_mut().into_iter().flatten());
    for (_, operation) in operations {
        let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
        for parameter in parameters.into_iter().flatten() {
            // A parameter that is left out is not sent, which is another thing than null.
            if let Some(kind) = parameter.pointer_mut("/schema/type")
                && let Some([only, Value::String(null)]) = kind.as_array().map(Vec::as_slice)
                && null == "null"
            {
                *kind = only.clone();
            }
            if parameter["in"] == "path" && parameter["name"] == "name" {
                parameter["schema"]["pattern"] = json!(NAME);
            }
            if parameter["name"] == "limit" {
                parameter["schema"]["maximum"] = json!(u32::MAX);
            }
        }
    }
    document
}

/// Adds what joins several fields of a type, and patterns of the items of lists.
fn complete(schemas: &mut Value) {
    schemas["ClientSpec"]["properties"]["name"]["pattern"] = json!(PRINTABLE);
    let segment = &mut schemas["SegmentSpec"];
    segment["oneOf"] = json!([
        { "required": ["client"], "properties": {
            "client": { "type": "string" }, "host": { "type": "null" } } },
        { "required": ["host"], "properties": {
            "host": { "type": "string" }, "client": { "type": "null" } } },
    ]);
    segment["properties"]["avoid"]["items"]["pattern"] = json!(NAME);
    schemas["MoveRequest"]["properties"]["avoid"]["items"]["pattern"] = json!(NAME);
    // Numbers of 32 and 16 bits.
    schemas["ClientSpec"]["properties"]["pid"]["maximum"] = json!(u32::MAX);
    schemas["NodeGrantUse"]["properties"]["connections"]["maximum"] = json!(u32::MAX);
    schemas["NodeReport"]["properties"]["load_permille"]["maximum"] = json!(u16::MAX);
    schemas["TenantSpec"]["properties"]["priority"]["maximum"] = json!(u8::MAX);
    schemas["TenantSpec"]["properties"]["rate_bytes_per_s"]["minimum"] = json!(1);
    let redundancies: Vec<Option<&str>> =
        Redundancy::TEXTS.into_iter().map(Some).chain([None]).collect();
    schemas["TenantSpec"]["properties"]["redundancy"]["enum"] = json!(redundancies);
    let node = &mut schemas["NodeSpec"];
    node["properties"]["addresses"]["items"]["pattern"] = json!(ADDRESS);
    node["properties"]["donate_bytes"]["maximum"] = json!(BRICK_LIMIT_BYTES);
    // Who lends has an address.
    node["anyOf"] = json!([
        { "properties": { "donate_bytes": { "maximum": 0 } } },
        { "properties": { "addresses": { "minItems": 1 } } },
    ]);
}
