//! The form of answers of `sim` and `plan`: tables for people, JSON, and one self-contained HTML
//! page with plots.
//!
//! A [`Page`] is one answer. It is filled once and rendered in three ways: [`Page::text`] for a
//! terminal, [`Page::json`] for programs, [`Page::html`] for a browser, which needs no script, no
//! network and no other file:
//!
//! ```
//! use farpool_report::{Axis, Column, Line, LinePlot, Page, Provenance, Table};
//!
//! let provenance = Provenance::new("0.1.0", ["plan", "pool", "vms.csv"]).parameter("seed", 42);
//! let mut table = Table::new("pools", "Pools by size", [
//!     Column::left("size").unit("VMs"),
//!     Column::right("ratio").decimals(3),
//! ]);
//! table.row([16.into(), 0.54.into()]);
//! let (across, up) = (Axis::log2("pool size"), Axis::linear("ratio").from_zero());
//! let plot = LinePlot::new("Peak of sums", across, up)
//!     .describe("The larger the pool, the less memory it needs")
//!     .line(Line::new("memory", [(1.0, 1.0), (16.0, 0.54)]).band([(1.0, 1.0), (0.5, 0.6)]));
//! let page = Page::new("Pools", provenance).finding("A pool of 16 pays").table(table).plot(plot);
//! assert!(page.text().contains("0.540"));
//! assert!(page.html().contains("<svg"));
//! ```
//!
//! Every answer carries its [`Provenance`]: the version of the tool, the parameters and the hash of
//! each input, so that it can be reproduced. Nothing here reads the clock: the same result gives
//! the same bytes.

mod escape;
mod file;
mod page;
mod plot;
mod provenance;
mod table;

pub use file::{ReportError, write_atomically};
pub use page::Page;
pub use plot::{Axis, BarPlot, Line, LinePlot, Plot};
pub use provenance::{Input, Provenance};
pub use table::{Cell, Column, Table};
