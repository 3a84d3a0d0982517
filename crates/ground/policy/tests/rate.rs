//! The token bucket against a plain model that counts tokens exactly, and under several threads.

use farpool_policy::{Bucket, Meter, RateLimit, WaitNs};
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

const NS: u128 = 1_000_000_000;

/// Counts tokens in units of a byte times a nanosecond per second, so that nothing is rounded.
struct Model {
    limit: RateLimit,
    tokens: u128,
    now_ns: u64,
}

impl Model {
    fn new(limit: RateLimit) -> Model {
        Model { limit, tokens: u128::from(limit.burst_bytes) * NS, now_ns: 0 }
    }

    fn pass(&mut self, now_ns: u64) {
        let gained = u128::from(now_ns - self.now_ns) * u128::from(self.limit.bytes_per_s);
        self.tokens = (self.tokens + gained).min(u128::from(self.limit.burst_bytes) * NS);
        self.now_ns = now_ns;
    }
}

fn any_limit() -> impl Strategy<Value = RateLimit> {
    (1..20_000_000_000u64, 0..8_000_000u64)
        .prop_map(|(bytes_per_s, burst_bytes)| RateLimit { bytes_per_s, burst_bytes })
}

/// Pauses and requests.
fn any_steps() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((0..50_000_000u64, 0..4_194_304u64), 1..60)
}

/// Checks that in any span no more passes than the burst, or the largest request, plus what the
/// rate allows.
fn check_spans(passed: &[(u64, u64)], limit: &RateLimit) -> Result<(), TestCaseError> {
    for from in 0..passed.len() {
        let (mut bytes, mut largest) = (0u128, 0);
        for (at_ns, more) in &passed[from..] {
            bytes += u128::from(*more);
            largest = largest.max(*more);
            let span_ns = u128::from(at_ns - passed[from].0);
            let most = u128::from(limit.burst_bytes.max(largest)) * NS
                + span_ns * u128::from(limit.bytes_per_s);
            prop_assert!(bytes * NS <= most, "{bytes} bytes in {span_ns} ns");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_span_of_time_gets_more_and_nothing_there_is_refused(
        limit in any_limit(), steps in any_steps()
    ) {
        // With no burst at all the model never has a token; that case has its own test.
        prop_assume!(limit.burst_bytes > 0);
        let (bucket, mut model) = (Bucket::new(), Model::new(limit));
        let (mut now_ns, mut passed, mut rounded_ns) = (0, Vec::new(), 1);
        for (pause_ns, bytes) in steps {
            now_ns += pause_ns;
            let bytes = bytes.min(limit.burst_bytes);
            model.pass(now_ns);
            let needed = u128::from(bytes) * NS;
            match bucket.take(bytes, now_ns, &limit) {
                Ok(()) => {
                    prop_assert!(model.tokens >= needed, "more than there was");
                    model.tokens -= needed;
                    passed.push((now_ns, bytes));
                    rounded_ns += 1;
                }
                Err(WaitNs(wait_ns)) => {
                    let slack = rounded_ns * u128::from(limit.bytes_per_s);
                    prop_assert!(model.tokens < needed + slack, "refused what was there");
                    let soon = now_ns + wait_ns - 1;
                    prop_assert!(bucket.take(bytes, soon, &limit).is_err(), "the wait is no longer \
                        than needed");
                    now_ns += wait_ns;
                    model.pass(now_ns);
                    prop_assert_eq!(bucket.take(bytes, now_ns, &limit), Ok(()), "after the wait");
                    model.tokens = model.tokens.checked_sub(needed).expect("the wait was long \
                        enough");
                    passed.push((now_ns, bytes));
                    rounded_ns += 1;
                }
            }
            let there = u128::from(bucket.available_bytes(now_ns, &limit)) * NS;
            prop_assert!(there <= model.tokens);
        }
        check_spans(&passed, &limit)?;
    }

    #[test]
    fn charged_bytes_pass_in_order_and_no_faster(limit in any_limit(), steps in any_steps()) {
        let bucket = Bucket::new();
        let (mut now_ns, mut passed) = (0, Vec::new());
        for (pause_ns, bytes) in steps {
            now_ns += pause_ns;
            let WaitNs(wait_ns) = bucket.charge(bytes, now_ns, &limit);
            passed.push((now_ns + wait_ns, bytes));
        }
        // The limit holds in the order of passing.
        passed.sort_by_key(|(at_ns, _)| *at_ns);
        check_spans(&passed, &limit)?;
    }

    #[test]
    fn what_is_given_back_is_as_if_never_charged(limit in any_limit(), steps in any_steps()) {
        let (bucket, without) = (Bucket::new(), Bucket::new());
        let mut now_ns = 0;
        for (at, (pause_ns, bytes)) in steps.into_iter().enumerate() {
            now_ns += pause_ns;
            let wait = bucket.charge(bytes, now_ns, &limit);
            if at % 2 == 0 {
                bucket.give_back(bytes, &limit);
            } else {
                prop_assert_eq!(wait, without.charge(bytes, now_ns, &limit));
            }
            let there = |bucket: &Bucket| bucket.available_bytes(now_ns, &limit);
            prop_assert_eq!(there(&bucket), there(&without));
        }
    }

    #[test]
    fn a_clock_that_goes_back_lets_no_more_through(
        limit in any_limit(), steps in any_steps(), jumps in prop::collection::vec(0..90_000_000u64, 60)
    ) {
        let bucket = Bucket::new();
        let (mut now_ns, mut bytes_passed, mut largest) = (1u64 << 40, 0u128, 0);
        let (mut earliest_ns, mut latest_ns) = (now_ns, now_ns);
        for ((pause_ns, bytes), jump_ns) in steps.into_iter().zip(jumps) {
            now_ns = (now_ns + pause_ns).saturating_sub(jump_ns);
            (earliest_ns, latest_ns) = (earliest_ns.min(now_ns), latest_ns.max(now_ns));
            if bucket.take(bytes, now_ns, &limit).is_ok() {
                bytes_passed += u128::from(bytes);
                largest = largest.max(bytes);
            }
        }
        let span_ns = u128::from(latest_ns - earliest_ns);
        let most = u128::from(limit.burst_bytes.max(largest)) * NS
            + span_ns * u128::from(limit.bytes_per_s);
        prop_assert!(bytes_passed * NS <= most);
        prop_assert_eq!(bucket.take(1, u64::MAX / 2, &limit), Ok(()), "it recovers");
    }
}

#[test]
fn several_threads_together_get_no_more_than_one_would() {
    let limit = RateLimit { bytes_per_s: 1_000_000_000, burst_bytes: 1 << 20 };
    let (bucket, clock, passed) = (Bucket::new(), AtomicU64::new(0), AtomicU64::new(0));
    const END_NS: u64 = 50_000_000;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // One clock for all threads, which advances at each request.
                loop {
                    let now_ns = clock.fetch_add(100, Ordering::Relaxed);
                    if now_ns > END_NS {
                        break;
                    }
                    if bucket.take(4096, now_ns, &limit).is_ok() {
                        passed.fetch_add(4096, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let passed = passed.load(Ordering::Relaxed);
    let given = limit.burst_bytes + limit.bytes_per_s / 1000 * (END_NS / 1_000_000);
    assert!(passed <= given, "{passed} of {given}");
    assert!(passed > given * 9 / 10, "nor much less: {passed} of {given}");
}

#[test]
fn the_ends_of_the_scale_mean_what_they_say() {
    let bucket = Bucket::new();
    let never = RateLimit { bytes_per_s: 0, burst_bytes: 1 << 20 };
    assert_eq!(bucket.take(1, 0, &never), Err(WaitNs(u64::MAX)));
    assert_eq!(bucket.charge(1, 0, &never), WaitNs(u64::MAX));
    for _ in 0..3 {
        assert_eq!(bucket.take(u64::MAX, 0, &RateLimit::UNLIMITED), Ok(()));
        assert_eq!(bucket.charge(u64::MAX, 0, &RateLimit::UNLIMITED), WaitNs(0));
    }
    bucket.give_back(u64::MAX, &RateLimit::UNLIMITED);
    bucket.give_back(1, &never);
    assert_eq!(bucket.available_bytes(0, &RateLimit::UNLIMITED), u64::MAX);
    let slow = RateLimit { bytes_per_s: 1, burst_bytes: 10 };
    assert_eq!(bucket.available_bytes(0, &slow), 10, "none of that was taken");
    assert_eq!(bucket.take(u64::MAX, 0, &slow), Ok(()), "one too large passes a full bucket");
    assert!(bucket.take(1, u64::MAX / 2, &slow).is_err(), "and nothing overflows");
}

#[test]
fn without_a_burst_requests_pass_one_by_one() {
    let limit = RateLimit { bytes_per_s: 1_000_000_000, burst_bytes: 0 };
    let bucket = Bucket::new();
    assert_eq!(bucket.take(4096, 0, &limit), Ok(()));
    assert_eq!(bucket.take(4096, 0, &limit), Err(WaitNs(4096)));
    assert_eq!(bucket.take(4096, 4096, &limit), Ok(()));
}

#[test]
fn a_changed_rate_keeps_the_bytes_taken_not_the_time() {
    let slow = RateLimit { bytes_per_s: 1000, burst_bytes: 10_000 };
    let fast = RateLimit { bytes_per_s: 1_000_000, burst_bytes: 10_000 };
    let meter = Meter::new(slow);
    assert_eq!(meter.bucket().charge(20_000, 0, &slow), WaitNs(0), "a full bucket lets it pass");
    assert_eq!(meter.bucket().charge(1, 0, &slow), WaitNs(10_001_000_000), "10 s of debt");
    meter.set_limit(0, fast);
    assert_eq!(meter.limit(), Some(fast));
    assert_eq!(meter.bucket().charge(1, 0, &fast), WaitNs(10_002_000), "10 ms of the same debt");
    meter.set_limit(0, RateLimit::UNLIMITED);
    assert_eq!(meter.limit(), None);
}

#[test]
fn zeroed_memory_is_a_meter_without_limit() {
    let meter = Meter::default();
    assert_eq!(meter.limit(), None);
    meter.set_limit(5, RateLimit::paced(100 << 20));
    let limit = RateLimit { bytes_per_s: 100 << 20, burst_bytes: 2 << 20 };
    assert_eq!(meter.limit(), Some(limit));
    assert_eq!(meter.bucket().available_bytes(5, &limit), 2 << 20, "and the bucket is full");
}
