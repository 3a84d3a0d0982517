//! Lim 2010, Tables 6(b) and 7(b): what a shared memory blade and laptop disks change in emb1.
//!
//! Neither emb1's parts nor the performances behind the tables are printed. The missing values are
//! solved from some of the cells, named in their reasons, and the other cells are compared with
//! them: they show whether the table is consistent.

use super::{Cell, Verdict};
use crate::cost::{Bill, Model};

/// Slowdown with a quarter of the memory local, assumed for all programs (section 6.4.3).
const SLOWDOWN: f64 = 0.02;
/// Price of remote memory, relative to local (section 6.4.3).
const REMOTE_PRICE: f64 = 0.76;
/// Share of the baseline's memory that is remote, besides the local quarter: all the rest, or
/// enough for 85 % in total.
const STATIC_REMOTE: f64 = 0.75;
pub(super) const DYNAMIC_REMOTE: f64 = 0.60;
pub(super) const LOCAL: f64 = 0.25;
/// Both columns of Perf/Inf-$ follow, after rounding, if memory is this share of emb1's Inf-$; no
/// share below 24.18 % or above 24.39 % gives both.
const MEMORY_PART: f64 = 0.243;
/// Both of Perf/Watt follow if a server draws this share of its former power: 84.1 to 84.8 %.
const POWER_PART: f64 = 0.845;

pub(super) fn table_6(model: &Model, emb1: &Bill) -> Vec<Cell> {
    let printed = [
        ("static", STATIC_REMOTE, [102., 116., 108.]),
        ("dynamic", DYNAMIC_REMOTE, [106., 116., 111.]),
    ];
    let cooling = model.power_cooling_dollars(emb1.power_w);
    let mut cells = Vec::new();
    for (scheme, remote, [per_dollar, per_watt, per_total]) in printed {
        let performance = 1.0 - SLOWDOWN;
        let memory = LOCAL + remote * REMOTE_PRICE;
        let cost = 1.0 - MEMORY_PART * (1.0 - memory);
        let total = (cost * emb1.infrastructure_dollars + POWER_PART * cooling)
            / (emb1.infrastructure_dollars + cooling);
        let cell = |metric: &str, paper: f64, over: f64| {
            let name = format!("{scheme}, {metric}");
            Cell::rounded("Table 6(b)", name, "%", paper, performance / over * 100.0, 0)
                .within(0.03)
        };
        cells.push(cell("Perf/Inf-$", per_dollar, cost).fitted(
            "with memory as 24.3 % of emb1's cost, solved for from this column: its parts are not \
             printed",
        ));
        cells.push(
            cell("Perf/Watt", per_watt, POWER_PART).fitted(
                "with 84.5 % of emb1's power, solved for from this column: it is not printed",
            ),
        );
        cells.push(
            cell("Perf/TCO-$", per_total, total)
                .because("from the two above and emb1's Inf-$ and power in Table 4"),
        );
    }
    cells
}

/// Returns cost, power and performance over emb1's of emb1 with a memory blade (dynamic) and remote
/// laptop disks at desktop prices with flash.
pub(super) fn shared_memory_and_disks(emb1: &Bill) -> (f64, f64, f64) {
    let memory = 1.0 - MEMORY_PART * (1.0 - LOCAL - DYNAMIC_REMOTE * REMOTE_PRICE);
    let dollars = emb1.infrastructure_dollars * memory - DESKTOP.0 + LAPTOP_2.0 + FLASH.0;
    let watts = emb1.power_w * POWER_PART - DESKTOP.1 + LAPTOP_2.1 + FLASH.1;
    let laptop_cost =
        (emb1.infrastructure_dollars - DESKTOP.0 + LAPTOP.0) / emb1.infrastructure_dollars;
    let performance = (1.0 - SLOWDOWN) * LAPTOP_PER_DOLLAR * laptop_cost * FLASH_GAIN;
    (dollars, watts, performance)
}

/// The first cell of Table 7(b), from which the disk's performance is solved, and the gain from
/// flash in the text.
const LAPTOP_PER_DOLLAR: f64 = 0.93;
const FLASH_GAIN: f64 = 1.08;

/// Dollars and watts in Table 7(a).
const DESKTOP: (f64, f64) = (120.0, 10.0);
const LAPTOP: (f64, f64) = (80.0, 2.0);
const LAPTOP_2: (f64, f64) = (40.0, 2.0);
const FLASH: (f64, f64) = (14.0, 0.5);

pub(super) fn table_7(model: &Model, emb1: &Bill) -> Vec<Cell> {
    let infrastructure = emb1.infrastructure_dollars;
    let cost = |disk: (f64, f64), flash: f64| {
        (infrastructure - DESKTOP.0 + disk.0 + flash * FLASH.0) / infrastructure
    };
    let power = |disk: (f64, f64), flash: f64| {
        (emb1.power_w - DESKTOP.1 + disk.1 + flash * FLASH.1) / emb1.power_w
    };
    // The first cell gives the disk's performance, the text the gain from flash.
    let laptop = LAPTOP_PER_DOLLAR * cost(LAPTOP, 0.0);
    let with_flash = laptop * FLASH_GAIN;
    let rows = [
        ("laptop", LAPTOP, 0.0, laptop, [93., 100., 96.]),
        ("laptop and flash", LAPTOP, 1.0, with_flash, [99., 109., 104.]),
        ("laptop-2 and flash", LAPTOP_2, 1.0, with_flash, [110., 109., 110.]),
    ];
    let cooling = model.power_cooling_dollars(emb1.power_w);
    let mut cells = Vec::new();
    for (disks, disk, flash, performance, printed) in rows {
        let (cost, power) = (cost(disk, flash), power(disk, flash));
        let total = (cost * infrastructure + power * cooling) / (infrastructure + cooling);
        for ((metric, over), paper) in
            [("Perf/Inf-$", cost), ("Perf/Watt", power), ("Perf/TCO-$", total)]
                .into_iter()
                .zip(printed)
        {
            let name = format!("{disks}, {metric}");
            let ours = performance / over * 100.0;
            let mut cell = Cell::rounded("Table 7(b)", name, "%", paper, ours, 0).within(0.05);
            cell = match cell.verdict {
                Verdict::Exact if disks == "laptop" && metric == "Perf/Inf-$" => {
                    cell.fitted("the disk's performance is solved for from this cell")
                }
                Verdict::InShape => {
                    let off = std::mem::take(&mut cell.why);
                    cell.because(format!("{off}; prices of Table 7(a) on emb1's 499 of Table 4"))
                }
                Verdict::Departs => cell.because(
                    "from the prices of Table 7(a) on emb1's 499 of Table 4, and 8 % for flash as \
                     the text says",
                ),
                _ => cell,
            };
            cells.push(cell);
        }
    }
    cells
}
