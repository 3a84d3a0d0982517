//! One answer, rendered as text, as JSON and as an HTML page.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use crate::escape::{html, json_in_script, percent_encoded};
use crate::file::{ReportError, write_atomically};
use crate::plot::Plot;
use crate::provenance::Provenance;
use crate::table::Table;

const STYLE: &str = include_str!("style.css");

/// The page's contents, in the order they were added.
#[derive(Clone, Debug, PartialEq)]
enum Block {
    Heading(String),
    Table(Table),
    Plot(Plot),
}

/// One answer: findings in words, tables, plots, and their provenance.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    title: String,
    provenance: Provenance,
    findings: Vec<String>,
    warnings: Vec<String>,
    blocks: Vec<Block>,
    result: Option<serde_json::Value>,
}

impl Page {
    pub fn new(title: impl Into<String>, provenance: Provenance) -> Page {
        let (findings, warnings, blocks) = (Vec::new(), Vec::new(), Vec::new());
        Page { title: title.into(), provenance, findings, warnings, blocks, result: None }
    }

    /// Adds a sentence that answers the question; findings come first.
    #[must_use]
    pub fn finding(mut self, finding: impl Into<String>) -> Page {
        self.findings.push(finding.into());
        self
    }

    /// Adds a sentence on the limits of the answer.
    #[must_use]
    pub fn warning(mut self, warning: impl Into<String>) -> Page {
        self.warnings.push(warning.into());
        self
    }

    /// Adds a heading over the tables and plots that follow.
    #[must_use]
    pub fn heading(mut self, heading: impl Into<String>) -> Page {
        self.blocks.push(Block::Heading(heading.into()));
        self
    }

    #[must_use]
    pub fn table(mut self, table: Table) -> Page {
        self.blocks.push(Block::Table(table));
        self
    }

    /// Adds a plot. Plots appear in HTML only; their data must be in a table or in the result, too.
    #[must_use]
    pub fn plot(mut self, plot: impl Into<Plot>) -> Page {
        self.blocks.push(Block::Plot(plot.into()));
        self
    }

    /// Sets the result as a structure, for programs. If it cannot be written as JSON, it is
    /// omitted.
    #[must_use]
    pub fn result(mut self, result: &impl Serialize) -> Page {
        self.result = serde_json::to_value(result).ok();
        self
    }

    fn tables(&self) -> impl Iterator<Item = &Table> {
        self.blocks.iter().filter_map(|block| match block {
            Block::Table(table) => Some(table),
            _ => None,
        })
    }

    /// Renders for a terminal: findings, warnings, then the tables with a blank line between.
    pub fn text(&self) -> String {
        let sentences = |mark: &str, all: &[String]| -> String {
            all.iter().map(|one| format!("{mark}{}\n", crate::escape::terminal(one))).collect()
        };
        let mut parts = vec![sentences("", &self.findings), sentences("warning: ", &self.warnings)];
        parts.extend(self.tables().map(Table::text));
        parts.retain(|part| !part.is_empty());
        parts.join("\n")
    }

    /// Renders for programs: `{"title", "provenance", "findings", "warnings", "tables": {name:
    /// table}, "result"}`, the last only if it is set. Ends in a line feed.
    pub fn json(&self) -> String {
        let tables: serde_json::Map<String, serde_json::Value> = self
            .tables()
            .map(|table| (table.name().to_owned(), serde_json::json!(table)))
            .collect();
        let mut answer = serde_json::json!({
            "title": self.title,
            "provenance": self.provenance,
            "findings": self.findings,
            "warnings": self.warnings,
            "tables": tables,
        });
        if let Some(result) = &self.result {
            answer["result"] = result.clone();
        }
        format!("{answer:#}\n")
    }

    /// Renders for a browser: one page that needs no other file, with the JSON inside.
    pub fn html(&self) -> String {
        let mut body = format!("<h1>{}</h1>\n", html(&self.title));
        paragraphs(&mut body, "finding", &self.findings);
        paragraphs(&mut body, "warning", &self.warnings);
        let mut plots = 0;
        for block in &self.blocks {
            match block {
                Block::Heading(heading) => {
                    let _ = writeln!(body, "<h2>{}</h2>", html(heading));
                }
                Block::Table(table) => html_table(&mut body, table),
                Block::Plot(plot) => {
                    html_plot(&mut body, plot, &format!("plot{plots}"));
                    plots += 1;
                }
            }
        }
        self.html_provenance(&mut body);
        let json = json_in_script(self.json().trim_end());
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <meta name=\"generator\" content=\"{tool} {version}\">\n<title>{title}</title>\n\
             <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n\
             <script type=\"application/json\" \
             id=\"answer\">\n{json}\n</script>\n</body>\n</html>\n",
            tool = html(&self.provenance.tool),
            version = html(&self.provenance.version),
            title = html(&self.title),
        )
    }

    /// Writes [`Page::html`] to `path`, as a whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), ReportError> {
        write_atomically(path, self.html().as_bytes())
    }

    fn html_provenance(&self, body: &mut String) {
        let from = &self.provenance;
        let _ = writeln!(
            body,
            "<section class=\"provenance\">\n<h2>How this was made</h2>\n\
             <p>{} {} \u{b7} <code>{}</code></p>",
            html(&from.tool),
            html(&from.version),
            html(&from.command_line())
        );
        if !from.inputs.is_empty() {
            body.push_str("<div class=\"scroll\"><table><thead><tr><th class=\"left\">input</th>");
            body.push_str("<th>bytes</th><th class=\"left\">SHA-256</th></tr></thead><tbody>\n");
            for input in &from.inputs {
                let _ = writeln!(
                    body,
                    "<tr><td class=\"left\">{}</td><td>{}</td><td class=\"left hash\">{}</td></tr>",
                    html(&input.path),
                    input.bytes,
                    html(&input.sha256)
                );
            }
            body.push_str("</tbody></table></div>\n");
        }
        if !from.parameters.is_empty() {
            body.push_str("<dl>\n");
            for (name, value) in &from.parameters {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                let _ = writeln!(body, "<dt>{}</dt><dd>{}</dd>", html(name), html(&value));
            }
            body.push_str("</dl>\n");
        }
        body.push_str("</section>\n");
    }
}

fn paragraphs(body: &mut String, class: &str, sentences: &[String]) {
    for sentence in sentences {
        let _ = writeln!(body, "<p class=\"{class}\">{}</p>", html(sentence));
    }
}

fn html_table(body: &mut String, table: &Table) {
    let cell = |tag: &str, left: bool, text: &str| {
        let class = if left { " class=\"left\"" } else { "" };
        let scope = if tag == "th" { " scope=\"col\"" } else { "" };
        format!("<{tag}{class}{scope}>{}</{tag}>", html(text))
    };
    let header: String =
        table.columns().iter().map(|column| cell("th", column.left, &column.heading())).collect();
    let _ = writeln!(
        body,
        "<div class=\"scroll\"><table>\n<caption>{}</caption>\n<thead><tr>{header}</tr></thead>\n\
         <tbody>",
        html(table.title())
    );
    for row in table.rows() {
        let cells = table.columns().iter().zip(row);
        let cells: String =
            cells.map(|(column, value)| cell("td", column.left, &column.print(value))).collect();
        let _ = writeln!(body, "<tr>{cells}</tr>");
    }
    body.push_str("</tbody></table></div>\n");
    paragraphs(body, "note", table.notes());
}

fn html_plot(body: &mut String, plot: &Plot, id: &str) {
    let _ = writeln!(
        body,
        "<figure>\n<h3>{}</h3>\n{}<figcaption>{} <a class=\"csv\" download=\"{id}.csv\" \
         href=\"data:text/csv;charset=utf-8,{}\">CSV</a></figcaption>\n</figure>",
        html(plot.title()),
        plot.svg(id),
        html(plot.description()),
        percent_encoded(&plot.csv())
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, BarPlot, Column, Input, Line, LinePlot};

    const EVIL: &str = "</script></title><img src=x onerror=alert(1)>";

    fn page(text: &str) -> Page {
        let provenance = Provenance::new("0.1.0", ["plan", text])
            .parameter(text, text)
            .input(Input::of_bytes(text, b"abc"));
        let mut table = Table::new("t", text, [Column::left(text), Column::right("n")]).note(text);
        table.row([text.into(), 1.5.into()]);
        let lines = LinePlot::new(text, Axis::linear(text), Axis::linear("y"))
            .line(Line::new(text, [(1.0, 2.0)]));
        let bars = BarPlot::grouped(text, "x").bars([text]).part(text, [1.0]);
        Page::new(text, provenance)
            .finding(text)
            .warning(text)
            .heading(text)
            .table(table)
            .plot(lines)
            .plot(bars)
            .result(&serde_json::json!({"text": text}))
    }

    fn embedded(html: &str) -> serde_json::Value {
        let from = html.find("id=\"answer\">").expect("the answer") + "id=\"answer\">".len();
        let to = from + html[from..].find("</script>").expect("its end");
        serde_json::from_str(&html[from..to]).expect("JSON")
    }

    #[test]
    fn nothing_from_outside_becomes_markup() {
        let html = page(EVIL).html();
        assert!(!html.contains("<img"), "{html}");
        assert_eq!(html.matches("</script>").count(), 1);
        assert_eq!(html.matches("<title>").count() + html.matches("<title id").count(), {
            html.matches("</title>").count()
        });
        assert_eq!(embedded(&html)["result"]["text"], EVIL);
    }

    #[test]
    fn a_page_needs_nothing_else() {
        let html = page("plain").html();
        for word in ["http:", "https:", "src=", "@import", "url(", "<link"] {
            assert!(!html.contains(word), "{word}");
        }
    }

    #[test]
    fn the_same_answer_gives_the_same_bytes_and_the_page_holds_the_json() {
        let (one, two) = (page("x"), page("x"));
        assert_eq!(one.html(), two.html());
        let json: serde_json::Value = serde_json::from_str(&one.json()).expect("JSON");
        assert_eq!(embedded(&one.html()), json);
        assert_eq!(json["tables"]["t"]["rows"][0]["n"], 1.5);
        assert_eq!(json["provenance"]["inputs"][0]["bytes"], 3);
    }

    #[test]
    fn a_terminal_reads_findings_first() {
        let text = page("word").text();
        assert!(text.starts_with("word\n\nwarning: word\n\nword\n"), "{text}");
    }
}
