//! The golden frames of tests/vectors: today's encoding equals the stored one, and decodes.
//! `FARPOOL_WRITE_VECTORS=1 cargo test -p farpool-wire --test vectors` rewrites them, which only a
//! new protocol version may need.

mod samples;

use farpool_wire::*;
use samples::Sample;
use std::fmt::Write;
use std::path::PathBuf;

fn path_of(name: &str) -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/vectors");
    PathBuf::from(root).join(format!("{name}.hex"))
}

fn to_text(name: &str, frame: &[u8]) -> String {
    let mut text = format!("# {name}, protocol version {PROTOCOL_VERSION}\n");
    for line in frame.chunks(16) {
        let bytes: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "{}", bytes.join(" ")).unwrap();
    }
    text
}

fn to_bytes(text: &str) -> Vec<u8> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(str::split_whitespace)
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}

fn check_decodes(name: &str, sample: &Sample<'_>, frame: &[u8], pages: &[u8]) {
    let head = split_head(frame).unwrap().unwrap();
    assert_eq!(&frame[head.header.head_bytes()..], pages, "{name}");
    assert_eq!(head.header.pages_checksum, PagesChecksum::of(pages), "{name}");
    match sample {
        Sample::Request(request) | Sample::InBackground(request) => {
            assert_eq!(Request::decode(&head).as_ref(), Ok(request));
            let is_background = matches!(sample, Sample::InBackground(_));
            assert_eq!(head.header.is_background, is_background, "{name}");
        }
        Sample::Response(opcode, response) => {
            assert_eq!(head.header.opcode, *opcode);
            assert_eq!(Response::decode(&head).as_ref(), Ok(response));
        }
    }
}

#[test]
fn golden_frames_are_encoded_and_decoded() {
    let is_writing = std::env::var_os("FARPOOL_WRITE_VECTORS").is_some();
    let mut names = Vec::new();
    samples::visit(|name, sample, pages| {
        let path = path_of(name);
        let frame = samples::encode(sample, pages);
        if is_writing {
            std::fs::write(&path, to_text(name, &frame)).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        assert_eq!(to_bytes(&golden), frame, "{name} is not encoded as in {path:?}");
        check_decodes(name, sample, &frame, pages);
        names.push(format!("{name}.hex"));
    });
    let directory = path_of("x").with_file_name("");
    for entry in std::fs::read_dir(directory).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(names.contains(&name), "{name} is no vector of this version");
    }
}

#[test]
fn every_opcode_has_a_vector() {
    let mut seen = Vec::new();
    samples::visit(|_, sample, _| {
        if let Sample::Request(request) = sample {
            seen.push(request.opcode());
        }
    });
    for opcode in Opcode::ALL {
        assert!(seen.contains(opcode), "{opcode:?}");
    }
}
