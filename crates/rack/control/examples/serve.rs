//! A controller as a process of its own, for tests that kill it:
//! `serve FILE` or `serve etcd:URL[,URL]`. Prints its URL; ends when its standard input does.

use std::io::{Read, Write};
use std::net::SocketAddr;

use farpool_control::{ControlOptions, StoreChoice, serve};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = std::env::args().nth(1).ok_or("give a store: FILE or etcd:URL[,URL]")?;
    let store = match store.strip_prefix("etcd:") {
        Some(urls) => StoreChoice::Etcd(urls.split(',').map(str::to_owned).collect()),
        None => StoreChoice::Redb(store.into()),
    };
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        drop(std::io::stdin().read_to_end(&mut rest));
        drop(end);
    });
    let options = ControlOptions::new(SocketAddr::from(([127, 0, 0, 1], 0)), store);
    let on_ready = |addresses: &[SocketAddr]| {
        println!("http://{}", addresses[0]);
        drop(std::io::stdout().flush());
    };
    let served = serve(options, on_ready, async move { drop(ended.await) });
    Ok(tokio::runtime::Runtime::new()?.block_on(served)?)
}
