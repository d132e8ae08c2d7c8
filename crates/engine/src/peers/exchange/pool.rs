//! Keeps threads busy from one round to the next.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;

use crossbeam_channel::{Receiver, Sender};
use shardfast_transfer::error::{Error, Result};

/// Queued work, and whether more may come.
pub(super) struct Queue<T> {
    state: Mutex<(VecDeque<T>, bool)>,
    changed: Condvar,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue { state: Mutex::new((VecDeque::new(), false)), changed: Condvar::new() }
    }
}

impl<T> Queue<T> {
    fn lock(&self) -> MutexGuard<'_, (VecDeque<T>, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, item: T, is_first: bool) {
        let queue = &mut self.lock().0;
        if is_first {
            queue.push_front(item)
        } else {
            queue.push_back(item)
        }
        self.changed.notify_one();
    }

    fn next(&self) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(item) = state.0.pop_front() {
                return Some(item);
            }
            if state.1 {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Threads of a scope that work off a queue. When it is dropped, work that no thread has begun is discarded.
pub(super) struct Pool<'scope, 'env, T, R> {
    scope: &'scope Scope<'scope, 'env>,
    queue: &'scope Queue<T>,
    work: &'scope (dyn Fn(T) -> Result<R> + Sync),
    results: (Sender<Result<R>>, Receiver<Result<R>>),
    threads: usize,
    unfinished: usize,
}

impl<'scope, 'env, T: Send + 'scope, R: Send + 'scope> Pool<'scope, 'env, T, R> {
    pub(super) fn new(
        scope: &'scope Scope<'scope, 'env>,
        queue: &'scope Queue<T>,
        work: &'scope (dyn Fn(T) -> Result<R> + Sync),
    ) -> Self {
        Pool { scope, queue, work, results: crossbeam_channel::unbounded(), threads: 0, unfinished: 0 }
    }

    /// Queues an item, with at least `threads` threads; in front of all others if it `is_first`.
    pub(super) fn submit(&mut self, item: T, is_first: bool, threads: usize) {
        while self.threads < threads {
            let (queue, work, results) = (self.queue, self.work, self.results.0.clone());
            self.scope.spawn(move || {
                while let Some(item) = queue.next() {
                    let panicked = |_| Err(Error::internal("a thread of a load panicked"));
                    let done = catch_unwind(AssertUnwindSafe(|| work(item))).unwrap_or_else(panicked);
                    // After a failure of the load there is no receiver.
                    let _ = results.send(done);
                }
            });
            self.threads += 1;
        }
        self.unfinished += 1;
        self.queue.push(item, is_first);
    }

    /// Items that are not done, or whose result was not taken.
    pub(super) fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Returns the result of some item; `None` when there is no unfinished one.
    pub(super) fn next(&mut self) -> Option<Result<R>> {
        if self.unfinished == 0 {
            return None;
        }
        self.unfinished -= 1;
        self.results.1.recv().ok()
    }
}

impl<T, R> Drop for Pool<'_, '_, T, R> {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        state.0.clear();
        state.1 = true;
        self.queue.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_done_once_and_a_panic_is_a_result() {
        let queue = Queue::default();
        let work = |n: u32| if n == 7 { panic!("seven") } else { Ok(n) };
        std::thread::scope(|scope| {
            let mut pool = Pool::new(scope, &queue, &work);
            (0..100).for_each(|n| pool.submit(n, n % 3 == 0, 4));
            let (mut done, mut failed) = (Vec::new(), 0);
            while let Some(result) = pool.next() {
                match result {
                    Ok(n) => done.push(n),
                    Err(_) => failed += 1,
                }
            }
            done.sort_unstable();
            assert!(done.iter().copied().eq((0..100).filter(|&n| n != 7)) && failed == 1, "{done:?}");
        });
    }
}
