//! Files of real machines, and broken files.

mod common;

use std::fs;
use std::path::Path;

use common::{bitbrains, google};
use farpool_plan::pool::{Answer, Question, Verdict, plan};
use farpool_plan::utilisation::{Above, CpuUnit, MemoryUnit, Options, Utilisation};

fn read(path: &Path, options: &Options) -> Result<Utilisation, String> {
    Utilisation::read(path, options).map_err(|error| format!("{error}"))
}

fn ratio(answer: &Answer, vms: usize) -> f64 {
    answer.sizes.iter().find(|size| size.vms == vms).expect("this size").ratio
}

fn near(found: f64, wanted: f64, what: &str) {
    assert!((found - wanted).abs() < 0.005, "{what}: {found:.4}, not {wanted}");
}

#[test]
fn google_s_machines_are_not_worth_a_pool() {
    let options = Options { above: Above::Keep, ..Options::default() };
    let machines = read(&google(), &options).expect("it ships");
    assert_eq!((machines.vms.len(), machines.steps, machines.step_s), (1600, 288, 300.0));
    assert_eq!(machines.mended.above_100_percent, 613);
    near(machines.cpu(0)[0], 0.0676, "the first sample");
    let question = Question { group: 16, groupings: 20, ..Question::default() };
    let answer = plan(&machines, &question, &mut |_| {}).expect("an answer");
    for (vms, wanted) in [(2, 0.987), (16, 0.932), (128, 0.891), (1600, 0.876)] {
        near(ratio(&answer, vms), wanted, &format!("{vms} machines"));
    }
    assert_eq!(answer.advice.verdict, Verdict::DoNotPool);
    let clipped = read(&google(), &Options::default()).expect("it ships");
    assert!(clipped.warnings()[0].contains("613 of 921600 values"), "{:?}", clipped.warnings());
    let answer = plan(&clipped, &question, &mut |_| {}).expect("an answer");
    near(ratio(&answer, 1600), 0.881, "all, clipped");
}

#[test]
fn bitbrains_machines_are_worth_a_pool() {
    let Some(folder) = bitbrains() else { return };
    let file = folder.join("bitbrains-rnd-2013-08-week1-5min.parquet");
    let mut machines = read(&file, &Options::default()).expect("readable");
    assert_eq!((machines.vms.len(), machines.steps), (499, 2016));
    assert_eq!((machines.cpu_unit, machines.memory_unit), (CpuUnit::Mhz, MemoryUnit::Bytes));
    let table = folder.join("bitbrains-rnd-2013-08-vms.parquet");
    machines.read_provisioned(&table, &Options::default().columns).expect("all are in it");
    assert_eq!(machines.vms[0].memory_provisioned, Some(8_388_608.0 * 1024.0));
    let question = Question { group: 16, groupings: 40, ..Question::default() };
    let answer = plan(&machines, &question, &mut |_| {}).expect("an answer");
    // From NumPy over the same week; the whole month has 0.74, 0.54, 0.43 and 0.38.
    for (vms, wanted) in [(4, 0.794), (16, 0.555), (64, 0.409), (128, 0.384), (499, 0.3626)] {
        let found = ratio(&answer, vms);
        assert!((found - wanted).abs() < 0.015, "{vms} machines: {found:.4}, not {wanted}");
    }
    assert_eq!(answer.advice.verdict, Verdict::Pool);
}

#[test]
fn broken_and_foreign_files_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let whole = fs::read(google()).expect("it ships");
    let path = folder.path().join("vms.parquet");
    for length in (0..whole.len()).step_by(9_973).chain([3, whole.len() - 1]) {
        fs::write(&path, &whole[..length]).expect("written");
        let error = read(&path, &Options::default()).expect_err("truncated");
        assert!(error.contains("vms.parquet"), "{length}: {error}");
    }
    fs::write(&path, "vm,time_s,cpu,memory_bytes\n").expect("written");
    assert!(read(&path, &Options::default()).expect_err("no Parquet").contains("Parquet"));
    assert!(read(&folder.path().join("none.csv"), &Options::default()).is_err());
}

fn csv(text: &str, options: &Options) -> Result<Utilisation, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vms.csv");
    fs::write(&path, text).expect("written");
    read(&path, options)
}

#[test]
fn comma_separated_values_are_read_by_the_names_of_their_columns() {
    let text =
        "time_s,memory_bytes,vm,cpu\r\n0,4096,web,0.5\r\n0,8192,db,1\r\n60,4096,web,0.25\r\n";
    let machines = csv(text, &Options::default()).expect("good");
    assert_eq!((machines.vms[1].name.as_str(), machines.steps, machines.step_s), ("db", 2, 60.0));
    assert_eq!((machines.memory(0), machines.cpu(0)), (&[4096.0, 4096.0][..], &[0.5, 0.25][..]));
    let mut options = Options::default();
    let text = "machine,when,load,rss\na,0,50,1\na,300,60,2\n";
    assert!(csv(text, &options).expect_err("unknown names").contains("--vm-column"));
    let named = |text: &str| Some(text.parse().expect("a column"));
    options.columns.vm = named("machine");
    options.columns.time = named("when:s");
    options.columns.cpu = named("load");
    options.columns.memory = named("rss:gib");
    assert!(csv(text, &options).expect_err("no unit").contains("load:UNIT"));
    options.columns.cpu = named("load:percent");
    let machines = csv(text, &options).expect("good");
    assert_eq!((machines.cpu(0)[1], machines.memory(0)[1]), (0.6, f64::from(1 << 30) * 2.0));
}

#[test]
fn bad_rows_are_named_with_their_line() {
    let header = "vm,time_s,cpu,memory_bytes\na,0,1,10\n";
    let cases = [
        ("a,300,1\n", "3 fields"),
        ("a,300,one,10\n", "cpu is \"one\""),
        ("a,300,NaN,10\n", "not a number"),
        ("a,300,1,-10\n", "below zero"),
        ("a,-300,1,10\n", "backwards"),
        ("\"a,300,1,10\n", "quote"),
    ];
    for (line, reason) in cases {
        let error = csv(&format!("{header}{line}"), &Options::default()).expect_err(reason);
        assert!(error.contains("vms.csv, row 3") && error.contains(reason), "{error}");
    }
    assert!(csv("", &Options::default()).expect_err("empty").contains("empty"));
    assert!(csv("vm,time_s,cpu,memory_bytes\n", &Options::default()).is_err());
}
