//! Prints the OpenAPI document: `cargo run -p farpool-control --example openapi >
//! docs/openapi.json`

fn main() -> Result<(), serde_json::Error> {
    println!("{}", farpool_control::openapi().to_pretty_json()?);
    Ok(())
}
