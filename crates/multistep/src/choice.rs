//! Chooses over how many steps a save is captured: the stall that each number leaves, by formula. Pure.
//!
//! In the time `t` of a step the bus copies `c t` bytes. Let `x = state / (c t)` and `r = gradients / state`. In step
//! times:
//!
//! - A capture over one step leaves `x - 1`.
//! - *Hidden* gradients are copied in the time of the blocks: `u(K) = (1 - (1 - r)^K) / r` is held after `K` steps,
//!   never more than `1 / r`, and `x - u(K)` is left.
//! - *Waited* gradients leave that time to the blocks, and stall the training: `x - K` is left, and the wait is `r (1 +
//!   2 + ... + (K - 1))`, so `K` steps gain `(K - 1) (1 - r K / 2)` over one.
//!
//! The second is section 4.2.3 of GoCkpt (arXiv 2511.07035), for a capture that ends at its save. The proof reads each
//! held byte once more on the device, which is added. A replay that is too slow for its memory releases blocks, and so
//! do other unforeseen delays: the share that earlier windows held, compared with this formula, corrects it.

/// Figures of a rank's saves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Bytes of parameters and moments that the rank copies for a save.
    pub state_bytes: f64,
    /// Bytes of the gradients of all of these in a step.
    pub gradient_bytes: f64,
    /// Bytes that are copied in a millisecond.
    pub bytes_per_ms: f64,
    /// Milliseconds between two steps of the optimizer in which it does not step.
    pub room_ms: f64,
    /// `true` if the training waits for copies of gradients.
    pub is_waited: bool,
    /// Milliseconds by which the proof of all of the state makes the training longer.
    pub proof_ms: f64,
    /// Share of [`Costs::held`] (with a 1 here) that windows held; 1 before the first.
    pub reached: f64,
}

/// A stall that is shorter than this part of a step is none.
const NOTICED: f64 = 0.02;

impl Costs {
    /// Returns the step times in which the bus copies the state.
    fn x(&self) -> f64 {
        self.state_bytes / (self.bytes_per_ms * self.room_ms)
    }

    /// Returns the part of the state that is held after `steps` steps.
    pub fn held(&self, steps: u32) -> f64 {
        self.held_and_waited(steps)[0] / self.x()
    }

    /// Returns the milliseconds by which a save that is captured over `steps` steps stalls the training.
    pub fn stall_ms(&self, steps: u32) -> f64 {
        let x = self.x();
        if steps <= 1 {
            return (x - 1.0).max(0.0) * self.room_ms;
        }
        let [held, waited] = self.held_and_waited(steps);
        (x - held + waited) * self.room_ms + held / x * self.proof_ms
    }

    /// Returns, in step times, how long the copies of held bytes take, and how long the training waits for gradients.
    fn held_and_waited(&self, steps: u32) -> [f64; 2] {
        let (x, r) = (self.x(), self.gradient_bytes / self.state_bytes);
        let (mut held, mut waited) = (0.0f64, 0.0);
        for step in 1..=steps {
            let gradients = if step == 1 { 0.0 } else { r * held };
            let room = if self.is_waited { 1.0 } else { (1.0 - gradients).max(0.0) };
            waited += if self.is_waited { gradients } else { 0.0 };
            held = (held + room).min(x);
        }
        [(held * self.reached).min(x), waited]
    }

    /// Returns the number of steps, at most `steps_max`, with the shortest stall; the smallest of those whose
    /// difference is not noticed.
    pub fn steps(&self, steps_max: u32) -> u32 {
        let stalls: Vec<f64> = (1..=steps_max.max(1)).map(|steps| self.stall_ms(steps)).collect();
        let least = stalls.iter().copied().fold(f64::INFINITY, f64::min);
        let first = stalls.iter().position(|stall| *stall <= least + NOTICED * self.room_ms);
        first.map_or(1, |first| first as u32 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM_MS: f64 = 100.0;

    /// Makes costs with this `x` and `r`.
    fn costs(x: f64, r: f64, is_waited: bool) -> Costs {
        let state_bytes = 1e9;
        Costs {
            state_bytes,
            gradient_bytes: r * state_bytes,
            bytes_per_ms: state_bytes / (x * ROOM_MS),
            room_ms: ROOM_MS,
            is_waited,
            proof_ms: 0.0,
            reached: 1.0,
        }
    }

    /// Steps, a bus, a thread that replays, and slots, block by block: by how many milliseconds the training is longer.
    struct Simulation {
        blocks: usize,
        block_ms: f64,
        gradient_ms: f64,
        replay_ms: f64,
        slots: usize,
    }

    impl Simulation {
        fn of(costs: &Costs, replay_ms: f64, slots: usize) -> Simulation {
            let blocks = 2000;
            let ms = |bytes: f64| bytes / blocks as f64 / costs.bytes_per_ms;
            Simulation {
                blocks,
                block_ms: ms(costs.state_bytes),
                gradient_ms: ms(costs.gradient_bytes),
                replay_ms,
                slots,
            }
        }

        fn stall_ms(&self, steps: u32, is_waited: bool) -> f64 {
            let (mut now, mut stall, mut held) = (0.0f64, 0.0, 0usize);
            // When the bus and the replaying thread are free, and when each gradient's slot is.
            let (mut bus, mut replay) = (0.0f64, 0.0f64);
            let mut in_use: std::collections::VecDeque<f64> = std::collections::VecDeque::new();
            for step in 0..steps {
                // Behind a step of the optimizer: the gradients of what is held.
                bus = bus.max(now);
                let followed = if step == 0 { 0 } else { held };
                for _ in 0..followed {
                    while in_use.front().is_some_and(|until| *until <= bus) {
                        in_use.pop_front();
                    }
                    if held + in_use.len() >= self.slots {
                        // The newest block is let go.
                        held -= 1;
                        continue;
                    }
                    bus += self.gradient_ms;
                    replay = replay.max(bus) + self.replay_ms;
                    in_use.push_back(replay);
                }
                if is_waited {
                    stall += bus - now;
                    now = bus;
                }
                let next = now + ROOM_MS;
                let is_last = step + 1 == steps;
                while held < self.blocks
                    && (is_last || bus + self.block_ms <= next)
                    && (is_last || held < self.slots / 2)
                {
                    bus += self.block_ms;
                    held += 1;
                }
                let begun = next.max(if is_last { bus } else { next });
                stall += begun - next;
                now = begun;
            }
            stall
        }
    }

    #[test]
    fn a_simulation_of_steps_bus_replay_and_slots_meets_the_formulas() {
        for is_waited in [false, true] {
            for r in [1.0 / 3.0, 1.0 / 7.0] {
                for x in [0.5, 1.0, 1.5, 2.0, 2.5, 3.5, 5.0] {
                    for steps in 1..9 {
                        let costs = costs(x, r, is_waited);
                        let simulated = Simulation::of(&costs, 0.001, usize::MAX).stall_ms(steps, is_waited);
                        let law = costs.stall_ms(steps);
                        assert!(
                            (simulated - law).abs() <= 0.02 * ROOM_MS,
                            "x {x}, r {r}, {steps} steps, waited {is_waited}: {simulated} ms, the law says {law}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_replay_that_is_too_slow_for_its_slots_costs_what_it_lets_go() {
        let costs = costs(2.0, 1.0 / 7.0, false);
        let fast = Simulation::of(&costs, 0.0, 4000).stall_ms(3, false);
        let slow = Simulation::of(&costs, 1.0, 2200).stall_ms(3, false);
        assert!(fast <= 2.0 && slow > 10.0 * fast.max(1.0), "{fast} {slow}");
    }

    #[test]
    fn closed_forms() {
        for (x, r) in [(4.0, 1.0 / 7.0), (9.0, 1.0 / 7.0), (5.0, 1.0 / 3.0)] {
            for steps in 2..8u32 {
                let covered = (1.0 - f64::powi(1.0 - r, steps as i32)) / r;
                let hidden = costs(x, r, false).stall_ms(steps) / ROOM_MS;
                assert!((hidden - (x - covered).max(0.0)).abs() < 1e-9, "{x} {r} {steps}: {hidden}");
                assert!(covered <= 1.0 / r);
                let k = f64::from(steps);
                if k < x {
                    let gain = costs(x, r, true).stall_ms(1) - costs(x, r, true).stall_ms(steps);
                    assert!((gain / ROOM_MS - (k - 1.0) * (1.0 - r * k / 2.0)).abs() < 1e-9, "{x} {r} {steps}: {gain}");
                }
            }
        }
    }

    #[test]
    fn the_fewest_steps_that_leave_the_shortest_stall() {
        // The copy is over within a step: nothing is captured ahead.
        assert_eq!(costs(0.9, 1.0 / 7.0, false).steps(16), 1);
        assert_eq!(costs(1.01, 1.0 / 7.0, false).steps(16), 1);
        assert_eq!(costs(1.8, 1.0 / 7.0, false).steps(16), 2);
        assert_eq!(costs(2.5, 1.0 / 7.0, false).steps(16), 3);
        assert_eq!(costs(2.5, 1.0 / 7.0, false).steps(2), 2, "no more than there are between saves");
        // The paper: 7 or 8 steps gain three steps.
        let paper = costs(20.0, 1.0 / 7.0, true);
        assert!([7, 8].contains(&paper.steps(16)), "{}", paper.steps(16));
        assert!(((paper.stall_ms(1) - paper.stall_ms(7)) / ROOM_MS - 3.0).abs() < 1e-9);
        // A proof that costs more than it saves.
        assert_eq!(Costs { proof_ms: 200.0, ..costs(1.8, 1.0 / 7.0, false) }.steps(16), 1);
    }

    #[test]
    fn what_earlier_windows_held_corrects_the_choice() {
        let costs = costs(2.5, 1.0 / 7.0, false);
        assert!((costs.held(2) - (2.0 - 1.0 / 7.0) / 2.5).abs() < 1e-9);
        // Half of it was let go: what is left takes longer than in one step.
        let slow = Costs { reached: 0.3, ..costs };
        assert!((slow.held(2) - 0.3 * costs.held(2)).abs() < 1e-9);
        assert!(slow.stall_ms(2) > costs.stall_ms(1) && slow.steps(2) == 1, "{}", slow.stall_ms(2));
        // More was idle than the formulas say: fewer steps are enough.
        assert_eq!((costs.steps(16), Costs { reached: 1.4, ..costs }.steps(16)), (3, 2));
        assert!((Costs { reached: 1.4, ..costs }.held(9) - 1.0).abs() < 1e-9, "never more than the state");
    }
}
