//! Utilisation as other tools write it: every codec, timestamps of every unit, decimals, and text
//! with any separator, quotes and dates.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use farpool_plan::pool::{self, Question};
use farpool_plan::utilisation::{Named, Options, Utilisation};
use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use parquet::data_type::{
    ByteArray, ByteArrayType, DataType, DoubleType, FixedLenByteArray, FixedLenByteArrayType,
    Int64Type, Int96, Int96Type,
};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

const STEPS: i64 = 12;
/// 2024-01-01T00:00:00Z.
const NEW_YEAR_S: i64 = 1_704_067_200;

fn column<T: DataType>(group: &mut SerializedRowGroupWriter<'_, File>, values: &[T::T]) {
    let mut column = group.next_column().expect("opens").expect("is in the schema");
    let levels = vec![1; values.len()];
    column.typed::<T>().write_batch(values, Some(&levels), None).expect("written");
    column.close().expect("closed");
}

/// Two machines over twelve steps; `time` writes the second column, whose type is `time_type`.
fn write(
    path: &Path,
    compression: Compression,
    time_type: &str,
    time: impl Fn(&mut SerializedRowGroupWriter<'_, File>, &[i64]),
) {
    let schema = format!(
        "message m {{ optional binary vm (STRING); optional {time_type}; optional double cpu; \
         optional int64 memory_bytes; }}"
    );
    let schema = Arc::new(parse_message_type(&schema).expect("a schema"));
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let file = File::create(path).expect("created");
    let mut writer = SerializedFileWriter::new(file, schema, properties).expect("opens");
    let mut group = writer.next_row_group().expect("opens");
    let steps: Vec<i64> = (0..STEPS).flat_map(|step| [step, step]).collect();
    let names: Vec<ByteArray> = steps.iter().enumerate().map(|(at, _)| name(at)).collect();
    column::<ByteArrayType>(&mut group, &names);
    time(&mut group, &steps);
    column::<DoubleType>(&mut group, &vec![1.0; steps.len()]);
    let memory: Vec<i64> = steps.iter().map(|step| (1 + step % 5) << 30).collect();
    column::<Int64Type>(&mut group, &memory);
    group.close().expect("closed");
    writer.close().expect("closed");
}

fn name(at: usize) -> ByteArray {
    ByteArray::from(if at.is_multiple_of(2) { "web-a" } else { "web-b" })
}

fn whole(
    per_second: i64,
    since_s: i64,
) -> impl Fn(&mut SerializedRowGroupWriter<'_, File>, &[i64]) {
    move |group, steps| {
        let times: Vec<i64> =
            steps.iter().map(|step| (since_s + 300 * step) * per_second).collect();
        column::<Int64Type>(group, &times);
    }
}

fn read(path: &Path) -> Result<Utilisation, String> {
    Utilisation::read(path, &Options::default()).map_err(|error| error.to_string())
}

#[track_caller]
fn is_right(path: &Path, what: &str) {
    let read = read(path).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!((read.vms.len(), read.steps, read.step_s), (2, 12, 300.0), "{what}");
    assert_eq!((read.vms[0].name.as_str(), read.memory(1)[3]), ("web-a", 4.0 * GIB), "{what}");
}

const GIB: f64 = (1_u64 << 30) as f64;

#[test]
fn parquet_of_every_codec_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vms.parquet");
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::ZSTD(ZstdLevel::default()),
        Compression::LZ4_RAW,
        Compression::LZ4,
        Compression::BROTLI(BrotliLevel::default()),
    ];
    for codec in codecs {
        write(&path, codec, "int64 time_s", whole(1, 0));
        is_right(&path, &format!("{codec:?}"));
    }
}

#[test]
fn a_timestamp_has_the_unit_of_its_type() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vms.parquet");
    let plain = Compression::UNCOMPRESSED;
    let types: [(&str, i64); 6] = [
        ("TIMESTAMP(MILLIS,true)", 1_000),
        ("TIMESTAMP(MICROS,true)", 1_000_000),
        ("TIMESTAMP(MICROS,false)", 1_000_000),
        ("TIMESTAMP(NANOS,true)", 1_000_000_000),
        ("TIMESTAMP_MILLIS", 1_000),
        ("TIMESTAMP_MICROS", 1_000_000),
    ];
    for (kind, per_second) in types {
        // Also where the name says milliseconds.
        for name in ["timestamp", "time_ms", "datetime"] {
            write(&path, plain, &format!("int64 {name} ({kind})"), whole(per_second, NEW_YEAR_S));
            is_right(&path, &format!("{name}, {kind}"));
        }
    }
    // Spark's older type: nanoseconds of the day, then the Julian day.
    write(&path, plain, "int96 timestamp", |group, steps| {
        let of = |step: &i64| {
            let ns = 300_000_000_000 * u64::try_from(*step).expect("positive");
            let mut value = Int96::new();
            #[allow(clippy::cast_possible_truncation)] // its halves
            value.set_data(ns as u32, (ns >> 32) as u32, 2_460_311);
            value
        };
        column::<Int96Type>(group, &steps.iter().map(of).collect::<Vec<_>>());
    });
    is_right(&path, "INT96");
    write(&path, plain, "binary timestamp (STRING)", |group, steps| {
        let of = |step: &i64| format!("2024-01-01T00:{:02}:00Z", step * 5);
        let texts: Vec<ByteArray> = steps.iter().map(|s| ByteArray::from(of(s).as_str())).collect();
        column::<ByteArrayType>(group, &texts);
    });
    is_right(&path, "text");
}

#[test]
fn plain_numbers_of_a_timestamp_column_are_never_guessed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vms.parquet");
    let plain = Compression::UNCOMPRESSED;
    for per_second in [1, 1_000, 1_000_000, 1_000_000_000] {
        write(&path, plain, "int64 timestamp", whole(per_second, NEW_YEAR_S));
        is_right(&path, &format!("{per_second} a second since 1970"));
    }
    write(&path, plain, "int64 timestamp", whole(1, 0));
    let error = read(&path).expect_err("0 to 3300 of what?");
    assert!(error.contains("--time-column timestamp:UNIT"), "{error}");
    let mut options = Options::default();
    options.columns.time = Some("timestamp:s".parse::<Named>().expect("a column"));
    assert_eq!(Utilisation::read(&path, &options).expect("named").step_s, 300.0);
}

#[test]
fn decimals_have_their_scale_and_dates_are_no_numbers() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vms.parquet");
    for is_fixed in [false, true] {
        let kind = if is_fixed { "fixed_len_byte_array(9)" } else { "int64" };
        let schema = format!(
            "message m {{ optional int64 vm; optional int64 time_s; \
             optional {kind} memory_gib (DECIMAL(18, 2)); }}"
        );
        let schema = Arc::new(parse_message_type(&schema).expect("a schema"));
        let file = File::create(&path).expect("created");
        let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).expect("opens");
        let mut group = writer.next_row_group().expect("opens");
        column::<Int64Type>(&mut group, &[7, 7]);
        column::<Int64Type>(&mut group, &[0, 300]);
        match is_fixed {
            false => column::<Int64Type>(&mut group, &[150, 250]),
            true => {
                let of = |value: i64| {
                    let bytes = [[0].as_slice(), &value.to_be_bytes()].concat();
                    FixedLenByteArray::from(bytes)
                };
                column::<FixedLenByteArrayType>(&mut group, &[of(150), of(250)]);
            }
        }
        group.close().expect("closed");
        writer.close().expect("closed");
        let read = read(&path).expect("decimals");
        assert_eq!(read.memory(0), [1.5 * GIB, 2.5 * GIB], "{kind}");
    }
    let hundredths = |group: &mut SerializedRowGroupWriter<'_, File>, steps: &[i64]| {
        let of = |step: &i64| {
            let value = (NEW_YEAR_S + 300 * step) * 100;
            FixedLenByteArray::from([[0].as_slice(), &value.to_be_bytes()].concat())
        };
        column::<FixedLenByteArrayType>(group, &steps.iter().map(of).collect::<Vec<_>>());
    };
    for name in ["time_s", "timestamp"] {
        let plain = Compression::UNCOMPRESSED;
        write(&path, plain, &format!("int64 {name} (DECIMAL(18, 2))"), whole(100, NEW_YEAR_S));
        is_right(&path, &format!("{name} in hundredths"));
        let kind = format!("fixed_len_byte_array(9) {name} (DECIMAL(20, 2))");
        write(&path, plain, &kind, hundredths);
        is_right(&path, &kind);
    }
    let too_long = |group: &mut SerializedRowGroupWriter<'_, File>, steps: &[i64]| {
        let of =
            |step: &i64| FixedLenByteArray::from([[1].as_slice(), &step.to_be_bytes()].concat());
        column::<FixedLenByteArrayType>(group, &steps.iter().map(of).collect::<Vec<_>>());
    };
    let kind = "fixed_len_byte_array(9) time_s (DECIMAL(20, 2))";
    write(&path, Compression::UNCOMPRESSED, kind, too_long);
    let error = read(&path).expect_err("2^64 hundredths");
    assert!(error.contains("row 1") && error.contains("digits"), "{error}");
    write(&path, Compression::UNCOMPRESSED, "binary time_s (DECIMAL(9, 2))", |group, steps| {
        let of = |step: &i64| ByteArray::from(step.to_string().as_str());
        column::<ByteArrayType>(group, &steps.iter().map(of).collect::<Vec<_>>());
    });
    assert!(read(&path).expect_err("digits of a decimal").contains("no times"));
    write(&path, Compression::UNCOMPRESSED, "int64 time_s (TIME(MICROS,true))", whole(1, 0));
    assert!(read(&path).expect_err("a time of day").contains("no times"));
}

fn text(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    fs::write(&path, bytes).expect("written");
    (folder, path)
}

#[test]
fn text_of_every_usual_kind_is_read() {
    let plain = "vm,time_s,cpu,memory_bytes\na,0,1,5\na,300,1,6\nb,0,1,6\nb,300,1,5\n";
    let quoted = "\"vm\",\"time_s\",\"cpu\",\"memory_bytes\"\n\"a\",0,1,5\n\"a\",300,1,6\n\
                  \"b, the \"\"second\"\"\",0,1,6\n\"b, the \"\"second\"\"\",300,1,5\n";
    let iso = plain.replace("time_s", "Timestamp").replace(",0,", ",2024-01-01T00:00:00Z,");
    let iso = iso.replace(",300,", ",2024-01-01T00:05:00Z,");
    let gzip = {
        let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        to.write_all(plain.as_bytes()).expect("packed");
        to.finish().expect("packed")
    };
    let cases: [(&str, Vec<u8>); 9] = [
        ("plain.csv", plain.into()),
        ("quoted.csv", quoted.into()),
        ("semicolon.csv", plain.replace(',', ";").into()),
        ("tab.tsv", plain.replace(',', "\t").into()),
        ("bom.csv", format!("\u{feff}{plain}").into()),
        ("bom_quoted.csv", format!("\u{feff}{quoted}").into()),
        ("iso.csv", iso.into()),
        ("packed.csv.gz", gzip),
        ("packed.csv.zst", zstd::encode_all(plain.as_bytes(), 1).expect("packed")),
    ];
    for (name, bytes) in cases {
        let (_folder, path) = text(name, &bytes);
        let read = read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((read.vms.len(), read.steps, read.step_s), (2, 2, 300.0), "{name}");
        assert_eq!((read.memory(1), read.cpu(0)), (&[6.0, 5.0][..], &[1.0, 1.0][..]), "{name}");
    }
    let (_folder, path) = text("comma.csv", b"vm;time_s;memory_gib\na;0;1,5\na;300;1\n");
    let error = read(&path).expect_err("one and a half, or fifteen?");
    assert!(error.contains("row 2") && error.contains("point"), "{error}");
}

#[test]
fn a_row_without_end_is_refused_before_it_fills_memory() {
    // A line, and a quote that is never closed over many lines.
    for endless in ["x".repeat(1 << 20), "a,0,1,5\n".repeat(1 << 17)] {
        let begins = "vm,time_s,cpu,memory_bytes\na,0,1,5\n\"";
        let (_folder, path) = text("vms.csv", format!("{begins}{endless}").as_bytes());
        let error = read(&path).expect_err("no row");
        assert!(error.contains("row 3: a line of more than 65536 bytes"), "{error}");
    }
    let (_folder, path) = text("vms.csv", &vec![b','; 1 << 20]);
    assert!(read(&path).expect_err("no header").contains("row 1: a line of more than"));
}

#[test]
fn memory_alone_is_enough_for_pools_and_processors_alone_are_not() {
    let (_folder, path) =
        text("vms.csv", b"vm,time_s,memory_bytes\na,0,1000\na,300,10\nb,0,3\nb,300,1000\n");
    let read_ = read(&path).expect("memory only");
    assert!(read_.warnings()[0].contains("no column for processors"), "{:?}", read_.warnings());
    let question = Question { group: 2, ..Question::default() };
    let answer = pool::plan(&read_, &question, &mut |_| {}).expect("an answer");
    assert_eq!(answer.sizes.last().expect("a size").ratio, 1010.0 / 2000.0);
    let (_folder, path) = text("vms.csv", b"vm,time_s,cpu\na,0,1\na,300,1\n");
    let read_ = read(&path).expect("processors only");
    let question = Question { group: 1, ..Question::default() };
    let error = pool::plan(&read_, &question, &mut |_| {}).expect_err("no memory");
    assert!(error.to_string().contains("--memory-column"), "{error}");
}

#[test]
fn a_whole_datacentre_is_one_machine_and_says_so() {
    let (_folder, path) = text("all.csv", b"avg_cpu,avg_mem\n0.44,0.33\n0.43,0.35\n");
    let read_ = read(&path).expect("a datacentre");
    assert_eq!((read_.vms[0].name.as_str(), read_.memory(0)), ("all", &[0.33, 0.35][..]));
    assert!(read_.warnings()[0].contains("one machine"), "{:?}", read_.warnings());
    // Several machines in a column that nobody named are not one.
    let (_folder, path) = text("some.csv", b"who,time_s,memory_gib\na,0,1\nb,0,1\n");
    assert!(read(&path).expect_err("two machines").contains("--vm-column"));
}
