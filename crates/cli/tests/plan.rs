//! `farpool plan` through the real binary: answers, reports that can be reproduced, and input that
//! is refused.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{ended, farpool};
use serde_json::Value;

fn home() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder for the test")
}

fn plan(home: &Path, words: &[&str]) -> (i32, String, String) {
    ended(farpool(home).current_dir(home).arg("plan").args(words))
}

fn google() -> String {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let name = "../study/plan/data/utilisation/google-2011-1600-vms-24h-5min.parquet";
    here.join(name).display().to_string()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

/// Four machines that take turns in using 8 GiB, for a day.
fn turns(home: &Path) -> PathBuf {
    let mut text = String::from("vm,time_s,cpu,memory_bytes\n");
    for vm in 0..4 {
        for step in 0..24 {
            let memory: u64 = if step % 4 == vm { 8 << 30 } else { 1 << 30 };
            text += &format!("vm{vm},{},0.5,{memory}\n", step * 3600);
        }
    }
    let path = home.join("turns.csv");
    fs::write(&path, text).expect("written");
    path
}

/// The JSON that is embedded in a page.
fn embedded(page: &str) -> Value {
    let from = page.find("id=\"answer\">").expect("the answer") + "id=\"answer\">".len();
    let to = from + page[from..].find("</script>").expect("its end");
    json(&page[from..to])
}

#[test]
fn machines_that_take_turns_are_pooled_and_those_that_do_not_are_not() {
    let home = home();
    turns(home.path());
    let (code, text, error) = plan(home.path(), &["pool", "turns.csv", "--group", "4"]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(text.starts_with("Pool: 4 machines together need 34.4 %"), "{text}");
    let words = ["pool", &google(), "--groupings", "5", "--json", "--above-100", "keep"];
    let (code, text, error) = plan(home.path(), &words);
    assert_eq!((code, error.as_str()), (0, ""));
    let answer = json(&text);
    assert_eq!(answer["result"]["advice"]["verdict"], "do-not-pool");
    let sizes = answer["tables"]["sizes"]["rows"].as_array().expect("rows");
    let all = sizes.last().expect("a row");
    assert_eq!(all["pool_vms"], 1600);
    assert!((all["ratio"].as_f64().expect("a number") - 0.876).abs() < 0.0005, "{all}");
    let hash = "58508cb7efbe2216264661919ebf8e5656bb995396c6988560546b9a3be6adc2";
    assert_eq!(answer["provenance"]["inputs"][0]["sha256"], hash);
    assert_eq!(answer["provenance"]["parameters"]["groupings"], 5);
}

#[test]
fn a_report_can_be_made_again_from_itself() {
    let home = home();
    turns(home.path());
    let first = home.path().join("first.html");
    let words = ["pool", "turns.csv", "--group", "2", "--report", "first.html", "--json"];
    let (code, text, error) = plan(home.path(), &words);
    assert_eq!((code, error.as_str()), (0, ""));
    let page = fs::read_to_string(&first).expect("a report");
    let answer = embedded(&page);
    assert_eq!(answer, json(&text), "the page carries what is printed");
    let words = answer["provenance"]["command"].as_array().expect("words");
    let words: Vec<&str> = words.iter().map(|word| word.as_str().expect("a word")).collect();
    let again = home.path().join("again.html");
    let mut command = farpool(home.path());
    command.current_dir(home.path()).args(&words).arg("--report").arg(&again);
    assert_eq!(ended(&mut command).0, 0);
    assert_eq!(fs::read_to_string(&again).expect("a report"), page);
    for outside in ["http://", "https://", "src=", "<link"] {
        assert!(!page.contains(outside), "{outside}");
    }
    let (code, _, error) = plan(home.path(), &["cost", "lim-2010", "--report", "no/such/x.html"]);
    assert!(code == 1 && error.contains("no/such/x.html"), "{error}");
}

#[test]
fn servers_are_packed_and_far_memory_frees_some() {
    let home = home();
    turns(home.path());
    let server = "name = \"small\"\ncpu_cores = 8\nmemory_gib = 12\n";
    fs::write(home.path().join("server.toml"), server).expect("written");
    let words = ["pack", "turns.csv", "--server", "server.toml", "--local", "75%", "--json"];
    let (code, text, error) = plan(home.path(), &words);
    assert_eq!((code, error.as_str()), (0, ""));
    let answer = json(&text);
    let servers: Vec<u64> = answer["result"]["rows"]
        .as_array()
        .expect("rows")
        .iter()
        .map(|row| row["servers"].as_u64().expect("a number"))
        .collect();
    // By their peaks, one machine fills a server; at any time the four use 8 + 1 + 1 + 1 = 11 GiB.
    assert_eq!(servers, [4, 1, 1]);
    assert_eq!(answer["result"]["verdict"], "do-not-pool");
    let smaller = server.replace("12", "9");
    fs::write(home.path().join("server.toml"), smaller).expect("written");
    let (_, text, _) = plan(home.path(), &words);
    assert_eq!(json(&text)["result"]["freed_servers"], 1, "{text}");
}

#[test]
fn what_comes_along_is_priced_and_filled() {
    let home = home();
    let (code, text, _) = plan(home.path(), &["cost", "lim-2010", "--json"]);
    assert_eq!(code, 0);
    let bills = json(&text)["tables"]["bills"]["rows"].clone();
    let srvr1 = &bills[0];
    assert_eq!(
        (&srvr1["server"], srvr1["server_dollars"].as_f64()),
        (&"srvr1".into(), Some(3225.0))
    );
    let cooling = srvr1["power_cooling_dollars"].as_f64().expect("a number");
    assert_eq!(cooling.round(), 2457.0);
    let (code, text, _) = plan(home.path(), &["cost", "present"]);
    assert!(code == 0 && text.contains("2025-Q4") && text.contains("Counterpoint"), "{text}");
    let (code, text, _) = plan(home.path(), &["dense", "mercury-a7", "--json"]);
    assert_eq!(code, 0);
    let rows = json(&text)["tables"]["servers"]["rows"].clone();
    assert_eq!((&rows[5]["stacks"], &rows[5]["memory_gb"]), (&93.into(), &372.0.into()));
    // What --toml prints can be read again.
    let (_, catalog, _) = plan(home.path(), &["dense", "keyvault", "--toml"]);
    fs::write(home.path().join("mine.toml"), catalog).expect("written");
    let (code, text, _) = plan(home.path(), &["dense", "mine.toml", "--design", "keyvault"]);
    assert!(code == 0 && text.contains("144"), "{text}");
}

#[test]
fn input_that_cannot_be_is_refused_by_file_place_and_reason() {
    let home = home();
    turns(home.path());
    let header = "vm,time_s,cpu,memory_bytes\n";
    let catalog = plan(home.path(), &["cost", "lim-2010", "--toml"]).1;
    let files = [
        ("nan.csv", format!("{header}a,0,1,10\na,60,NaN,10\n")),
        ("negative.csv", format!("{header}a,0,1,-10\n")),
        ("backwards.csv", format!("{header}a,60,1,10\na,0,1,10\n")),
        ("foreign.parquet", header.to_owned()),
        ("price.toml", catalog.replace("dollars = 350.0", "dollars = -350.0")),
        ("missing.toml", catalog.replace("k1 = 1.33\n", "")),
        ("zero.toml", "name = \"none\"\ncpu_cores = 4\nmemory_gib = 0\n".to_owned()),
    ];
    for (name, text) in files {
        fs::write(home.path().join(name), text).expect("written");
    }
    let cases: [(&[&str], i32, &[&str]); 12] = [
        (&["pool", "nan.csv"], 1, &["nan.csv, row 3", "not a number"]),
        (&["pool", "negative.csv"], 1, &["negative.csv, row 2", "below zero"]),
        (&["pool", "backwards.csv"], 1, &["backwards.csv, row 3", "backwards"]),
        (&["pool", "foreign.parquet"], 1, &["foreign.parquet", "Parquet"]),
        (&["pool", "none.csv"], 1, &["none.csv"]),
        (&["pool", "turns.csv", "--group", "5"], 2, &["5", "4 machines"]),
        (&["pool", "turns.csv", "--local", "half"], 2, &["half"]),
        (
            &["pack", "turns.csv", "--server", "zero.toml"],
            1,
            &["zero.toml", "memory_gib", "above zero"],
        ),
        (&["pack", "turns.csv"], 2, &["cpu_cores"]),
        (&["cost", "price.toml"], 1, &["price.toml", "\"memory\", dollars", "-350"]),
        (&["cost", "missing.toml"], 1, &["missing.toml", "k1"]),
        (&["dense", "mercury-a8"], 2, &["mercury-a8"]),
    ];
    for (words, wanted, parts) in cases {
        let (code, text, error) = plan(home.path(), words);
        assert_eq!((code, text.as_str()), (wanted, ""), "{words:?}: {error}");
        for part in parts {
            assert!(error.contains(part), "{words:?} says {error:?}, without {part:?}");
        }
    }
    let report = home.path().join("x.html");
    let words = ["pool", "nan.csv", "--report", "x.html"];
    assert_eq!(plan(home.path(), &words).0, 1);
    assert!(!report.exists(), "nothing is left of a report that could not be made");
}

#[test]
fn two_answers_are_set_beside_each_other_and_local_shares_come_from_plan_local() {
    let home = home();
    turns(home.path());
    let pool = ["pool", "turns.csv", "--groupings", "5", "--growth", "20%", "--json"];
    let (code, today, error) = plan(home.path(), &pool);
    assert_eq!((code, error.as_str()), (0, ""), "without --group, all four machines");
    assert_eq!(json(&today)["result"]["what_if"]["growth"].as_array().map(Vec::len), Some(4));
    fs::write(home.path().join("today.json"), today).expect("written");
    let answer = r#"{"result": [{"design": "ps", "least": {"local": "25%"}}]}"#;
    fs::write(home.path().join("web.json"), answer).expect("written");
    let words = [&pool[..6], &["--local-from", "web.json", "--report", "local.html"]].concat();
    let (code, _, error) = plan(home.path(), &words);
    assert_eq!((code, error.as_str()), (0, ""));
    let (code, text, error) = plan(home.path(), &["compare", "today.json", "local.html"]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(text.contains("local_share  0.0    0.25"), "{text}");
    assert!(plan(home.path(), &["compare", "today.json", "turns.csv"]).2.contains("turns.csv"));
}
