//! Prints the OpenAPI document: `cargo run -p farpool-control --example openapi >
//! docs/openapi.json`

fn main() -> Result<(), serde_json::Error> {
    println!("{}", serde_json::to_string_pretty(&farpool_control::openapi())?);
    Ok(())
}
