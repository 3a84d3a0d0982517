//! The controller fuzzed from its own OpenAPI document by schemathesis, with a fixed seed.

mod common;

use std::process::Command;
use std::time::Duration;

use common::{Agent, SUPERPAGE, Server, join_client, small};
use farpool_api::SegmentId;

/// Requests per operation and phase; enough to reach every refusal, few enough for every run.
const EXAMPLES: &str = "40";
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,\
                      response_schema_conformance,response_headers_conformance,\
                      positive_data_acceptance";

#[test]
fn its_document_describes_it() {
    let program = std::env::var("SCHEMATHESIS").unwrap_or_else(|_| "schemathesis".to_owned());
    if Command::new(&program).arg("--version").output().is_err() {
        farpool_testkit::skip("schemathesis is not installed (pip install 'schemathesis>=4,<5')");
        return;
    }
    // Waiting is tested elsewhere.
    let server = Server::fresh(|options| options.wait_limit = Duration::from_millis(20));
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 64 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    api.put_segment(SegmentId::from_u128(1), &small(client)).unwrap();
    node.settle(&api);
    let folder = tempfile::tempdir().unwrap();
    // A precondition that does not hold is an answer, not a refusal of the request's form.
    let accepted = r#"["2xx", "304", "401", "403", "404", "409", "412", "5xx"]"#;
    let config = format!("[checks.positive_data_acceptance]\nexpected-statuses = {accepted}\n");
    std::fs::write(folder.path().join("schemathesis.toml"), config).unwrap();
    let run = Command::new(&program)
        .current_dir(folder.path())
        .args(["run", "--seed", "1", "--max-examples", EXAMPLES, "--checks", CHECKS])
        .args(["--phases", "coverage,fuzzing", "--generation-database", "none"])
        // A stream has no end to wait for.
        .args(["--exclude-path", "/v1/events", "--request-timeout", "40", "--no-color"])
        .arg(format!("{}/v1/openapi.json", server.url))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{said}\n{}", String::from_utf8_lossy(&run.stderr));
    println!(
        "{}",
        said.lines()
            .rev()
            .take(25)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect::<Vec<_>>()
            .join("\n")
    );
    api.nodes().unwrap();
}
