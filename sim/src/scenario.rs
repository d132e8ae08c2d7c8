//! What happens in a run, drawn from its seed: the job, its saves, and all that goes wrong.

use std::collections::BTreeSet;
use std::time::Duration;

use shardfast_coord::Topology;
use shardfast_engine::Prove;
use shardfast_store::disk::Errno;
use shardfast_store::testing::sims3::Fault as Request;

use crate::storage::Medium;
use crate::trap::{Failure, Fate, Site, Trap};
use crate::truth::{KEYS, Mischief, Truth};
use shardfast_store::testing::dice::Dice;

/// Events of a save for each rank, about: where faults are put.
const EVENTS_OF_A_RANK: u64 = 22;

/// Parts that every data file has several of: the first holds the header, which takes all of it.
const SHORT_PART_BYTES: u64 = 64 << 10;

/// As services have them: longer than any data file.
const LONG_PART_BYTES: u64 = 8 << 20;

/// The length of the parts that the service of that seed takes, in bytes. It is drawn apart, so that a job on the disk
/// does not depend on it.
pub(crate) fn part_bytes(seed: u64) -> u64 {
    *Dice(seed.rotate_left(16)).pick(&[SHORT_PART_BYTES, SHORT_PART_BYTES, LONG_PART_BYTES])
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weather {
    /// Nothing: every save ends as it should.
    Calm,
    /// A rank does something wrong, and nothing else goes wrong.
    Mischief,
    /// Ranks crash.
    Crash,
    /// Links break, or nothing comes through for a while.
    Links,
    /// Processes stand still for a while.
    Still,
    /// Operations on the storage fail: system calls, or requests.
    Disk,
    /// Another program removes files of saves under way.
    Sweep,
    /// Some ranks and decisions take longer than a deadline.
    Slow,
    /// A rank leaves a save out.
    Absent,
    /// All of it.
    Storm,
}

pub(crate) struct Scenario {
    pub(crate) weather: Weather,
    pub(crate) topology: Topology,
    /// The name of the meeting.
    pub(crate) meeting: [u8; 16],
    pub(crate) saves: Vec<Save>,
    /// For the windows in which ranks capture part of each save ahead of it; `None` if they do not.
    pub(crate) windows: Option<Dice>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) traps: Vec<(u32, Trap)>,
    /// For what happens on the way.
    pub(crate) dice: Dice,
}

pub(crate) struct Save {
    /// An absolute path of the storage.
    pub(crate) place: String,
    pub(crate) truth: Truth,
    pub(crate) deadline: Duration,
    pub(crate) prove: Prove,
    pub(crate) mischief: Option<(u32, Mischief)>,
    /// Whether ranks confirm afterwards that the state was not modified while it was copied.
    pub(crate) is_lazy: bool,
    /// Whether ranks begin it before the save before it has ended.
    pub(crate) overlaps: bool,
    /// The rank that does not begin it, and how long that does something else.
    pub(crate) left_out: Option<(u32, Duration)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    /// Before the event of that number.
    pub(crate) event: u64,
    pub(crate) what: What,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Crash {
        rank: u32,
    },
    /// The link between that rank and its parent.
    Break {
        child: u32,
    },
    /// Nothing comes through the link between that rank and its parent for so long.
    Partition {
        child: u32,
        time: Duration,
    },
    /// The process of that rank, for so long: it keeps its connections and does nothing.
    Stop {
        rank: u32,
        time: Duration,
    },
}

impl Scenario {
    pub(crate) fn draw(seed: u64, medium: Medium) -> Scenario {
        let mut dice = Dice(seed);
        let operations = Operations::of(medium, part_bytes(seed));
        let weather = *dice.pick(&[
            Weather::Calm,
            Weather::Mischief,
            Weather::Crash,
            Weather::Crash,
            Weather::Links,
            Weather::Still,
            Weather::Disk,
            Weather::Sweep,
            Weather::Slow,
            Weather::Absent,
            Weather::Storm,
        ]);
        let saves = *dice.pick(&[2, 2, 3]);
        let world = *dice.pick(&[1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9]);
        let mut scenario = Scenario::calm(&mut dice, world, "/runs/gpt", saves);
        scenario.weather = weather;
        // Drawn apart: what is captured ahead changes nothing else of a job.
        let mut windows = Dice(seed.rotate_left(48));
        scenario.windows = windows.once_in(2).then_some(windows);
        let is_storm = weather == Weather::Storm;
        if !matches!(weather, Weather::Calm | Weather::Mischief | Weather::Absent) {
            scenario.rival(&mut dice);
        }
        if weather == Weather::Absent {
            scenario.leave_out(&mut dice);
        }
        if weather == Weather::Mischief || is_storm {
            let at = dice.below(saves) as usize;
            scenario.saves[at].do_wrong(&mut dice);
        }
        let events = EVENTS_OF_A_RANK * u64::from(world) * saves;
        let some = 1 + dice.below(2);
        for _ in 0..some {
            let event = dice.below(events);
            let mut fault = |what| scenario.faults.push(Fault { event, what });
            let rank = dice.below_u32(world);
            if (weather == Weather::Crash || is_storm) && dice.once_in(2) {
                fault(What::Crash { rank });
            } else if weather == Weather::Crash {
                let fate = Fate::Die { after: dice.once_in(2) };
                scenario.traps.push(operations.trap(&mut dice, world, saves, fate));
            }
            if (weather == Weather::Links || is_storm) && world > 1 {
                let child = 1 + dice.below_u32(world - 1);
                match dice.below(3) {
                    0 => fault(What::Break { child }),
                    _ => {
                        let time = *dice.pick(&[1, 10, 40]);
                        fault(What::Partition { child, time: dice.time(Duration::from_secs(time)) });
                    }
                }
            }
            if weather == Weather::Still || is_storm {
                // Not so long that pings would find it out.
                let time = *dice.pick(&[1, 10, 25]);
                fault(What::Stop { rank, time: dice.time(Duration::from_secs(time)) });
            }
            if weather == Weather::Disk || is_storm {
                let fate = Fate::Fails(failure(&mut dice, medium));
                scenario.traps.push(operations.trap(&mut dice, world, saves, fate));
            }
            if weather == Weather::Sweep {
                let name = *dice.pick(operations.swept);
                let data = Site::Data { name, key: dice.pick::<&str>(&KEYS), left: dice.below(saves + 1) as u32 };
                let at = 1 + dice.below_u32(operations.commit);
                let commit = Site::Deciding { stage: "commit", at, left: dice.below(saves) as u32 };
                let site = if dice.once_in(2) { data } else { commit };
                let rank = if matches!(site, Site::Data { .. }) { rank } else { 0 };
                scenario.traps.push((rank, Trap { site, fate: Fate::Sweep }));
            }
            if weather == Weather::Slow || is_storm {
                let slow = Fate::Slow(dice.time(Duration::from_secs(60)));
                scenario.traps.push((0, Trap { site: operations.deciding(&mut dice, saves), fate: slow }));
            }
        }
        // Where files were removed, a loss of power leaves no promise to keep.
        let blackouts = if weather == Weather::Sweep { 0 } else { 2 };
        for _ in 0..blackouts {
            let fate = Fate::Blackout { seed: dice.next() };
            scenario.traps.push(operations.trap(&mut dice, world, saves, fate));
        }
        if medium == Medium::Objects {
            if !matches!(weather, Weather::Calm | Weather::Mischief | Weather::Absent | Weather::Sweep) {
                scenario.fail_requests(&mut dice, &operations);
            }
            // Where ranks are slow, the second save comes too late for that.
            if weather == Weather::Disk && dice.once_in(2) {
                scenario.overtake(&mut dice);
            }
            if matches!(weather, Weather::Disk | Weather::Crash) && dice.once_in(4) {
                scenario.lose_sight(&mut dice);
            }
            scenario.one_trap_on_data_each();
        }
        scenario
    }

    /// Lets the second save go to the place of the first one and overtake it, which decides slowly: when the first one
    /// publishes, the name is taken.
    fn overtake(&mut self, dice: &mut Dice) {
        self.saves[1].overlaps = true;
        self.saves[1].place = self.saves[0].place.clone();
        let fate = Fate::Slow(Duration::from_secs(5) + dice.time(Duration::from_secs(30)));
        // Behind the look for a `COMMIT`, and about as far as the request that publishes.
        self.traps
            .push((0, Trap { site: Site::Deciding { stage: "commit", at: 3 + dice.below_u32(7), left: 0 }, fate }));
    }

    /// Lets the answer to a request of a decision be lost, and the next requests be refused, with which a publisher
    /// would find out.
    fn lose_sight(&mut self, dice: &mut Dice) {
        let (lost, left) = (5 + dice.below_u32(5), dice.below(self.saves.len() as u64) as u32);
        let refused = (lost + 1..lost + 5).map(|at| (at, Request::Answered(403)));
        for (at, fault) in [(lost, Request::Lost)].into_iter().chain(refused) {
            let fate = Fate::Fails(Failure::Request(fault));
            self.traps.push((0, Trap { site: Site::Deciding { stage: "commit", at, left }, fate }));
        }
    }

    /// Lets requests of a few ranks fail beside what else goes wrong.
    fn fail_requests(&mut self, dice: &mut Dice, operations: &Operations) {
        let (world, saves) = (self.topology.world(), self.saves.len() as u64);
        for _ in 0..dice.below(4) {
            let fate = Fate::Fails(failure(dice, Medium::Objects));
            let mut trap = operations.trap(dice, world, saves, fate);
            if dice.once_in(4) {
                let name = *dice.pick(&["list", "create", "create", "delete many"]);
                trap = (
                    dice.below_u32(world),
                    Trap { site: Site::Place { name, left: dice.below(saves + 1) as u32 }, fate },
                );
            }
            self.traps.push(trap);
        }
    }

    /// Drops traps, so that at most one of each rank changes what happens to its data: requests for data are made in
    /// parallel, and of two failures the first one counts.
    fn one_trap_on_data_each(&mut self) {
        let mut ranks = BTreeSet::new();
        self.traps.retain(|(rank, Trap { site, fate })| {
            let is_one = matches!(site, Site::Data { .. }) && !matches!(fate, Fate::Blackout { .. });
            !is_one || ranks.insert(*rank)
        });
    }

    /// Lets saves that overlap go to one place, now and then: either may win.
    fn rival(&mut self, dice: &mut Dice) {
        for save in 1..self.saves.len() {
            if self.saves[save].overlaps && dice.once_in(2) {
                self.saves[save].place = self.saves[save - 1].place.clone();
            }
        }
    }

    /// Lets a rank leave the first save out, and go on before or after the others have given it up.
    fn leave_out(&mut self, dice: &mut Dice) {
        for (number, save) in self.saves.iter_mut().enumerate() {
            save.overlaps = false;
            save.place = format!("/runs/gpt/step-{number:08}");
        }
        // Long enough that the others have given it up, and not so long that they give the next one up as well.
        let given_up = self.saves[0].deadline + Duration::from_secs(5);
        let elsewhere = if dice.once_in(2) { given_up } else { Duration::ZERO };
        self.saves[0].left_out = Some((dice.below_u32(self.topology.world()), elsewhere));
    }

    /// A job of so many ranks that saves below `run` so many times, with nothing in its way.
    pub(crate) fn calm(dice: &mut Dice, world: u32, run: &str, saves: u64) -> Scenario {
        let topology = Topology::new(world, 1 + dice.below_u32(4), 2 + dice.below_u32(3)).expect("a world of ranks");
        let mut meeting = [0; 16];
        meeting.copy_from_slice(&dice.bytes(16));
        let mut scenario = Scenario {
            weather: Weather::Calm,
            topology,
            meeting,
            saves: Vec::new(),
            windows: None,
            faults: Vec::new(),
            traps: Vec::new(),
            dice: dice.fork(),
        };
        let mut truth = Truth::random(dice, world);
        for number in 0..saves {
            truth.change(dice);
            let overlaps = number > 0 && dice.once_in(4);
            let again = scenario.saves.last().filter(|_| !overlaps && dice.once_in(3));
            let place = again.map_or_else(|| format!("{run}/step-{number:08}"), |last| last.place.clone());
            let deadline = Duration::from_secs(8 + dice.below(10));
            let prove = if dice.once_in(6) { Prove::EverySave } else { Prove::FirstSave };
            let (truth, is_lazy) = (truth.clone(), dice.once_in(3));
            scenario.saves.push(Save {
                place,
                truth,
                deadline,
                prove,
                mischief: None,
                is_lazy,
                overlaps,
                left_out: None,
            });
        }
        scenario
    }
}

impl Save {
    fn do_wrong(&mut self, dice: &mut Dice) {
        let allowed = Mischief::ALL.into_iter().filter(|mischief| self.truth.allows(*mischief));
        let mischief = *dice.pick(&allowed.collect::<Vec<_>>());
        self.mischief = self.truth.culprit(mischief, dice).map(|rank| (rank, mischief));
        // A rank that does not write its replica reads it only to compare it.
        if matches!(mischief, Mischief::OtherBytes | Mischief::Unreadable) {
            self.prove = Prove::EverySave;
        }
        self.is_lazy |= mischief == Mischief::Touched;
    }
}

/// The operations of a save on its storage at which something happens.
struct Operations {
    /// On data files.
    data: &'static [&'static str],
    /// Those of them before which another program removes files.
    swept: &'static [&'static str],
    /// How many there are in the decision to commit, and in the one to begin.
    commit: u32,
    open: u32,
}

impl Operations {
    fn of(medium: Medium, part_bytes: u64) -> Operations {
        let [data, swept]: [&[&str]; 2] = match medium {
            Medium::Disk => [
                &["create_new", "fallocate", "pwrite", "ftruncate", "fdatasync", "fsync_dir", "mkdir"],
                &["fdatasync", "fsync_dir"],
            ],
            Medium::Objects if part_bytes == SHORT_PART_BYTES => {
                [&["begin", "part 1", "part 2", "complete", "complete", "abort"], &["begin", "part 2", "complete"]]
            }
            Medium::Objects => [&["put", "put", "put", "delete many"], &["put"]],
        };
        let (commit, open) = if medium == Medium::Disk { (40, 3) } else { (16, 2) };
        Operations { data, swept, commit, open }
    }

    fn trap(&self, dice: &mut Dice, world: u32, saves: u64, fate: Fate) -> (u32, Trap) {
        if dice.once_in(2) {
            return (0, Trap { site: self.deciding(dice, saves), fate });
        }
        let name = *dice.pick(self.data);
        let site = Site::Data { name, key: dice.pick::<&str>(&KEYS), left: dice.below(saves + 1) as u32 };
        (dice.below_u32(world), Trap { site, fate })
    }

    fn deciding(&self, dice: &mut Dice, saves: u64) -> Site {
        let Operations { commit, open, .. } = *self;
        let (stage, most) = *dice.pick(&[("commit", commit), ("commit", commit), ("commit", commit), ("open", open)]);
        Site::Deciding { stage, at: 1 + dice.below_u32(most), left: dice.below(saves) as u32 }
    }
}

fn failure(dice: &mut Dice, medium: Medium) -> Failure {
    if medium == Medium::Disk {
        let errno = *dice.pick(&[Errno::NOSPC, Errno::IO, Errno::TIMEDOUT, Errno::ACCESS]);
        return Failure::Call { errno, has_effect: *dice.pick(&[false, false, true]) };
    }
    // Most pass. The others are final, since pauses are real time.
    Failure::Request(*dice.pick(&[
        Request::Answered(403),
        Request::Answered(403),
        Request::Answered(507),
        Request::Answered(500),
        Request::Answered(503),
        Request::Refused,
        Request::Silent(false),
        Request::Silent(true),
        Request::Lost,
        Request::Lost,
        Request::Cut,
        Request::RequestTurned,
    ]))
}
