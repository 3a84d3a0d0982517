//! What must hold for any bytes whatever as KeyVault's: used by the mutation test and by fuzz/.

use farpool_keyvault::frame::{HEADER_BYTES, Header, frame_length};
use farpool_keyvault::message::{Hello, Item, Request, read_found, read_numbers};
use farpool_keyvault::owner::hash_key;
use farpool_kv::protocol::light;

use super::exercise::full_shard;

/// Any stream of frames is answered without a panic, each request with one whole frame that a client can read, and
/// memory stays bounded.
pub fn answer_any(bytes: &[u8]) {
    let mut shard = full_shard();
    let mut rest = bytes;
    while let Some(Ok(length)) = frame_length(rest) {
        let Some((frame, behind)) = rest.split_at_checked(length) else { break };
        rest = behind;
        let (Ok(header), body) = (Header::read(frame, false), &frame[HEADER_BYTES..]) else {
            continue;
        };
        let Ok(request) = Request::read(header.opcode, body) else { continue };
        // What was read is written as it was.
        let mut written = Vec::new();
        request.write(&mut written);
        assert_eq!(Request::read(header.opcode, &written), Ok(request));
        let hash = request.key().map_or(0, hash_key);
        let mut out = Vec::new();
        light::answer(&mut shard, &header, &request, hash, true, &mut out);
        let answer = Header::read(&out, true).expect("an answer is a frame");
        assert_eq!((answer.length as usize, answer.request), (out.len(), header.request));
        assert!(answer.status.is_some());
        let (used, limit) = (shard.store.used_bytes(), shard.store.settings().limit_bytes);
        assert!(used <= limit + (128 << 10), "{used} bytes of {limit}");
    }
    // What a client reads of a server that lies.
    let _ = (Hello::read(bytes), Item::read(bytes), read_found(bytes), read_numbers(bytes));
}
