//! `farpool plan compare`: two answers of `sim` or `plan` beside each other: what was asked
//! differently, and what came out differently.

use std::collections::BTreeMap;

use farpool_report::{Cell, Column, Input, Page, Table};
use serde_json::Value;

use super::{answer_of, give, provenance};
use crate::args::CompareArgs;

pub fn compare(args: &CompareArgs) -> anyhow::Result<u8> {
    let (one, two) = (answer_of(&args.one)?, answer_of(&args.two)?);
    let from = provenance().input(Input::of_file(&args.one)?).input(Input::of_file(&args.two)?);
    let settings = settings(&one, &two);
    let (figures, equal) = figures(&one, &two);
    let (differ, asked) = (figures.rows(), settings.rows());
    let mut page = Page::new("Two answers", from).finding(format!(
        "{differ} figures differ and {equal} are equal; {asked} settings differ."
    ));
    if one["title"] != two["title"] {
        page = page.warning(format!(
            "they answer different questions: {} and {}",
            one["title"], two["title"]
        ));
    }
    give(&page.table(settings.table).table(figures.table), &args.answer)
}

/// A table that knows how many rows it has.
struct Counted {
    table: Table,
    rows: usize,
}

impl Counted {
    fn new(name: &str, title: &str, columns: impl IntoIterator<Item = Column>) -> Counted {
        Counted { table: Table::new(name, title, columns), rows: 0 }
    }

    fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.table.row(cells);
        self.rows += 1;
    }

    fn rows(&self) -> usize {
        self.rows
    }
}

/// What was asked, and of which files.
fn settings(one: &Value, two: &Value) -> Counted {
    let columns = [Column::left("setting"), Column::left("first"), Column::left("second")];
    let mut table = Counted::new("settings", "Asked differently", columns);
    let all = |answer: &Value| -> BTreeMap<String, String> {
        let from = &answer["provenance"];
        let parameters = from["parameters"].as_object().into_iter().flatten();
        let parameters = parameters.map(|(name, value)| (name.clone(), plain(value)));
        let version = ("version".to_owned(), plain(&from["version"]));
        let inputs = from["inputs"].as_array().into_iter().flatten().enumerate();
        let inputs = inputs.map(|(at, it)| (format!("input {}", at + 1), plain(&it["sha256"])));
        parameters.chain([version]).chain(inputs).collect()
    };
    let (one, two) = (all(one), all(two));
    let none = || "-".to_owned();
    let names: std::collections::BTreeSet<&String> = one.keys().chain(two.keys()).collect();
    for name in names {
        let values = [&one, &two].map(|all| all.get(name).cloned().unwrap_or_else(none));
        if values[0] != values[1] {
            let [first, second] = values;
            table.row([name.clone().into(), first.into(), second.into()]);
        }
    }
    table
}

/// Figures of tables that both answers have, and how many of them are equal.
fn figures(one: &Value, two: &Value) -> (Counted, usize) {
    let columns = [
        Column::left("table"),
        Column::left("row"),
        Column::left("figure"),
        Column::right("first").decimals(3),
        Column::right("second").decimals(3),
        Column::right("change").unit("%").decimals(1),
    ];
    let (mut table, mut equal) = (Counted::new("figures", "Came out differently", columns), 0);
    let (one, two) = (numbers(one), numbers(two));
    let places: std::collections::BTreeSet<&Place> = one.keys().chain(two.keys()).collect();
    for place in places {
        let (first, second) = (one.get(place).copied(), two.get(place).copied());
        if first == second {
            equal += 1;
            continue;
        }
        let change = first.zip(second).filter(|(first, _)| *first != 0.0);
        let change = change.map(|(first, second)| (second / first - 1.0) * 100.0);
        let Place { table: name, row, figure } = place.clone();
        table.row([
            name.into(),
            row.into(),
            figure.into(),
            first.into(),
            second.into(),
            change.into(),
        ]);
    }
    (table, equal)
}

/// Where a number is: rows are named by their words, and by their first figure if they have none.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    table: String,
    row: String,
    figure: String,
}

fn numbers(answer: &Value) -> BTreeMap<Place, f64> {
    let mut found = BTreeMap::new();
    for (table, content) in answer["tables"].as_object().into_iter().flatten() {
        for row in content["rows"].as_array().into_iter().flatten() {
            let Some(fields) = row.as_object() else { continue };
            let words: Vec<&str> = fields.values().filter_map(Value::as_str).collect();
            let (first, name) = match words.is_empty() {
                false => (None, words.join(", ")),
                true => match columns(content).find(|name| fields.contains_key(*name)) {
                    Some(name) => (Some(name), format!("{name} {}", plain(&fields[name]))),
                    None => continue,
                },
            };
            for (figure, value) in fields.iter().filter(|(name, _)| Some(name.as_str()) != first) {
                if let Some(value) = value.as_f64() {
                    let (table, row, figure) = (table.clone(), name.clone(), figure.clone());
                    found.insert(Place { table, row, figure }, value);
                }
            }
        }
    }
    found
}

/// The names of a table's columns, in their order.
fn columns(table: &Value) -> impl Iterator<Item = &str> {
    let columns = table["columns"].as_array().into_iter().flatten();
    columns.filter_map(|column| column["name"].as_str())
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
