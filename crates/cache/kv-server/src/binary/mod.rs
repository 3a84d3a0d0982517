//! memcached's binary protocol: parsing input in batches, requests on keys and to the server.

mod sasl;
mod serve;
mod server;

pub(crate) use server::encode;
