//! Figures for Prometheus, computed from the state when they are requested.
//!
//! Invariant: names and their order are those of the registry, so a server's `/metrics` changes
//! with its own code only.

use std::sync::atomic::AtomicU64;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

/// The content type of OpenMetrics text.
pub const OPENMETRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Name, help and value of a figure.
pub type Figure<'a> = (&'a str, &'a str, u64);

/// Answers with all figures of a registry as OpenMetrics text.
#[must_use]
pub fn answer(registry: &Registry) -> Response {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut text, registry);
    ([(header::CONTENT_TYPE, OPENMETRICS_TYPE)], text).into_response()
}

/// Registers figures that only grow.
pub fn register_counters(registry: &mut Registry, figures: &[Figure<'_>]) {
    for &(name, help, value) in figures {
        let counter: Counter = Counter::default();
        counter.inc_by(value);
        registry.register(name, help, counter);
    }
}

/// Registers figures that go up and down.
pub fn register_gauges(registry: &mut Registry, unit: Option<Unit>, figures: &[Figure<'_>]) {
    for &(name, help, value) in figures {
        let gauge: Gauge<u64, AtomicU64> = Gauge::default();
        gauge.set(value);
        match &unit {
            Some(unit) => registry.register_with_unit(name, help, unit.clone(), gauge),
            None => registry.register(name, help, gauge),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn figures_are_openmetrics_text() {
        let mut registry = Registry::with_prefix("farpool_test");
        register_gauges(&mut registry, Some(Unit::Bytes), &[("lent", "What is lent", 1 << 40)]);
        register_gauges(&mut registry, None, &[("clients", "Clients", 2)]);
        register_counters(&mut registry, &[("moves", "Moves", 3)]);
        let response = answer(&registry);
        assert_eq!(response.headers()[header::CONTENT_TYPE], OPENMETRICS_TYPE);
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let expected = "\
            # HELP farpool_test_lent_bytes What is lent.\n\
            # TYPE farpool_test_lent_bytes gauge\n\
            # UNIT farpool_test_lent_bytes bytes\n\
            farpool_test_lent_bytes 1099511627776\n\
            # HELP farpool_test_clients Clients.\n\
            # TYPE farpool_test_clients gauge\n\
            farpool_test_clients 2\n\
            # HELP farpool_test_moves Moves.\n\
            # TYPE farpool_test_moves counter\n\
            farpool_test_moves_total 3\n\
            # EOF\n";
        assert_eq!(String::from_utf8(body.to_vec()).unwrap(), expected);
    }
}
