//! Packings against brute force, and packings of real machines.

mod common;

use common::{bitbrains, google};
use farpool_plan::Random;
use farpool_plan::pack::greedy::{Order, best_fit, by_alignment, first_fit};
use farpool_plan::pack::{
    Demand, Packing, Problem, Question, Server, Verdict, anneal, bound, exact, plan,
};
use farpool_plan::utilisation::{Columns, Options, Utilisation};

/// Items of random sizes, in tenths of a bin, so that many fit exactly.
fn problem(random: &mut Random, items: usize, dimensions: usize) -> Problem {
    let largest = 1 + random.below(10);
    let part =
        |random: &mut Random| f64::from(u32::try_from(random.below(largest + 1)).unwrap()) / 10.0;
    let item = |random: &mut Random| (0..dimensions).map(|_| part(random)).collect();
    let items: Vec<Vec<f64>> = (0..items).map(|_| item(random)).collect();
    Problem::new(&items).expect("none is larger than a bin")
}

/// Returns the fewest bins by trying every partition.
fn brute_force(problem: &Problem) -> usize {
    fn fits(problem: &Problem, bin: &[usize]) -> bool {
        (0..problem.dimensions()).all(|at| {
            let sum: u64 = bin.iter().map(|item| u64::from(problem.sizes(*item)[at])).sum();
            sum <= u64::from(farpool_plan::pack::BIN)
        })
    }
    fn descend(problem: &Problem, item: usize, bins: &mut Vec<Vec<usize>>, best: &mut usize) {
        if item == problem.items() {
            let valid = bins.iter().all(|bin| fits(problem, bin));
            *best = if valid { (*best).min(bins.len()) } else { *best };
            return;
        }
        for at in 0..bins.len() {
            bins[at].push(item);
            descend(problem, item + 1, bins, best);
            bins[at].pop();
        }
        bins.push(vec![item]);
        descend(problem, item + 1, bins, best);
        bins.pop();
    }
    let mut best = usize::MAX;
    descend(problem, 0, &mut Vec::new(), &mut best);
    best
}

#[test]
fn the_exact_packing_is_that_of_brute_force_and_nothing_beats_the_bound() {
    let mut random = Random::new(1);
    for round in 0..300 {
        let (items, dimensions) = (1 + random.below(8), 1 + random.below(3));
        let problem = problem(&mut random, items, dimensions);
        let fewest = brute_force(&problem);
        let proven = exact::pack(&problem).expect("few items");
        assert!(proven.is_valid(&problem));
        assert_eq!(proven.bins(), fewest, "round {round}: {problem:?}");
        assert!(bound::lower(&problem).bins <= fewest, "round {round}: {problem:?}");
    }
}

#[test]
fn every_way_of_packing_holds_all_items_once_and_none_beats_the_proven_one() {
    let mut random = Random::new(2);
    for _ in 0..60 {
        let (items, dimensions) = (10 + random.below(15), 1 + random.below(4));
        let problem = problem(&mut random, items, dimensions);
        let lower = bound::lower(&problem).bins;
        let order = Order::Peak.sorted(&problem);
        let start = first_fit(&problem, &order);
        let searched = anneal::anneal(&problem, start.clone(), lower, 20_000, 3);
        assert!(searched.bins() <= start.bins());
        let found: [Packing; 4] =
            [start, best_fit(&problem, &order), by_alignment(&problem), searched];
        let proven = exact::pack(&problem).map_or(lower, |packing| packing.bins());
        for packing in found {
            assert!(packing.is_valid(&problem));
            assert!(packing.bins() >= proven, "{problem:?}");
        }
    }
}

#[test]
fn some_tens_of_items_are_proven_and_more_are_not_tried() {
    let mut random = Random::new(4);
    let mut part = || 0.05 + f64::from(u8::try_from(random.below(50)).unwrap()) / 100.0;
    let items: Vec<Vec<f64>> = (0..22).map(|_| (0..3).map(|_| part()).collect()).collect();
    let problem = Problem::new(&items).expect("small items");
    let packing = exact::pack(&problem).expect("proven");
    assert!(packing.is_valid(&problem) && packing.bins() >= bound::lower(&problem).bins);
    let more = [items.clone(), items].concat();
    assert!(exact::pack(&Problem::new(&more).expect("small items")).is_none(), "too many to prove");
}

fn question(server: Server, local: &[f64]) -> Question {
    Question {
        server,
        demand: Demand::Used,
        local_shares: local.to_vec(),
        moves: 1_000_000,
        seed: 42,
        worth: 0.1,
    }
}

#[test]
fn google_s_machines_run_out_of_processors_and_far_memory_frees_few_servers() {
    let machines = Utilisation::read(&google(), &Options::default()).expect("it ships");
    let answer = plan(&machines, &question(Server::machine(), &[0.25]), &mut |_| {}).expect("fits");
    let [by_peaks, whole, far] = &answer.rows[..] else { panic!("{:?}", answer.rows) };
    assert!((by_peaks.sum_bound - 522.1).abs() < 0.1, "{by_peaks:?}");
    assert!((far.sum_bound - 385.7).abs() < 0.1 && far.is_cpu_bound, "{far:?}");
    assert!(by_peaks.servers <= 536 && whole.servers <= 467 && far.servers <= 454, "{answer:?}");
    assert!(far.over_bound <= 1.35 && far.servers < whole.servers, "{answer:?}");
    assert_eq!(answer.verdict, Verdict::DoNotPool, "{:?}", answer.reasons);
}

#[test]
fn bitbrains_machines_take_half_the_servers_when_half_the_memory_is_far() {
    let Some(folder) = bitbrains() else { return };
    let file = folder.join("bitbrains-rnd-2013-08-week1-5min.parquet");
    let mut machines = Utilisation::read(&file, &Options::default()).expect("readable");
    let table = folder.join("bitbrains-rnd-2013-08-vms.parquet");
    machines.read_provisioned(&table, &Columns::default()).expect("readable");
    let machines = machines.with_steps_of(3600.0);
    let server = Server {
        name: "64 GiB".into(),
        cpu_ghz: Some(41.6),
        memory_gib: Some(64.0),
        ..Server::default()
    };
    let mut question = question(server, &[0.5, 0.75, 0.25]);
    question.demand = Demand::Provisioned;
    let answer = plan(&machines, &question, &mut |_| {}).expect("they fit");
    assert_eq!((answer.machines, answer.too_large.len()), (497, 2));
    let servers: Vec<usize> = answer.rows[1..].iter().map(|row| row.servers).collect();
    // Whole, half, three quarters, one quarter local.
    assert_eq!(servers[..3], [60, 30, 45]);
    assert!(servers[3] <= 29, "{servers:?}");
    assert!(answer.rows.iter().all(|row| row.over_bound <= 1.1), "{:?}", answer.rows);
    assert_eq!((answer.freed_servers, answer.verdict), (30, Verdict::Pool));
}

#[test]
fn where_prices_are_known_they_decide() {
    let (idle, full) = (vec![vec![0.1; 3]; 2], vec![vec![1.0; 3]; 2]);
    let machines = Utilisation::from_series(&idle, &full, 300.0);
    let decided = |far_price: f64| {
        let server = Server {
            memory_gib: Some(64.0),
            price_dollars: Some(6000.0),
            far_price_dollars_per_gib: Some(far_price),
            ..Server::machine()
        };
        let answer = plan(&machines, &question(server, &[0.5]), &mut |_| {}).expect("they fit");
        assert_eq!(answer.freed_servers, 1);
        (answer.saved_dollars, answer.verdict)
    };
    // One of two servers is freed; half of the two machines' 64 GiB is far.
    assert_eq!(decided(9.0), (Some(6000.0 - 64.0 * 9.0), Verdict::Pool));
    assert_eq!(decided(100.0), (Some(-400.0), Verdict::DoNotPool));
}
