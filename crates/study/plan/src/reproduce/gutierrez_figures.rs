//! Gutierrez 2015: what the text says of figures that are drawn without numbers, as far as it
//! follows from tables, and Table 3.2.

use super::Cell;
use super::gutierrez::{Both, TABLE_3_4, built};

/// Mercury and Iridium with 8 cores of an A15 at 1 GHz a stack: requests a second and cores
/// (section 3.5.3).
const MERCURY_A15: (f64, f64) = (17.29e6, 600.0);
const IRIDIUM_A15: (f64, f64) = (5.45e6, 720.0);
/// The cores of an A7 with 8 cores a stack, in either design (Table 3.4).
const A7_CORES: f64 = 768.0;
/// Requests a second and watts of servers of others in Table 3.4.
const BAGS: (f64, f64) = (3.15e6, 285.0);
const TSSP: (f64, f64) = (0.28e6, 16.0);
/// Part of a request's time that the network takes of Mercury's stack (Figure 3.4) and of
/// KeyVault's (Figure 4.9).
const NETWORK: (f64, f64) = (0.87, 0.66);

/// Why a ratio of printed figures is no prediction.
const RATIO: &str = "printed figures, one divided by the other: no model is involved";

/// Why the others have no cell.
pub(super) const NOT_DERIVABLE: [(&str, &str); 6] = [
    (
        "Figures 3.4, 3.5, 4.9",
        "parts of a request's time, which come from a simulated pipeline of a Cortex; \
         `scripts/kv-costs.py split` measures where a request's time goes today",
    ),
    (
        "Figures 3.6 to 3.13",
        "requests by their size and by memory latency are drawn without numbers and come from that \
         pipeline; what the text says of 64 B has cells",
    ),
    (
        "Figures 4.6 to 4.8, 4.10",
        "latencies under load, drawn without numbers; they are made by queues of the simulated \
         network, whose lengths are not printed",
    ),
    (
        "Figure 4.11",
        "60 % more bandwidth is printed for 40 % more requests of the same workload: the bytes of a \
         request on the wire are not printed",
    ),
    (
        "Figures 4.12, 4.13",
        "memory bandwidth under load is drawn without numbers: the bytes that a request moves in \
         memory are not printed",
    ),
    (
        "Table 4.3",
        "the round trips of servers of others, and the requests of MICA and HERD, are theirs",
    ),
];

pub(super) const NOTHING_TO_COMPUTE: [(&str, &str); 2] = [
    ("Table 3.2", "LPDDR3, HMC, Wide I/O and the Octopus, from data sheets; the others have cells"),
    ("Figures 1, 2, 3.1 to 3.3, 4.1 to 4.3", "drawings"),
];

/// Millions of requests a second of Mercury and Iridium in Table 3.4, by the place of their cores a
/// stack.
fn requests_of_table_3_4(cores: usize) -> [f64; 2] {
    TABLE_3_4.map(|(_, [_, requests, ..])| requests[cores])
}

fn each((requests, cores): (f64, f64)) -> f64 {
    requests / cores
}

/// Bandwidths of Table 3.2 that follow from the module's name.
pub(super) fn table_3_2() -> Vec<Cell> {
    const BYTES_WIDE: f64 = 8.0;
    let cell = |name: &str, paper: f64, ours: f64| {
        Cell::rounded("Table 3.2", name.into(), "GB/s", paper, ours, 1)
    };
    vec![
        cell("DDR3-1333, bandwidth", 10.7, 1333e6 * BYTES_WIDE / 1e9)
            .input("its name: 1,333 million transfers of 8 bytes"),
        cell("DDR4-2667, bandwidth", 21.3, 2667e6 * BYTES_WIDE / 1e9)
            .input("its name: 2,667 million transfers of 8 bytes"),
        cell("future Tezzaron, bandwidth", 100.0, 16.0 * 6.25)
            .input("16 ports of 6.25 GB/s, as section 3.3.1.1 has it"),
    ]
}

/// What sections 3.5.2 to 3.5.4 say of Figures 3.6 to 3.17 at requests of 64 B.
pub(super) fn by_core(both: &Both) -> Vec<Cell> {
    let times = |place: &str, name: &str, paper: f64, ours: f64, decimals: i32| {
        Cell::rounded(place, name.into(), "times", paper, ours, decimals)
    };
    let a7 = requests_of_table_3_4(0).map(|requests| requests * 1e6 / A7_CORES);
    let of_32_cores = requests_of_table_3_4(2);
    let a15 = "mercury-a15-1ghz";
    vec![
        times(
            "Figures 3.6, 3.8",
            "A15 over A7 in Mercury, small requests",
            3.0,
            each(MERCURY_A15) / a7[0],
            0,
        )
        .input(RATIO),
        times("Figures 3.10, 3.12", "A15 over A7 in Iridium", 1.25, each(IRIDIUM_A15) / a7[1], 2)
            .within(0.15)
            .input(format!("{RATIO}; 25 % is the average of all sizes")),
        both.judge(|catalog| {
            let stacks = f64::from(built(catalog, a15, 8).stacks);
            Cell::rounded(
                "section 3.5.3",
                "Mercury, A15, 8 cores, stacks".into(),
                "",
                75.,
                stacks,
                0,
            )
        }),
        both.judge(|catalog| {
            let stacks = f64::from(built(catalog, "iridium-a15-1ghz", 8).stacks);
            Cell::rounded(
                "section 3.5.3",
                "Iridium, A15, 8 cores, stacks".into(),
                "",
                90.,
                stacks,
                0,
            )
        }),
        both.judge(|catalog| {
            let requests = each(MERCURY_A15) * f64::from(built(catalog, a15, 16).cores) / 1e6;
            let name = "Mercury, A15, 16 cores, requests".into();
            Cell::rounded("section 3.5.4", name, "M/s", 19.36, requests, 2)
                .within(0.01)
                .because("the requests of a core at 8 cores a stack")
        }),
        times(
            "section 3.5.3",
            "Mercury over Iridium, requests of 32 cores",
            2.0,
            of_32_cores[0] / of_32_cores[1],
            0,
        )
        .input(RATIO),
        both.judge(|catalog| {
            let memory = |design: &str| built(catalog, design, 32).memory_gb;
            let ours = memory("iridium-a7") / memory("mercury-a7");
            times("section 3.5.3", "Iridium over Mercury, density of 32 cores", 5.0, ours, 0)
        }),
    ]
}

/// What section 4.6 says of Figures 4.4 to 4.14.
pub(super) fn by_stack(both: &Both) -> Vec<Cell> {
    let of_core = |design: &'static str| {
        move |catalog: &_| {
            let of = built(catalog, design, 2);
            of.requests_per_s.unwrap_or(0.0) / f64::from(of.cores)
        }
    };
    let (keyvault, mercury) = (of_core("keyvault"), of_core("mercury-a15-1.5ghz"));
    let peak = "a core of Table 4.2, for the stack has one CPU; the text has about that many";
    let rate = |name: &str, paper: f64, ours: f64| {
        Cell::rounded("Figures 4.4, 4.5", name.into(), "/s", paper, ours, -3).within(0.03)
    };
    let rest = (1.0 - NETWORK.1) / (1.0 - NETWORK.0);
    vec![
        both.judge(|catalog| {
            rate("KeyVault, most requests of a stack", 85_000., keyvault(catalog)).because(peak)
        }),
        both.judge(|catalog| {
            rate("Mercury, most requests of a stack", 61_000., mercury(catalog)).because(peak)
        }),
        both.judge(|catalog| {
            let gain = (keyvault(catalog) / mercury(catalog) - 1.0) * 100.0;
            Cell::near("Figures 4.4, 4.5", "KeyVault over Mercury, gain".into(), 40., gain, 2.0)
                .because("from the cores of Table 4.2; printed as approximately 40 %")
        }),
        Cell::rounded(
            "Figure 4.9",
            "round trip, Mercury over KeyVault".into(),
            "times",
            2.,
            rest,
            0,
        )
        .because(
            "if all but the network takes as long as before, 13 % of Figure 3.4 become 34 %; the \
                 requests are of other sizes",
        ),
        both.judge(|catalog| {
            let ours = built(catalog, "keyvault", 2).requests_per_s.unwrap_or(0.0) / TSSP.0;
            Cell::rounded("Figure 4.14", "KeyVault over TSSP".into(), "times", 100., ours, 0)
                .within(0.2)
                .because("printed as nearly two orders of magnitude")
        }),
        per_watt("commodity server, requests per W", 11., BAGS),
        per_watt("TSSP, requests per W", 17.63, TSSP),
    ]
}

/// Table 4.3, of servers of others, from their columns of Table 3.4.
fn per_watt(name: &str, paper: f64, of: (f64, f64)) -> Cell {
    let decimals = if paper.fract() == 0.0 { 0 } else { 2 };
    // Half of the last digit of 0.28 million is 1.8 % of it.
    Cell::rounded("Table 4.3", name.into(), "k/s", paper, each(of) / 1e3, decimals)
        .within(0.018)
        .input(RATIO)
}

#[cfg(test)]
mod tests {
    use crate::reproduce::{Verdict, gutierrez};

    #[test]
    fn what_the_text_says_of_its_figures_follows_from_its_tables() {
        let all = gutierrez();
        let of = |place: &str| -> Vec<Verdict> { all.of(place).map(|it| it.verdict).collect() };
        assert_eq!(of("Table 3.2"), [Verdict::Input; 3]);
        assert_eq!(of("Figures 3.6, 3.8"), [Verdict::Input]);
        assert_eq!(of("Figures 3.10, 3.12"), [Verdict::Input]);
        assert!(of("section 3.5.3").iter().all(|it| *it != Verdict::Departs), "{all:#?}");
        assert!(of("Figures 4.4, 4.5").iter().all(|it| *it != Verdict::Departs), "{all:#?}");
        assert_eq!(of("Figure 4.9"), [Verdict::Departs]);
        assert_eq!(of("Figure 4.14"), [Verdict::InShape]);
        let verdict = |name: &str| all.cells.iter().find(|it| it.name == name).map(|it| it.verdict);
        assert_eq!(verdict("commodity server, requests per W"), Some(Verdict::Input));
        assert_eq!(verdict("TSSP, requests per W"), Some(Verdict::Input));
    }

    #[test]
    fn each_figure_of_chapters_3_and_4_has_a_cell_or_a_reason() {
        let all = gutierrez();
        let places: Vec<&str> = (all.cells.iter().map(|cell| cell.place.as_str()))
            .chain(all.left_out.iter().map(|left| left.place.as_str()))
            .collect();
        let reaches = |chapter: u32, figure: u32| {
            places.iter().filter(|place| place.starts_with("Figure")).any(|place| {
                let names: Vec<&str> = place
                    .split([' ', ','])
                    .filter(|word| word.contains('.') || *word == "to")
                    .collect();
                let number = |name: &str| -> Option<u32> {
                    name.strip_prefix(&format!("{chapter}.")).and_then(|rest| rest.parse().ok())
                };
                let is_named = names.iter().any(|name| number(name) == Some(figure));
                let is_between = names.windows(3).any(|three| {
                    three[1] == "to"
                        && number(three[0])
                            .zip(number(three[2]))
                            .is_some_and(|(low, high)| (low..=high).contains(&figure))
                });
                is_named || is_between
            })
        };
        for (chapter, last) in [(3, 13), (4, 14)] {
            for figure in 1..=last {
                assert!(reaches(chapter, figure), "Figure {chapter}.{figure} of {places:?}");
            }
        }
    }
}
