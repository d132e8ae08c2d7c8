//! Proves again what lies in memory, and has what has changed made again from another machine.
//!
//! Memory changes by itself, if seldom. A load finds that, by then perhaps without the machine that had the other copy.
//! So the keeper reads its objects in turn, for as long as it lives, and compares each one's CRC with the one that was
//! noted when its bytes came, were copied, or were first read here. An object that differs loses its name on this
//! machine if another one has it; the keepers of the others find that it lacks, and copy it as for a machine that has
//! joined. One that no other machine has stays, since its other blocks are right, and is shown by the status.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::setpriority_process;
use shardfast_store::keeper::wire::{Answer, Request};
use shardfast_store::objects::Objects;

use crate::copies::Copies;
use crate::memory::Memory;
use crate::neighbours::{Neighbours, Table};
use crate::users::Users;

/// Time for which the thread pauses for each unit of time in which it reads: it takes a twentieth of a core.
const PAUSES: u32 = 19;

/// Lowest priority of a thread: what others leave of the cores.
const LEAST: i32 = 19;

/// Pause after all objects were read.
const READS_EVERY: Duration = Duration::from_secs(10);

/// Objects whose bytes have changed.
#[derive(Default)]
pub(crate) struct Changed(Mutex<Found>);

#[derive(Default)]
struct Found {
    count: u64,
    /// Names of those that stay, with their memory.
    lone: Vec<(String, Memory)>,
}

impl Changed {
    fn lock(&self) -> MutexGuard<'_, Found> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of objects that were found changed, and the names of those that no other machine has.
    pub(crate) fn found(&self, objects: &Objects<Memory>) -> (u64, Vec<String>) {
        let mut found = self.lock();
        found.lone.retain(|(name, memory)| is_there(objects, name, memory));
        (found.count, found.lone.iter().map(|(name, _)| name.clone()).collect())
    }

    /// Proves all objects in turn, for as long as the keeper lives.
    pub(crate) fn run(&self, objects: &Objects<Memory>, with: (&Neighbours, &Copies), users: &Users) {
        // Of this thread alone.
        let _ = setpriority_process(None, LEAST);
        while !users.has_ended() {
            self.prove_all(objects, with, &|took| thread::sleep(took * PAUSES));
            thread::sleep(READS_EVERY);
        }
    }

    /// Proves each object once. `pause` is called after each piece, with the time that it took.
    fn prove_all(
        &self,
        objects: &Objects<Memory>,
        (neighbours, copies): (&Neighbours, &Copies),
        pause: &dyn Fn(Duration),
    ) {
        let mut all: Vec<(String, Memory)> = Vec::new();
        objects.each(|name, memory, is_finished| {
            if is_finished {
                all.push((name.to_owned(), memory.clone()));
            }
        });
        for (name, memory) in all {
            // Memory that cannot be read now is read in the next turn.
            if !matches!(proves(objects, &name, &memory, pause), Ok(false)) {
                continue;
            }
            let turn = copies.turn();
            let is_elsewhere = make_again(objects, &neighbours.table(), &name, &memory);
            drop(turn);
            let mut found = self.lock();
            if found.lone.iter().any(|(_, lone)| lone.is(&memory)) {
                continue;
            }
            found.count += 1;
            if !is_elsewhere {
                found.lone.push((name, memory));
            }
        }
    }
}

/// Returns whether the name is still that of this memory.
fn is_there(objects: &Objects<Memory>, name: &str, memory: &Memory) -> bool {
    objects.get(name).is_ok_and(|now| now.is(memory))
}

/// Returns whether the bytes are those of before; fails if the object is deleted meanwhile.
fn proves(objects: &Objects<Memory>, name: &str, memory: &Memory, pause: &dyn Fn(Duration)) -> Result<bool, Errno> {
    let mut began = Instant::now();
    let crc = memory.read_all(|_, _| {
        pause(began.elapsed());
        began = Instant::now();
        if is_there(objects, name, memory) { Ok(()) } else { Err(Errno::NOENT) }
    })?;
    Ok(memory.noted_crc(crc) == crc)
}

/// Takes an object from this machine and has it copied from another one that has it; returns whether one has.
fn make_again(objects: &Objects<Memory>, table: &Table, name: &str, memory: &Memory) -> bool {
    let located = table.ask_all(&Request::Locate { name: name.to_owned() }, &[]);
    let has_it = |answer: &Answer| matches!(answer, Answer::Bytes(bytes) if *bytes == memory.bytes);
    if !located.iter().any(|(_, answer)| answer.as_ref().is_ok_and(has_it)) {
        return false;
    }
    objects.remove(name, |now| now.is(memory));
    // One that does not answer looks again when it copies something else.
    table.ask_all(&Request::Joined { me: table.me as u32 }, &[]);
    true
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shardfast_store::keeper::wire::{self, Machine};
    use shardfast_store::keeper::{join_machines, meet};
    use shardfast_store::testing::conformance::write_object;
    use shardfast_store::{Kind, Store, open};

    use super::*;
    use crate::Keeper;
    use crate::serving::Served;

    const BLOCK: usize = 512;
    const BLOCKS: usize = 16;

    /// Keepers of a job's machines, with a file of theirs.
    struct Job {
        keepers: Vec<Keeper>,
        names: Vec<String>,
    }

    impl Job {
        fn begin(name: &str, machines: usize) -> Job {
            let names: Vec<String> = (0..machines).map(|at| format!("{name}-{at}-{}", std::process::id())).collect();
            let listen = |name: &String| Keeper::listen(name, "run", Duration::from_secs(600)).unwrap();
            let job = Job { keepers: names.iter().map(listen).collect(), names };
            let meet = |name| meet(name, "127.0.0.1", (0, 0), [7; 32]).unwrap();
            let machines: Vec<Machine> =
                job.names.iter().map(|name| Machine { address: meet(name), domain: name.clone() }).collect();
            let copies = wire::Copies { count: 1, rate: None };
            (0..).zip(&job.names).for_each(|(me, name)| join_machines(name, &machines, me, copies).unwrap());
            write_object(&*job.store(0), "step/file", &bytes()).unwrap();
            job.store(0).publish("step/COMMIT", b"done").unwrap();
            job.until("all is copied", || job.served(0).copies.missing() == Some(0) && job.has(machines.len() - 1));
            job
        }

        fn store(&self, at: usize) -> Arc<dyn Store> {
            open(&format!("keeper://{}/", self.names[at])).unwrap()
        }

        fn served(&self, at: usize) -> &Served {
            &self.keepers[at].served
        }

        /// Returns whether a machine has all, and no machine copies anything.
        fn has(&self, at: usize) -> bool {
            let has = |name: &&str| self.served(at).objects.get(name).is_ok();
            let is_idle = |keeper: &Keeper| keeper.served.copies.missing() == Some(0);
            ["step/file", "step/COMMIT"].iter().all(has) && self.keepers.iter().all(is_idle)
        }

        fn until(&self, what: &str, is_so: impl Fn() -> bool) {
            let until = Instant::now() + Duration::from_secs(60);
            while !is_so() {
                assert!(Instant::now() < until, "{what}");
                thread::sleep(Duration::from_millis(2));
            }
        }

        /// Changes a byte of an object on one machine, past the seals, as a flipped bit does.
        fn flip(&self, at: usize, name: &str, byte: usize) {
            let objects = &self.served(at).objects;
            let memory = objects.get(name).unwrap();
            let mut bytes = memory.read().unwrap();
            bytes[byte] ^= 0x20;
            objects.put(name.to_owned(), memory.with_bytes(&bytes));
        }

        fn prove(&self, at: usize) -> (u64, Vec<String>) {
            let served = self.served(at);
            served.changed.prove_all(&served.objects, (&served.neighbours, &served.copies), &|_| {});
            served.changed.found(&served.objects)
        }
    }

    fn bytes() -> Vec<u8> {
        (0..BLOCK * BLOCKS).map(|at| (at % 251) as u8).collect()
    }

    #[test]
    fn every_block_that_changes_is_made_again_from_the_other_machine() {
        let job = Job::begin("idle", 2);
        assert_eq!([job.prove(0), job.prove(1)], [(0, vec![]), (0, vec![])]);
        for block in 0..BLOCKS {
            for at in 0..2 {
                job.flip(at, "step/file", block * BLOCK + block);
                assert_eq!(job.prove(at), (block as u64 + 1, vec![]));
                job.until("it is there again", || job.has(at));
                assert_eq!(job.served(at).objects.get("step/file").unwrap().read().unwrap(), bytes());
            }
        }
        job.flip(1, "step/COMMIT", 2);
        assert_eq!(job.prove(1), (BLOCKS as u64 + 1, vec![]));
        job.until("it is there again", || job.has(1));
        assert_eq!(job.store(1).read("step/COMMIT", 9).unwrap(), b"done");
    }

    #[test]
    fn what_changed_and_no_other_machine_has_stays_and_is_named() {
        let job = Job::begin("lone", 1);
        assert_eq!(job.prove(0), (0, vec![]));
        job.flip(0, "step/file", 3);
        for _ in 0..2 {
            assert_eq!(job.prove(0), (1, vec!["step/file".to_owned()]));
        }
        assert!(job.has(0));
        job.store(0).delete_tree("step").unwrap();
        assert_eq!(job.prove(0), (1, vec![]));
    }

    #[test]
    fn what_changed_keeps_its_name_while_something_is_copied() {
        let job = Job::begin("turn", 2);
        job.prove(0);
        job.flip(0, "step/file", 5);
        let turn = job.served(0).copies.turn();
        thread::scope(|threads| {
            let proof = threads.spawn(|| job.prove(0));
            thread::sleep(Duration::from_millis(100));
            assert!(job.served(0).objects.get("step/file").is_ok());
            drop(turn);
            assert_eq!(proof.join().unwrap(), (1, vec![]));
        });
        job.until("it is there again", || job.has(0));
    }

    #[test]
    fn what_changed_is_not_copied() {
        let job = Job::begin("sent", 2);
        job.flip(0, "step/file", 0);
        job.served(1).objects.delete("step/file");
        job.served(0).copies.wake();
        job.until("it was tried", || job.served(0).copies.missing() == Some(1));
        assert_eq!(job.served(1).objects.get("step/file").unwrap_err().0, Kind::NotFound);
    }
}
