//! Moves a worker that serves one client with small requests, one at a time, to the CPU where that
//! client's requests arrive.
//!
//! Waking another CPU costs more than a page, on a virtual machine several times more; where the
//! packets of a request are received (`SO_INCOMING_CPU`), no CPU need be woken. So a worker that
//! wakes again and again for one request of one connection binds itself to that CPU, follows it,
//! and lets go when other connections want something too. With many connections it never binds:
//! there the scheduler knows better.

/// Wake-ups in a row for one connection alone before it is followed: a passing burst of one client
/// is shorter.
const ALONE_WAKES: u32 = 32;
/// Wake-ups on the wrong CPU in a row before the worker moves: a move costs about two of them.
const ASTRAY_WAKES: u32 = 2;
/// Wake-ups for others, with none for the followed one between, after which the worker lets go.
const OTHERS_WAKES: u32 = 8;

/// What the worker is to do about its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    Stay,
    /// Run on this CPU only.
    To(usize),
    /// Run anywhere again.
    Anywhere,
}

/// See the module's description. Pure.
#[derive(Debug, Default)]
pub(super) struct Follow {
    connection: usize,
    alone: u32,
    others: u32,
    astray: u32,
    bound: Option<usize>,
}

impl Follow {
    /// Records a wake-up for a small request of `connection` and nothing else. `cpu` returns where
    /// that connection's requests arrive.
    pub(super) fn woke_for(
        &mut self,
        connection: usize,
        cpu: impl FnOnce() -> Option<usize>,
    ) -> Move {
        if connection != self.connection {
            if self.bound.is_some() {
                return self.woke_for_others();
            }
            (self.connection, self.alone) = (connection, 0);
        }
        self.others = 0;
        self.alone = (self.alone + 1).min(ALONE_WAKES);
        if self.alone < ALONE_WAKES {
            return Move::Stay;
        }
        let cpu = cpu();
        self.astray = if cpu == self.bound { 0 } else { self.astray + 1 };
        match cpu {
            Some(cpu) if self.astray >= ASTRAY_WAKES => {
                (self.bound, self.astray) = (Some(cpu), 0);
                Move::To(cpu)
            }
            _ => Move::Stay,
        }
    }

    /// Records a wake-up for something else.
    pub(super) fn woke_for_others(&mut self) -> Move {
        self.others += 1;
        if self.bound.is_some() && self.others < OTHERS_WAKES {
            return Move::Stay;
        }
        (self.alone, self.others, self.astray) = (0, 0, 0);
        if self.bound.take().is_some() { Move::Anywhere } else { Move::Stay }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wakes(follow: &mut Follow, connection: usize, cpu: usize, count: u32) -> Vec<Move> {
        let moves = (0..count).map(|_| follow.woke_for(connection, || Some(cpu)));
        moves.filter(|it| *it != Move::Stay).collect()
    }

    #[test]
    fn one_connection_is_followed_from_cpu_to_cpu_and_let_go_for_others() {
        let mut follow = Follow::default();
        assert_eq!(wakes(&mut follow, 3, 1, ALONE_WAKES), []);
        assert_eq!(wakes(&mut follow, 3, 1, 20), [Move::To(1)]);
        assert_eq!(wakes(&mut follow, 3, 0, 1), [], "once is not enough");
        assert_eq!(wakes(&mut follow, 3, 1, 1), []);
        assert_eq!(wakes(&mut follow, 3, 0, 20), [Move::To(0)]);
        assert_eq!(wakes(&mut follow, 4, 1, OTHERS_WAKES), [Move::Anywhere]);
        assert_eq!(wakes(&mut follow, 4, 1, 40), [Move::To(1)]);
    }

    #[test]
    fn many_connections_leave_it_to_the_scheduler() {
        let mut follow = Follow::default();
        for round in 0..1000 {
            assert_eq!(follow.woke_for(round % 2, || Some(1)), Move::Stay);
            assert_eq!(follow.woke_for_others(), Move::Stay);
        }
    }

    #[test]
    fn a_kernel_that_does_not_tell_moves_nobody() {
        let mut follow = Follow::default();
        assert!((0..100).all(|_| follow.woke_for(0, || None) == Move::Stay));
    }
}
