//! Small requests that wait for a service, made together.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use shardfast_store::Store;

/// Acts on each item and returns the results in their order. Where storage takes requests, many are made at a time:
/// each waits for the service. Elsewhere they are made one after the other: threads would cost more than they gain.
pub(crate) fn each<T: Sync, R: Send>(store: &dyn Store, items: &[T], act: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let needs = store.needs().reads;
    let threads = if needs.request_bytes == 0 { 1 } else { needs.in_flight.min(items.len()) };
    if threads <= 1 {
        return items.iter().map(act).collect();
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, act(item)));
        }
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().flat_map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}
