//! Properties that must hold for any bytes; used by the mutation test and by fuzz/.

use farpool_wire::*;

/// Bytes of the header's checksum.
const CHECKSUM: std::ops::Range<usize> = 28..32;

/// Decodes `bytes` as the beginning of a stream. Nothing panics, and whatever is accepted encodes
/// to the same bytes again.
pub(crate) fn decode_any(bytes: &[u8]) {
    let Ok(Some(head)) = split_head(bytes) else {
        return;
    };
    let mut again = Vec::new();
    let header = head.header;
    let encoded = match header.kind {
        Kind::Request => match Request::decode(&head) {
            Ok(request) => {
                let (id, checksum) = (header.request_id, header.pages_checksum);
                match header.is_background {
                    true => request.encode_in_background(id, checksum, &mut again),
                    false => request.encode(id, checksum, &mut again),
                }
            }
            Err(_) => return,
        },
        Kind::Response | Kind::Error => match Response::decode(&head) {
            Ok(response) => {
                let (id, credits) = (header.request_id, header.credits);
                response.encode(header.opcode, id, credits, header.pages_checksum, &mut again)
            }
            Err(_) => return,
        },
    };
    assert_eq!(encoded, Ok(()), "what was decoded can be encoded");
    assert_eq!(again, bytes[..header.head_bytes()], "each frame has one encoding only");
}

/// The same, after correcting magic, version and checksums, so that the fields behind them are
/// checked.
pub(crate) fn decode_repaired(bytes: &mut [u8]) {
    if bytes.len() >= HEADER_BYTES {
        bytes[..4].copy_from_slice(b"FPLW");
        bytes[4] = PROTOCOL_VERSION;
        let meta_bytes = usize::from(u16::from_le_bytes([bytes[16], bytes[17]]));
        let checksum = PagesChecksum::of(&bytes[..CHECKSUM.start]);
        bytes[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
        let end = HEADER_BYTES + meta_bytes;
        if meta_bytes > 0 && bytes.len() >= end + META_CHECKSUM_BYTES {
            let checksum = PagesChecksum::of(&bytes[..end]);
            bytes[end..end + META_CHECKSUM_BYTES].copy_from_slice(&checksum.to_le_bytes());
        }
    }
    decode_any(bytes);
}
