//! Merges many short runs into few large copies: runs of one length at regular distances are one pitched copy.

/// Bytes that lie in one run on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) dst: usize,
    pub(crate) src: usize,
    pub(crate) bytes: usize,
}

/// `height` runs of `width_bytes`, each a pitch behind the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) dst: usize,
    pub(crate) src: usize,
    pub(crate) width_bytes: usize,
    pub(crate) height: usize,
    /// Distance of rows at the destination, in bytes; at least the width for the driver. Meaningless for one row.
    pub(crate) dst_pitch_bytes: usize,
    /// Distance of rows at the source, in bytes, as for the destination.
    pub(crate) src_pitch_bytes: usize,
}

/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH` of every device: larger distances are not one copy.
const PITCH_BYTES_MAX: usize = i32::MAX as usize;

impl From<Run> for Rows {
    fn from(Run { dst, src, bytes }: Run) -> Rows {
        Rows { dst, src, width_bytes: bytes, height: 1, dst_pitch_bytes: bytes, src_pitch_bytes: bytes }
    }
}

impl Rows {
    /// Adds the run, if the result is still rows.
    fn extend(&mut self, run: Run) -> bool {
        let last = self.height - 1;
        let distances = (
            run.dst.checked_sub(self.dst + last * self.dst_pitch_bytes),
            run.src.checked_sub(self.src + last * self.src_pitch_bytes),
        );
        let (Some(dst), Some(src)) = distances else { return false };
        if self.height == 1 && (dst, src) == (self.width_bytes, self.width_bytes) {
            self.width_bytes += run.bytes;
            (self.dst_pitch_bytes, self.src_pitch_bytes) = (self.width_bytes, self.width_bytes);
            return true;
        }
        let allowed = self.width_bytes..=PITCH_BYTES_MAX;
        let is_next = run.bytes == self.width_bytes
            && allowed.contains(&dst)
            && allowed.contains(&src)
            && (self.height == 1 || (dst, src) == (self.dst_pitch_bytes, self.src_pitch_bytes));
        if is_next {
            (self.dst_pitch_bytes, self.src_pitch_bytes) = (dst, src);
            self.height += 1;
        }
        is_next
    }
}

/// Gathers consecutive runs into rows and hands them to `copy` as soon as a run does not belong to them.
pub(crate) struct Gather<E, F: FnMut(Rows) -> Result<(), E>> {
    rows: Option<Rows>,
    outcome: Result<(), E>,
    copy: F,
}

impl<E, F: FnMut(Rows) -> Result<(), E>> Gather<E, F> {
    pub(crate) fn new(copy: F) -> Self {
        Gather { rows: None, outcome: Ok(()), copy }
    }

    /// Adds the next run. After a failure nothing is copied any more.
    pub(crate) fn push(&mut self, run: Run) {
        if self.outcome.is_err() || self.rows.as_mut().is_some_and(|rows| rows.extend(run)) {
            return;
        }
        if let Some(rows) = self.rows.replace(run.into()) {
            self.outcome = (self.copy)(rows);
        }
    }

    /// Copies the remaining rows.
    ///
    /// # Errors
    /// The first failure of `copy`.
    pub(crate) fn finish(mut self) -> Result<(), E> {
        self.outcome?;
        self.rows.map_or(Ok(()), &mut self.copy)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gathered(runs: &[Run]) -> Vec<Rows> {
        let mut copies = Vec::new();
        let mut gather = Gather::new(|rows| {
            copies.push(rows);
            Ok::<(), ()>(())
        });
        runs.iter().for_each(|&run| gather.push(run));
        gather.finish().unwrap();
        copies
    }

    /// Returns the pairs of addresses that are copied, byte by byte, in order.
    fn bytes(rows: &[Rows]) -> Vec<(usize, usize)> {
        let of = |rows: &Rows| {
            let rows = *rows;
            (0..rows.height).flat_map(move |row| {
                let (dst, src) = (rows.dst + row * rows.dst_pitch_bytes, rows.src + row * rows.src_pitch_bytes);
                (0..rows.width_bytes).map(move |byte| (dst + byte, src + byte))
            })
        };
        rows.iter().flat_map(of).collect()
    }

    fn run(dst: usize, src: usize, bytes: usize) -> Run {
        Run { dst, src, bytes }
    }

    #[test]
    fn a_matrix_cut_out_of_a_larger_one_is_one_copy_between_two_parts_of_rows() {
        let rows = (0..50).map(|row| run(1000 + row * 8, 5000 + row * 64, 8));
        let runs: Vec<Run> = [run(996, 4940, 4)].into_iter().chain(rows).chain([run(1400, 8200, 5)]).collect();
        let copies = gathered(&runs);
        assert_eq!(copies.len(), 3, "{copies:?}");
        assert_eq!((copies[1].width_bytes, copies[1].height, copies[1].src_pitch_bytes), (8, 50, 64));
    }

    #[test]
    fn backward_overlapping_and_distant_runs_stand_alone() {
        let far = PITCH_BYTES_MAX + 1;
        for second in [run(8, 992, 8), run(8, 1000, 8), run(8, 1004, 8), run(8, 1000 + far, 8), run(8, 2000, 4)] {
            assert_eq!(gathered(&[run(0, 1000, 8), second]).len(), 2, "{second:?}");
        }
        assert_eq!(gathered(&[run(0, 1000, 8), run(8, 1008, 4)]).len(), 1);
    }

    #[test]
    fn nothing_is_copied_after_a_failure() {
        let mut calls = 0;
        let mut gather = Gather::new(|_| {
            calls += 1;
            Err(calls)
        });
        for place in [0, 100, 300, 700, 1500] {
            gather.push(run(place, place, 3 + place));
        }
        assert_eq!(gather.finish(), Err(1));
        assert_eq!(calls, 1);
    }

    proptest! {
        #[test]
        fn every_byte_is_copied_once_and_in_order(
            steps in proptest::collection::vec((0usize..3, 0usize..12, 1usize..4, 1usize..5), 1..40)
        ) {
            let mut runs = Vec::new();
            let (mut dst, mut src) = (10_000, 20_000);
            for (backwards, gap, bytes, times) in steps {
                for _ in 0..times {
                    runs.push(run(dst, src, bytes));
                    dst += bytes;
                    src = if backwards == 0 { src - gap } else { src + gap };
                }
            }
            let singly: Vec<Rows> = runs.iter().map(|&run| run.into()).collect();
            prop_assert_eq!(bytes(&gathered(&runs)), bytes(&singly));
        }
    }
}
