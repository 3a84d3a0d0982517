//! ACMS (Samih 2011): what its own figures say of each other. The programs and machines are gone,
//! so
//! the times of Figures 6 to 8 cannot be computed; how a swap's time is made up can.

use super::{Cell, Lack, Reproduction, Verdict, errata, left_out};

/// Figure 1.
const TOTAL_TB: f64 = 437.0;
const USED: f64 = 0.69;
const SWAPPED_TB: f64 = 68.0;
/// Figure 9: seconds of the microbenchmark, swapping to another machine and to a disk in memory.
const REMOTE_S: f64 = 319.0;
const RAMDISK_S: f64 = 160.0;
/// Section 6.2: the part of the 1 Gbit/s link that was in use.
const LINK_BYTES_S: f64 = 125e6;
const LINK_USED: f64 = 0.5;
const PAGE_BYTES: f64 = 4096.0;
/// Pages that Linux fetches at once, and the best number of Figure 10.
const USUAL_PAGES: f64 = 8.0;
const BEST_PAGES: f64 = 512.0;
/// Figure 10: time saved by fetching that many.
const SAVED: f64 = 0.25;

const NOT_DERIVABLE: [(&str, &str); 4] = [
    (
        "Figure 6",
        "the traffic of two machines over a minute, on loads that are not printed; crates/rack/acms \
         has the protocol, and `farpool demo` shows it",
    ),
    (
        "Figure 7",
        "1.4 and 3.1 times on TPC-H and Hadoop, whose use of memory is not printed; give traces of \
         programs of today, and disk and tcp are compared on them",
    ),
    ("Figure 8", "bars of SPEC CPU2006 without numbers"),
    (
        "Figure 10",
        "why 1,024 pages are worse than 512; the memory that fetching ahead takes is not printed",
    ),
];

/// Computes what the paper's figures say of each other.
pub fn acms() -> Reproduction {
    let cell = |place: &str, name: &str, unit: &str, paper: f64, ours: f64| {
        Cell::rounded(place, name.into(), unit, paper, ours, 0)
    };
    let free_tb = TOTAL_TB * (1.0 - USED);
    let wire_s = REMOTE_S * LINK_USED;
    let faults = wire_s * LINK_BYTES_S / (USUAL_PAGES * PAGE_BYTES);
    // What a fault costs beside the wire is paid once for each fetch.
    let most_saved = (REMOTE_S - wire_s) * (1.0 - USUAL_PAGES / BEST_PAGES) / REMOTE_S;
    let part = SAVED / most_saved;
    let cells = vec![
        fits(cell("Figure 1", "swapped data, and memory free for it", "TB", SWAPPED_TB, free_tb)),
        cell(
            "section 6.2",
            "overhead that the network makes up",
            "%",
            50.0,
            (1.0 - RAMDISK_S / REMOTE_S) * 100.0,
        )
        .input("(319 - 160) / 319, the text's own arithmetic"),
        cell("Figure 9", "microbenchmark over a disk in memory", "s", RAMDISK_S, REMOTE_S - wire_s)
            .or_consistent(true, "")
            .because(
                "319 s less the time that half of 1 Gbit/s was in use: the wire explains all of \
                 the difference, though the text says that bandwidth is no bottleneck",
            ),
        cell(
            "Figure 10",
            "saved by 512 pages at once",
            "%",
            SAVED * 100.0,
            most_saved * part * 100.0,
        )
        .fitted(format!(
            "if {:.0} % of a fault's {:.0} us beside the wire are paid for each fetch and not for \
                 each page, solved for; 49 % is the most that fetching ahead can save",
            part * 100.0,
            (REMOTE_S - wire_s) / faults * 1e6
        )),
    ];
    Reproduction {
        source: "Samih and others, A Collaborative Memory System for High-Performance and \
                 Cost-Effective Clustered Architectures (ACMS), 2011"
            .into(),
        cells,
        errata: errata(&[(
            "section 6.2",
            "bandwidth is called no bottleneck at a use of half; in a program that waits for each \
             fetch the wire's half is the whole difference to a disk in memory",
        )]),
        left_out: [
            left_out(Lack::NotDerivable, &NOT_DERIVABLE),
            left_out(
                Lack::NothingToCompute,
                &[("Figures 2 to 5", "architecture, thresholds, protocol, an example")],
            ),
        ]
        .concat(),
    }
}

/// The printed amount fits into ours.
fn fits(cell: Cell) -> Cell {
    let verdict = if cell.ours >= cell.paper { Verdict::InShape } else { Verdict::Departs };
    Cell { verdict, why: "31 % of 437 TB are free: twice what lies in swap".into(), ..cell }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_link_explains_the_network_s_part() {
        let all = acms();
        let cell =
            |part: &str| all.cells.iter().find(|cell| cell.name.contains(part)).expect("the cell");
        let over_memory = cell("over a disk in memory");
        assert_eq!(over_memory.ours, 159.5);
        assert!(matches!(over_memory.verdict, Verdict::Exact | Verdict::Consistent));
        assert_eq!(cell("network makes up").verdict, Verdict::Input);
        assert_eq!(cell("512 pages").verdict, Verdict::Fitted);
        assert_eq!(cell("memory free").verdict, Verdict::InShape);
    }
}
