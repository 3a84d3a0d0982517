//! Locks that are taken even if a thread has panicked that held them. What they guard is whole
//! between any two statements, or the panic ends the process.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Waits for the lock and holds it.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the lock and holds it together with others that read.
#[inline]
pub fn read_lock<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the lock and holds it alone.
#[inline]
pub fn write_lock<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_holder_does_not_close_the_lock() {
        let (mutex, rwlock) = (Mutex::new(1), RwLock::new(1));
        let holder = std::thread::scope(|scope| {
            let panics = || {
                let _guards = (mutex.lock(), rwlock.write());
                std::panic::resume_unwind(Box::new("without a message"));
            };
            scope.spawn(panics).join()
        });
        assert!(holder.is_err() && mutex.is_poisoned() && rwlock.is_poisoned());
        *lock(&mutex) += 1;
        *write_lock(&rwlock) += 1;
        assert_eq!((*lock(&mutex), *read_lock(&rwlock)), (2, 2));
    }
}
