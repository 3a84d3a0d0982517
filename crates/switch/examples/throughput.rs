//! What the emulated switch costs: TCP between two hosts over it, beside a bridge and a direct link.
//!
//! `cargo run --release -p farpool-switch --example throughput [SECONDS]`, as root.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use farpool_hosts::{Hosts, Wiring};
use farpool_switch::{Circuit, EmulatedSwitch, SwitchDriver};

type Failure = Box<dyn Error + Send + Sync>;

const BLOCK_BYTES: usize = 256 * 1024;
const PAGE_BYTES: usize = 4096;

fn main() -> Result<(), Failure> {
    let seconds = std::env::args().nth(1).map_or(Ok(3), |word| word.parse())?;
    let length = Duration::from_secs(seconds);
    println!("{:24} {:>10} {:>14} {:>14}", "wiring", "GiB/s", "1 B trip us", "4 KiB trip us");
    for wiring in [Wiring::Direct, Wiring::Bridge, Wiring::Switch] {
        let hosts = Hosts::builder(2, wiring).make()?;
        let mut switch = None;
        if let Some(side) = hosts.switch() {
            let mut opened = side.enter(|| EmulatedSwitch::open("s0", side.ports()))??;
            opened.connect(Circuit::new(0, 1).ok_or("two ports")?)?;
            switch = Some(opened);
        }
        let stream_gib = stream(&hosts, length)?;
        let short_us = trips(&hosts, length, 1)?;
        let page_us = trips(&hosts, length, PAGE_BYTES)?;
        let name = format!("{wiring:?}");
        println!("{name:24} {stream_gib:10.2} {short_us:14.1} {page_us:14.1}");
        if let Some(switch) = switch {
            println!("{:?}", switch.counters());
        }
    }
    Ok(())
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

/// GiB/s of one stream.
fn stream(hosts: &Hosts, length: Duration) -> Result<f64, Failure> {
    let (mut near, mut far) = pair(hosts)?;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let block = vec![7; BLOCK_BYTES];
        let started = Instant::now();
        while started.elapsed() < length {
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

/// Mean time in us from a request of one byte to its answer of `bytes`.
fn trips(hosts: &Hosts, length: Duration, bytes: usize) -> Result<f64, Failure> {
    let (mut near, mut far) = pair(hosts)?;
    let answering = std::thread::spawn(move || -> std::io::Result<()> {
        let answer = vec![7; bytes];
        let mut request = [0];
        while far.read(&mut request)? == 1 {
            far.write_all(&answer)?;
        }
        Ok(())
    });
    let (mut answer, mut count, started) = (vec![0; bytes], 0_u32, Instant::now());
    while started.elapsed() < length {
        near.write_all(&[1])?;
        near.read_exact(&mut answer)?;
        count += 1;
    }
    let seconds = started.elapsed().as_secs_f64();
    drop(near);
    answering.join().map_err(|_| "the answering side failed")??;
    Ok(seconds * 1e6 / f64::from(count.max(1)))
}
