//! Neither decoder panics, whatever arrives; `fuzz/` does the same, guided by coverage.

#[allow(dead_code)]
mod exercise;

use proptest::prelude::*;

const MESSAGE: &[u8] = include_bytes!("golden/firecracker_regions.json");
const CONFIG: &[u8] = include_bytes!("golden/cloud_hypervisor_config.json");

/// A request with its payload, as a sender would write it.
fn request(command: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![command, 0, 0, 0, 0, 0, 0, 0];
    bytes.extend((payload.len() as u64).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn hand_off() -> Vec<u8> {
    let slots = [request(7, &[0; 4]), request(7, &[1, 0, 0, 0])].concat();
    let config = [request(2, CONFIG), request(3, b"state")].concat();
    [request(1, &[]), slots, config, request(5, &[])].concat()
}

#[test]
fn right_ones_are_taken() {
    exercise::read_message(MESSAGE);
    exercise::read_migration(&[hand_off(), vec![0; 32]].concat());
}

proptest! {
    #[test]
    fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        exercise::read_message(&bytes);
        exercise::read_migration(&bytes);
    }

    /// What is nearly right goes deeper than what is random.
    #[test]
    fn damaged_messages_are_read(
        changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..4),
        length in any::<usize>(),
    ) {
        for (right, read) in [
            (MESSAGE.to_vec(), exercise::read_message as fn(&[u8])),
            (hand_off(), exercise::read_migration),
        ] {
            let mut bytes = right;
            for (at, value) in &changes {
                let at = at % bytes.len();
                bytes[at] = *value;
            }
            read(&bytes);
            bytes.truncate(length % bytes.len());
            read(&bytes);
        }
    }
}
