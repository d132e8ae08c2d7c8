//! Ends calls early because the program asks for it, such as by Ctrl-C.
//!
//! A call runs on a thread [`within`] its interrupt, and what it does there looks at it: tries that follow each other,
//! reads, and waits that can be cut. The caller asks for the end from another thread.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

thread_local! {
    static CURRENT: RefCell<Option<Arc<Interrupt>>> = const { RefCell::new(None) };
}

/// Request to end a call.
#[derive(Default)]
pub struct Interrupt {
    is_asked: AtomicBool,
    /// Ends the wait that the call is in.
    cut: Mutex<Option<Box<dyn Fn() + Send>>>,
}

impl Interrupt {
    /// Asks the call to end. To be repeated until it has: a wait may begin at this moment.
    pub fn ask(&self) {
        self.is_asked.store(true, Ordering::Release);
        if let Some(cut) = &*self.cut.lock().unwrap_or_else(PoisonError::into_inner) {
            cut();
        }
    }

    /// Returns whether the call is to end.
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Acquire)
    }
}

/// Runs `body` as a part of the call that `interrupt` ends.
pub fn within<T>(interrupt: Option<Arc<Interrupt>>, body: impl FnOnce() -> T) -> T {
    struct Restored(Option<Arc<Interrupt>>);
    impl Drop for Restored {
        fn drop(&mut self) {
            CURRENT.with(|current| *current.borrow_mut() = self.0.take());
        }
    }
    let _restored = Restored(CURRENT.with(|current| current.replace(interrupt)));
    body()
}

/// Returns the interrupt of the call that this thread is part of.
pub fn current() -> Option<Arc<Interrupt>> {
    CURRENT.with(|current| current.borrow().clone())
}

/// Returns whether the call of this thread is to end.
pub fn is_asked() -> bool {
    current().is_some_and(|interrupt| interrupt.is_asked())
}

/// Waits, and lets an interrupt of this thread's call end the wait by `cut`, which may be called several times.
pub fn waiting<T>(cut: impl Fn() + Send + 'static, wait: impl FnOnce() -> T) -> T {
    let Some(interrupt) = current() else { return wait() };
    let place = || interrupt.cut.lock().unwrap_or_else(PoisonError::into_inner);
    let outer = place().replace(Box::new(cut));
    let done = wait();
    *place() = outer;
    done
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_wait_is_cut_and_waits_after_it_are_not() {
        let interrupt = Arc::new(Interrupt::default());
        within(Some(Arc::clone(&interrupt)), || {
            let (cut, cuts) = mpsc::channel();
            let within_it = Arc::clone(&interrupt);
            waiting(
                move || cut.send(()).unwrap(),
                || {
                    thread::spawn(move || within_it.ask()).join().unwrap();
                    cuts.recv().unwrap();
                },
            );
            assert!(cuts.recv().is_err(), "nothing is kept of a wait that is over");
            interrupt.ask();
            assert!(is_asked());
        });
        assert!(!is_asked() && current().is_none(), "what follows is no part of the call");
    }
}
