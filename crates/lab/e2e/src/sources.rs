//! Sources of the programs that are run through both doors. The caller chooses the size of their
//! data.

use std::path::Path;

use crate::jobs::compile;

/// For sqlite3: fills a table in memory with this many rows, indexes it, deletes some and sums up.
pub fn sql(rows: u32) -> String {
    format!(
        "create table t(id integer primary key, k text, v blob);
        with recursive c(i) as (select 1 union all select i + 1 from c where i < {rows})
          insert into t select i, printf('key-%08d', (i * 7919) % 1000003), zeroblob(i % 200) from c;
        create index tk on t(k);
        select count(*), sum(length(v)), min(k), max(k) from t;
        select sum(id) from t where k between 'key-00100000' and 'key-00400000';
        select substr(k, 5, 3) as p, count(*) from t group by p order by 2 desc, 1 limit 5;
        delete from t where id % 3 = 0;
        select count(*), sum(id), total(length(v)) from t where k > 'key-00200000';
        pragma integrity_check;"
    )
}

/// Compiles the class Main: a sorted map of byte arrays, under the garbage collector. Its argument
/// is the number of insertions.
///
/// # Panics
/// If javac is missing or fails.
pub fn java(directory: &Path) {
    let source = r#"
import java.util.*;
public class Main {
    public static void main(String[] words) {
        int puts = Integer.parseInt(words[0]);
        Map<Integer, byte[]> map = new TreeMap<>();
        Random random = new Random(5);
        long sum = 0;
        for (int i = 0; i < puts; i++) {
            byte[] value = new byte[80 + random.nextInt(240)];
            value[7] = (byte) i;
            map.put(random.nextInt(puts / 2), value);
        }
        for (var entry : map.entrySet())
            sum = sum * 31 + entry.getKey() + entry.getValue()[7] + entry.getValue().length;
        System.out.println(map.size() + " " + sum);
    }
}"#;
    std::fs::write(directory.join("Main.java"), source).expect("source");
    compile("javac", &["Main.java"], directory);
}

/// Writes mp.py: forked workers that read their parent's data. Its arguments are the number of
/// items and the number of workers.
///
/// # Panics
/// If it cannot be written.
pub fn python_workers(directory: &Path) {
    let script = r#"
import hashlib, multiprocessing, sys
items, workers = int(sys.argv[1]), int(sys.argv[2])
data = [(i, str(i * 7919), [i]) for i in range(items)]
def work(part):
    h = hashlib.sha256()
    for number, text, kept in data[part::workers + 1]:
        kept.append(part)
        h.update(f"{number}{text}{sum(kept)}".encode())
    return h.hexdigest()
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        print(pool.map(work, range(workers + 1)))
    print(len(data), sum(len(text) + len(kept) for _, text, kept in data))
"#;
    std::fs::write(directory.join("mp.py"), script).expect("script");
}
