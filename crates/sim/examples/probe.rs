use farpool_sim::{
    misses::{CacheConfig, DensePages, MissPolicy, count_misses},
    synthetic::Synthetic,
};
use std::io::Write;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let n: usize = a[1].parse().unwrap();
    let sizes: Vec<usize> = a[2].split(',').map(|s| s.parse().unwrap()).collect();
    for (name, t) in [
        ("zipf", Synthetic::zipf(1 << 14, n, 42)),
        ("mstress", Synthetic::mstress(12000, n, 42)),
        ("cycle", Synthetic::cycle(5000, n)),
        ("scan", Synthetic::scan_and_hot_set(10000, n, 42)),
        ("phases", Synthetic::phases(16000, n, 42)),
        ("walk", Synthetic::walk(12000, n, 42)),
        ("visitors", Synthetic::one_time_visitors(1 << 13, n, 42)),
    ] {
        let path = format!("/tmp/lcs/{name}.oracleGeneral");
        let mut next = vec![i64::MAX; t.pages.len()];
        let mut last = vec![i64::MAX; t.page_count];
        for i in (0..t.pages.len()).rev() {
            next[i] = last[t.pages[i] as usize];
            last[t.pages[i] as usize] = i as i64 + 1;
        }
        let mut f = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
        for (i, p) in t.pages.iter().enumerate() {
            f.write_all(&(i as u32).to_le_bytes()).unwrap();
            f.write_all(&u64::from(*p).to_le_bytes()).unwrap();
            f.write_all(&1u32.to_le_bytes()).unwrap();
            f.write_all(&(if next[i] == i64::MAX { -1i64 } else { next[i] }).to_le_bytes())
                .unwrap();
        }
        for kind in MissPolicy::all() {
            for &capacity in &sizes {
                let m = count_misses(
                    DensePages { pages: &t.pages, page_count: t.page_count },
                    CacheConfig { policy: kind, capacity },
                )
                .unwrap();
                println!("{name} {kind} {capacity} {m}");
            }
        }
    }
}
