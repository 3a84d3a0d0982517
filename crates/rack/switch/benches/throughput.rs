//! The cost of the emulated switch: TCP between two hosts over it, beside a bridge and a direct
//! link.
//!
//! `cargo bench -p farpool-switch --bench throughput -- [ROUNDS]`, as root.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use farpool_hosts::{Hosts, Wiring};
use farpool_switch::{Circuit, EmulatedSwitch, SwitchDriver};
use farpool_units::PAGE_BYTES;

type Failure = Box<dyn Error + Send + Sync>;

const BLOCK_BYTES: usize = 256 * 1024;
/// Length of one measurement.
const LENGTH: Duration = Duration::from_secs(1);

fn main() -> Result<(), Failure> {
    let rounds: usize = farpool_benchargs::arguments().next().map_or(Ok(5), |word| word.parse())?;
    let wirings = [Wiring::Direct, Wiring::Bridge, Wiring::Switch];
    // In turns, so that other load of the machine affects all of them.
    let mut figures = [const { [const { Vec::new() }; 3] }; 3];
    for _ in 0..rounds.max(1) {
        for (wiring, figures) in wirings.into_iter().zip(&mut figures) {
            for (figure, all) in round(wiring)?.into_iter().zip(figures) {
                all.push(figure);
            }
        }
    }
    println!("median (lowest to highest) of {} rounds", rounds.max(1));
    println!("{:8} {:>22} {:>22} {:>22}", "wiring", "GiB/s", "1 B trip us", "4 KiB trip us");
    for (wiring, figures) in wirings.iter().zip(&mut figures) {
        let [stream, short, page] = figures.each_mut().map(|all| spread(all));
        println!("{:8} {stream:>22} {short:>22} {page:>22}", format!("{wiring:?}"));
    }
    Ok(())
}

fn spread(figures: &mut [f64]) -> String {
    figures.sort_by(f64::total_cmp);
    let at = |index: usize| figures.get(index).copied().unwrap_or(f64::NAN);
    let last = figures.len().saturating_sub(1);
    format!("{:.2} ({:.2} to {:.2})", at(last / 2), at(0), at(last))
}

/// Returns the GiB/s of a stream, then the two round-trip times in us.
fn round(wiring: Wiring) -> Result<[f64; 3], Failure> {
    let hosts = Hosts::builder(2, wiring).make()?;
    let mut switch = None;
    if let Some(side) = hosts.switch() {
        let mut opened = side.enter(|| EmulatedSwitch::open("s0", side.ports()))??;
        opened.connect(Circuit::new(0, 1).ok_or("two ports")?)?;
        switch = Some(opened);
    }
    // On a thread of its own, so that the threads of the next round are not pinned, too.
    let measured = std::thread::scope(|scope| {
        let measure = || -> Result<_, Failure> {
            pin(1);
            Ok([stream(&hosts)?, trips(&hosts, 1)?, trips(&hosts, PAGE_BYTES)?])
        };
        scope.spawn(measure).join()
    });
    for counters in switch.iter().flat_map(EmulatedSwitch::counters) {
        let lost = counters.from_low.dropped + counters.from_high.dropped;
        if lost > 0 {
            println!("the switch lost {lost} frames");
        }
    }
    measured.map_err(|_| "a measurement failed")?
}

fn pair(hosts: &Hosts) -> Result<(TcpStream, TcpStream), Failure> {
    let listener = hosts[1].enter(|| TcpListener::bind((hosts[1].address(), 0)))??;
    let address = listener.local_addr()?;
    let near = hosts[0].enter(|| TcpStream::connect(address))??;
    let (far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    Ok((near, far))
}

/// Pins one end of a connection, so that each end has a CPU of its own: round trips take 20 us if
/// both are on one CPU and 70 us otherwise, and if the kernel may choose, the figures show its
/// choice. The switch's threads are not pinned.
fn pin(cpu: usize) {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // If pinning is not allowed, the figures vary more.
    let _ = farpool_kernel::pin_thread(cpu % cpus);
}

/// Measures the GiB/s of one stream.
fn stream(hosts: &Hosts) -> Result<f64, Failure> {
    let (mut near, mut far) = pair(hosts)?;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        pin(0);
        let block = vec![7; BLOCK_BYTES];
        let started = Instant::now();
        while started.elapsed() < LENGTH {
            near.write_all(&block)?;
        }
        Ok(())
    });
    let (mut block, mut bytes, started) = (vec![0; BLOCK_BYTES], 0_u64, Instant::now());
    loop {
        match far.read(&mut block)? {
            0 => break,
            got => bytes += got as u64,
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    sender.join().map_err(|_| "the sender failed")??;
    Ok(bytes as f64 / seconds / f64::from(1 << 30))
}

/// Measures the mean time in us from a request of one byte to its answer of `bytes`.
fn trips(hosts: &Hosts, bytes: usize) -> Result<f64, Failure> {
    let (mut near, mut far) = pair(hosts)?;
    let answering = std::thread::spawn(move || -> std::io::Result<()> {
        pin(0);
        let answer = vec![7; bytes];
        let mut request = [0];
        while far.read(&mut request)? == 1 {
            far.write_all(&answer)?;
        }
        Ok(())
    });
    let (mut answer, mut count, started) = (vec![0; bytes], 0_u32, Instant::now());
    while started.elapsed() < LENGTH {
        near.write_all(&[1])?;
        near.read_exact(&mut answer)?;
        count += 1;
    }
    let seconds = started.elapsed().as_secs_f64();
    drop(near);
    answering.join().map_err(|_| "the answering side failed")??;
    Ok(seconds * 1e6 / f64::from(count.max(1)))
}
