//! What is written is read back; damaged or foreign files are refused by name and row.

mod exercise;

use std::io::{BufReader, Read, Write};
use std::path::Path;

use farpool_trace::import::{CsvColumns, Format, ImportOptions, import, read_records};
use farpool_trace::{
    Access, Batch, CacheFilter, Clock, Columns, Filter, Record, TraceError, TraceInfo, TraceReader,
    TraceWriter, export,
};
use proptest::prelude::*;
use tempfile::TempDir;

fn write(path: &Path, records: &[Record]) {
    let mut info = TraceInfo::new("test", 64, Clock::Accesses);
    info.program = vec!["sort".to_owned(), "big.txt".to_owned()];
    let caches = CacheFilter { l1_bytes: 1, l1_ways: 2, llc_bytes: 3, llc_ways: 4 };
    info.filter = Some(Filter::Caches(caches));
    let mut writer = TraceWriter::create(path, info).unwrap();
    for &record in records {
        writer.push(record).unwrap();
    }
    assert_eq!(writer.finish().unwrap(), records.len() as u64);
}

fn read(path: &Path) -> Result<Vec<Record>, TraceError> {
    let mut reader = TraceReader::open(path, Columns::ALL)?;
    let mut records = Vec::new();
    let mut batch = Batch::default();
    while reader.next_batch(&mut batch)? {
        records.extend(batch.records());
    }
    assert_eq!(records.len() as u64, reader.records());
    Ok(records)
}

fn any_record() -> impl Strategy<Value = Record> {
    let block = prop_oneof![0u64..1000, any::<u64>()];
    let ticks = prop_oneof![0u64..10, any::<u64>()];
    (block, ticks, 0u8..3, prop_oneof![Just(0), any::<u32>()]).prop_map(
        |(block, ticks, access, thread)| {
            let access = Access::from_code(access).unwrap();
            Record { block, ticks, access, thread }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn records_come_back_as_they_were(records in proptest::collection::vec(any_record(), 0..400)) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("t.parquet");
        write(&path, &records);
        prop_assert_eq!(read(&path).unwrap(), records);
    }

    #[test]
    fn no_bytes_end_an_import_otherwise_than_by_name(
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
        beginning in prop::sample::select(vec!["", "block,time\n", "address\n", " L \
            1000,8\n", "\0\0\0\x02", "key,size\n", "1,9\n"]),
        is_text in any::<bool>(),
    ) {
        let noise = if is_text {
            bytes.iter().map(|byte| b"0123456789abcdefx,- \nLSMI"[usize::from(byte % 25)]).collect()
        } else {
            bytes
        };
        let bytes = [beginning.as_bytes(), &noise].concat();
        for format in [exercise::objects(), exercise::sized_addresses()] {
            exercise::import_any(&bytes, &format);
        }
        for format in every_format() {
            exercise::import_any(&bytes, &format);
            for name in ["t.bin", "t.zst"] {
                if let Err(refusal) = imported(name, &bytes, format.clone(), 64) {
                    prop_assert!(refusal.contains(name), "{}", refusal);
                }
            }
        }
    }

    #[test]
    fn a_changed_bit_is_an_error(at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("t.parquet");
        let records: Vec<Record> = (0..500)
            .map(|n| Record { block: n * n % 97, ticks: n % 3, access: Access::Read, thread: 0 })
            .collect();
        write(&path, &records);
        let mut bytes = std::fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        std::fs::write(&path, &bytes).unwrap();
        prop_assert!(read(&path).is_err(), "byte {} bit {}", at, bit);
    }
}

/// `fuzz/` does the same for any length of time.
fn every_format() -> [Format; 5] {
    let csv = Format::Csv(CsvColumns::default());
    [Format::Lackey, Format::OracleGeneral, Format::Vscsi, csv, Format::Ramulator]
}

#[test]
fn an_access_without_end_is_refused() {
    for (text, part) in [
        (" L 0,9223372036854775808\n", "touches more than 65536 bytes at once"),
        (" S ffffffffffffffff,2\n", "goes beyond the last address"),
    ] {
        exercise::import_any(text.as_bytes(), &Format::Lackey);
        let refusal = imported("t.lackey", text.as_bytes(), Format::Lackey, 64).unwrap_err();
        assert!(refusal.contains(part) && refusal.contains("row 1"), "{refusal}");
    }
    let last = imported("t.lackey", b" L ffffffffffffffff,1\n", Format::Lackey, 64).unwrap();
    assert_eq!(last[0].block, u64::MAX / 64);
}

#[test]
fn a_line_without_end_is_refused_before_it_fills_memory() {
    const READ_BYTES_MAX: u64 = 1 << 20;
    for format in [Format::Lackey, Format::Csv(CsvColumns::default())] {
        let mut endless = BufReader::new(std::io::repeat(b'1').take(READ_BYTES_MAX));
        let options = ImportOptions { format, block_bytes: 64, sized: false };
        let place = Path::new("endless");
        let refusal = read_records(place, &mut endless, &options, &mut |_| Ok(())).unwrap_err();
        assert!(refusal.to_string().contains("endless: row 1: longer than"), "{refusal}");
        let unread_bytes = endless.get_ref().limit();
        assert!(unread_bytes > READ_BYTES_MAX * 3 / 4, "only {unread_bytes} bytes left unread");
    }
}

#[test]
fn vscsi_versions_are_told_apart_whatever_the_pieces() {
    // Version 1, whose first 16 bytes hold no version; pieces of seven bytes do not even reach
    // there.
    let mut record = [0; 32];
    record[15] = 1;
    let mut pieces = BufReader::with_capacity(7, &record[..]);
    let options = ImportOptions { format: Format::Vscsi, block_bytes: 512, sized: false };
    let count = read_records(Path::new("pieces"), &mut pieces, &options, &mut |_| Ok(()));
    assert_eq!(count.unwrap(), 1);
    exercise::import_any(&record, &Format::Vscsi);
}

#[test]
fn columns_outside_the_file_and_wrong_counts_are_refused() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("t.parquet");
    let whole = exercise::whole_file();
    assert_eq!(exercise::read_any(&path, &whole).unwrap(), 200);
    assert_eq!(exercise::open_repaired(&path, &whole, &[]).unwrap(), 200);
    // One changed byte of the footer at a time: some place a column outside the file, some make the
    // count of rows wrong.
    let (mut outside, mut miscounted) = (0, 0);
    for at in 0..400u16 {
        for byte in [0x00, 0x01, 0x7F, 0x80, 0xFF] {
            let [low, high] = at.to_le_bytes();
            if let Err(refusal) = exercise::open_repaired(&path, &whole, &[low, high, byte]) {
                let refusal = refusal.to_string();
                outside += u32::from(refusal.contains("lies outside the file"));
                miscounted += u32::from(refusal.contains("in its row groups"));
            }
        }
    }
    assert!(outside > 0 && miscounted > 0, "{outside} outside, {miscounted} miscounted");
}

#[test]
fn several_row_groups_keep_their_order() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("long.parquet");
    let count = farpool_trace::writer::ROW_GROUP_RECORDS as u64 * 2 + 17;
    let record = |n: u64| Record { block: n ^ 5, ticks: 1, access: Access::Write, thread: 3 };
    write(&path, &(0..count).map(record).collect::<Vec<_>>());
    let records = read(&path).unwrap();
    assert_eq!(records.len() as u64, count);
    assert!(records.iter().enumerate().all(|(n, found)| *found == record(n as u64)));
}

#[test]
fn a_truncated_trace_is_refused_at_every_length() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("t.parquet");
    let record = Record { block: 1, ticks: 1, access: Access::Read, thread: 0 };
    write(&path, &[record; 100]);
    let bytes = std::fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let refusal = read(&path).expect_err("a part of a file").to_string();
        assert!(refusal.contains("t.parquet"), "{refusal}");
    }
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("t.parquet");
    let info = TraceInfo::new("test", 64, Clock::Accesses);
    let mut writer = TraceWriter::create(&path, info).unwrap();
    writer.push(Record { block: 1, ticks: 1, access: Access::Read, thread: 0 }).unwrap();
    drop(writer);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Imports `bytes` from a file of this name. Returns the records or the error.
fn imported(
    name: &str,
    bytes: &[u8],
    format: Format,
    block_bytes: u64,
) -> Result<Vec<Record>, String> {
    let folder = TempDir::new().unwrap();
    let (from, to) = (folder.path().join(name), folder.path().join("out.parquet"));
    std::fs::write(&from, bytes).unwrap();
    let options = ImportOptions { format, block_bytes, sized: false };
    let result = import(&from, &to, &options, &mut |_| ());
    assert_eq!(to.exists(), result.is_ok(), "no file of a failed import");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1 + usize::from(result.is_ok()));
    result.map_err(|error| error.to_string()).map(|_| read(&to).unwrap())
}

fn csv(text: &str) -> Result<Vec<Record>, String> {
    imported("t.csv", text.as_bytes(), Format::Csv(CsvColumns::default()), 4096)
}

#[test]
fn lackey_lines_become_lines_of_memory() {
    let text = b"==7== Lackey\nI  04000a,3\n L 1000,8\n S 103c,8\n M 2000,4\n";
    let records = imported("t.lackey", text, Format::Lackey, 64).unwrap();
    let record = |block, access| Record { block, ticks: 1, access, thread: 0 };
    let (read, write) = (Access::Read, Access::Write);
    assert_eq!(
        records,
        [record(0x40, read), record(0x40, write), record(0x41, write), record(0x80, write)]
    );
    let refusal = imported("t.lackey", b" L 1000,8\n L zz,8\n", Format::Lackey, 64).unwrap_err();
    assert!(refusal.contains("t.lackey: row 2: \"L zz,8\" is none of lackey's lines"), "{refusal}");
}

#[test]
fn oracle_general_is_read_plain_and_compressed() {
    let mut bytes = Vec::new();
    for (time, object) in [(5u32, 9u64), (5, 7), (8, 9)] {
        bytes.extend(time.to_le_bytes());
        bytes.extend(object.to_le_bytes());
        bytes.extend(4096u32.to_le_bytes());
        bytes.extend((-1i64).to_le_bytes());
    }
    let packed = zstd::encode_all(&bytes[..], 1).unwrap();
    for (name, content) in [("t.bin", &bytes), ("t.bin.zst", &packed)] {
        let records = imported(name, content, Format::OracleGeneral, 4096).unwrap();
        let found: Vec<_> = records.iter().map(|r| (r.block, r.ticks)).collect();
        assert_eq!(found, [(9, 0), (7, 0), (9, 3)]);
    }
    let refusal = imported("t.bin", &bytes[..60], Format::OracleGeneral, 4096).unwrap_err();
    assert!(refusal.contains("row 3: the file ends after 12 of a record's 24 bytes"), "{refusal}");
    bytes[48..52].copy_from_slice(&4u32.to_le_bytes());
    let refusal = imported("t.bin", &bytes, Format::OracleGeneral, 4096).unwrap_err();
    assert!(refusal.contains("row 3: time goes back, from 5 to 4"), "{refusal}");
}

#[test]
fn both_versions_of_vscsi_are_told_apart() {
    let one = |command: u16, block: u64, time: u64| {
        let mut record = Vec::new();
        for word in [1u32, 512, 1] {
            record.extend(word.to_le_bytes());
        }
        record.extend(command.to_le_bytes());
        record.extend(0x0100u16.to_le_bytes());
        record.extend(block.to_le_bytes());
        record.extend(time.to_le_bytes());
        record
    };
    let two = |command: u16, block: u64, time: u64| {
        let mut record = Vec::new();
        record.extend(command.to_le_bytes());
        record.extend(0x0200u16.to_le_bytes());
        for word in [1u32, 512, 1] {
            record.extend(word.to_le_bytes());
        }
        record.extend(block.to_le_bytes());
        record.extend(time.to_le_bytes());
        record.extend(0u64.to_le_bytes());
        record
    };
    let expected = [
        Record { block: 77, ticks: 0, access: Access::Read, thread: 0 },
        Record { block: 78, ticks: 10, access: Access::Write, thread: 0 },
    ];
    let first = [one(0x28, 77, 1000), one(0x2A, 78, 1010)].concat();
    assert_eq!(imported("1.vscsi", &first, Format::Vscsi, 512).unwrap(), expected);
    let second = [two(0x28, 77, 1000), two(0x2A, 78, 1010)].concat();
    assert_eq!(imported("2.vscsi", &second, Format::Vscsi, 512).unwrap(), expected);
    let refusal =
        imported("3.vscsi", b"no such thing, whatever it may be, in here", Format::Vscsi, 512);
    assert!(refusal.unwrap_err().contains("neither version 1 nor version 2"));
}

#[test]
fn csv_columns_are_found_by_name() {
    let records =
        csv("time,address,write,thread\n10,0x3000,w,0\n12,4096,0,1\n15,8191,r,0\n").unwrap();
    let found: Vec<_> = records.iter().map(|r| (r.block, r.ticks, r.access, r.thread)).collect();
    let (read, write) = (Access::Read, Access::Write);
    assert_eq!(found, [(3, 0, write, 0), (1, 0, read, 1), (1, 5, read, 0)]);
}

#[test]
fn csv_refusals_name_the_row() {
    for (text, part) in [
        ("", "row 1: the file is empty"),
        ("page\n1\n", "row 1: no column \"block\" or \"address\"; the header has page"),
        ("block,time\n1,5\n2,4\n", "row 3: time goes back, from 5 to 4"),
        ("block\n1\n\nNaN\n", "row 4: \"NaN\" is not a whole number"),
        ("block\n-1\n", "row 2: \"-1\" is not a whole number"),
        ("block,write\n1,maybe\n", "row 2: \"maybe\" is neither read nor write"),
        ("block,write\n1\n", "row 2: only 1 columns"),
        ("block\n", "holds no record"),
    ] {
        let refusal = csv(text).unwrap_err();
        assert!(refusal.contains(part), "{text:?} gave {refusal}");
    }
}

#[test]
fn an_export_is_imported_as_the_same_pages() {
    let folder = TempDir::new().unwrap();
    let [from, out, back] =
        ["t.parquet", "t.bin.zst", "back.parquet"].map(|n| folder.path().join(n));
    let record = |block| Record { block, ticks: 3, access: Access::Read, thread: 0 };
    // Lines of 64 bytes: 64 of them are a page.
    write(&from, &[0, 63, 64, 640, 1].map(record));
    assert_eq!(export::oracle_general(&from, &out, 4096).unwrap(), 5);
    let bytes = zstd::decode_all(std::fs::File::open(&out).unwrap()).unwrap();
    let next = |at: usize| i64::from_le_bytes(bytes[at * 24 + 16..][..8].try_into().unwrap());
    assert_eq!([0, 1, 2, 3, 4].map(next), [2, 5, -1, -1, -1]);
    let options = ImportOptions { format: Format::OracleGeneral, block_bytes: 4096, sized: false };
    import(&out, &back, &options, &mut |_| ()).unwrap();
    let pages: Vec<u64> = read(&back).unwrap().iter().map(|r| r.block).collect();
    assert_eq!(pages, [0, 0, 1, 10, 0]);
}

#[test]
fn foreign_files_are_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("t.parquet");
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(b"PAR1 not really Parquet").unwrap();
    let refusal = TraceReader::open(&path, Columns::ALL).unwrap_err().to_string();
    assert!(refusal.contains("t.parquet: cut short, or not a Parquet file"), "{refusal}");
    let missing = folder.path().join("none.parquet");
    let refusal = TraceReader::open(&missing, Columns::ALL).unwrap_err().to_string();
    assert!(refusal.contains("none.parquet: No such file"), "{refusal}");
}

#[test]
fn nothing_but_a_regular_file_is_replaced() {
    let folder = TempDir::new().unwrap();
    let info = || TraceInfo::new("test", 64, Clock::Accesses);
    // A folder stands for a device: as root, a rename would put a file in the place of /dev/null.
    let refusal = TraceWriter::create(folder.path(), info()).unwrap_err().to_string();
    assert!(refusal.contains("not a regular file"), "{refusal}");
    let refusal = TraceWriter::create(Path::new("/dev/null"), info()).unwrap_err().to_string();
    assert!(refusal.contains("/dev/null: not a regular file"), "{refusal}");
    let [target, link] = ["target.parquet", "link.parquet"].map(|name| folder.path().join(name));
    std::fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    write(&link, &[Record { block: 1, ticks: 1, access: Access::Read, thread: 0 }]);
    assert!(link.is_symlink());
    assert_eq!(read(&target).unwrap().len(), 1);
}

fn blocks(content: &[u8], name: &str, format: Format) -> Vec<u64> {
    let records = imported(name, content, format, 4096).unwrap();
    records.iter().map(|record| record.block).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    to.write_all(bytes).unwrap();
    to.finish().unwrap()
}

#[test]
fn lines_of_ramulator_are_read_in_either_order() {
    let text = b"# comment\n0x1000 R\n0x2000 W\nLD 0x3000\nST 4096\n\n0x5000\n";
    let records = imported("t.trace", text, Format::Ramulator, 4096).unwrap();
    let kinds: Vec<_> = records.iter().map(|it| (it.block, it.access.is_write())).collect();
    assert_eq!(kinds, [(1, false), (2, true), (3, false), (1, true), (5, false)]);
    for bad in ["0x1000 X\n", "hello\n", "LD\n", "0x1 0x2 R\n"] {
        let refusal = imported("t.trace", bad.as_bytes(), Format::Ramulator, 4096).unwrap_err();
        assert!(refusal.contains("t.trace") && refusal.contains("0x1234 R"), "{refusal}");
    }
}

#[test]
fn compressed_text_is_unpacked_whatever_its_name() {
    let csv = || Format::Csv(CsvColumns::default());
    let text = b"block,write\n7,st\n9,LD\n";
    for name in ["t.csv", "t.csv.gz"] {
        assert_eq!(blocks(&gzip(text), name, csv()), [7, 9], "{name}");
    }
    assert_eq!(blocks(&zstd::encode_all(&text[..], 1).unwrap(), "t.csv", csv()), [7, 9]);
    // Binary records may begin like gzip; only a name tells.
    let refusal = imported("t.gz", b"no gzip", Format::OracleGeneral, 4096).unwrap_err();
    assert!(refusal.contains("t.gz"), "{refusal}");
}

#[test]
fn objects_have_names_and_sizes_and_files_need_no_header() {
    let columns = CsvColumns {
        object: Some("2".to_owned()),
        size: Some("3".to_owned()),
        time: Some("1".to_owned()),
        has_header: false,
        has_decimal_seconds: true,
        ..CsvColumns::default()
    };
    let text = b"0.5;\"photo; large\";9000\n0.75;page;1\n1;\"photo; large\";9000\n";
    let records = imported("t.csv", text, Format::Csv(columns), 4096).unwrap();
    let object = 1_u64 << 24;
    let found: Vec<u64> = records.iter().map(|record| record.block).collect();
    assert_eq!(found, [0, 1, 2, object, 0, 1, 2]);
    let ticks: Vec<u64> = records.iter().map(|record| record.ticks).collect();
    assert_eq!(ticks, [0, 0, 0, 250_000_000, 250_000_000, 0, 0]);
    let columns = CsvColumns { object: Some("id".to_owned()), ..CsvColumns::default() };
    let text = "\u{feff}id\twrite\nalpha\tr\nbeta\tw\nalpha\tr\n";
    assert_eq!(blocks(text.as_bytes(), "t.csv", Format::Csv(columns)), [0, object, 0]);
    let columns = CsvColumns { time: Some("t".to_owned()), ..CsvColumns::default() };
    let text = b"block,t\n1,0.5\n";
    let refusal = imported("t.csv", text, Format::Csv(columns), 4096).unwrap_err();
    assert!(refusal.contains("decimal-s"), "{refusal}");
}

#[test]
fn sized_accesses_are_in_the_blocks_of_their_addresses() {
    let columns = || CsvColumns { size: Some("size".to_owned()), ..CsvColumns::default() };
    let found = |text: &str| imported("t.csv", text.as_bytes(), Format::Csv(columns()), 4096);
    // The last one is of two bytes, one on either side of a page's end.
    let text = "address,size\n0x12000,4096\n0x12000,4097\n0x13000,0\n0x13fff,2\n";
    let records = found(text).unwrap();
    let blocks: Vec<u64> = records.iter().map(|record| record.block).collect();
    assert_eq!(blocks, [0x12, 0x12, 0x13, 0x13, 0x13, 0x14]);
    let ticks: Vec<u64> = records.iter().map(|record| record.ticks).collect();
    assert_eq!(ticks, [1, 1, 0, 1, 1, 0]);
    for (row, reason) in [
        ("0xffffffffffffffff,2", "beyond the last address"),
        ("0,68719476737", "at most 16777216 blocks"),
        ("photo,4096", "not a whole number"),
    ] {
        let refusal = found(&format!("address,size\n{row}\n")).unwrap_err();
        assert!(refusal.contains("row 2") && refusal.contains(reason), "{refusal}");
    }
}

#[test]
fn sizes_of_oracle_general_count_if_asked_for() {
    let folder = TempDir::new().unwrap();
    let from = folder.path().join("t.oracleGeneral");
    let record = |object: u64, size: u32| {
        let bytes = [&0_u32.to_le_bytes()[..], &object.to_le_bytes(), &size.to_le_bytes()];
        [bytes.concat(), (-1_i64).to_le_bytes().to_vec()].concat()
    };
    std::fs::write(&from, [record(77, 4097), record(5, 1)].concat()).unwrap();
    let to = folder.path().join("t.parquet");
    let options = ImportOptions { format: Format::OracleGeneral, block_bytes: 4096, sized: true };
    import(&from, &to, &options, &mut |_| ()).unwrap();
    let found: Vec<u64> = read(&to).unwrap().iter().map(|record| record.block).collect();
    assert_eq!(found, [0, 1, 1 << 24]);
}
