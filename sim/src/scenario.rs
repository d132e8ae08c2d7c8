//! What happens in a run, drawn from its seed: the job, its saves, and all that goes wrong.

use std::time::Duration;

use shardfast_coord::Topology;
use shardfast_engine::Prove;
use shardfast_store::disk::Errno;

use crate::dice::Dice;
use crate::trap::{Fate, Site, Trap};
use crate::truth::{KEYS, Mischief, Truth};

/// Events of a save for each rank, about: where faults are put.
const EVENTS_OF_A_RANK: u64 = 22;

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
    /// System calls fail.
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
    pub(crate) faults: Vec<Fault>,
    pub(crate) traps: Vec<(u32, Trap)>,
    /// For what happens on the way.
    pub(crate) dice: Dice,
}

pub(crate) struct Save {
    /// An absolute path of the disk.
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
    pub(crate) fn draw(seed: u64) -> Scenario {
        let mut dice = Dice(seed);
        let weather = dice.pick(&[
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
        let saves = dice.pick(&[2, 2, 3]);
        let world = dice.pick(&[1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9]);
        let mut scenario = Scenario::calm(&mut dice, world, "/runs/gpt", saves);
        scenario.weather = weather;
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
            let rank = dice.rank(world);
            if (weather == Weather::Crash || is_storm) && dice.once_in(2) {
                fault(What::Crash { rank });
            } else if weather == Weather::Crash {
                let fate = Fate::Die { after: dice.once_in(2) };
                scenario.traps.push(trap(&mut dice, world, saves, fate));
            }
            if (weather == Weather::Links || is_storm) && world > 1 {
                let child = 1 + dice.rank(world - 1);
                match dice.below(3) {
                    0 => fault(What::Break { child }),
                    _ => {
                        let time = dice.pick(&[1, 10, 40]);
                        fault(What::Partition { child, time: dice.time(Duration::from_secs(time)) });
                    }
                }
            }
            if weather == Weather::Still || is_storm {
                // Not so long that pings would find it out.
                let time = dice.pick(&[1, 10, 25]);
                fault(What::Stop { rank, time: dice.time(Duration::from_secs(time)) });
            }
            if weather == Weather::Disk || is_storm {
                let errno = dice.pick(&[Errno::NOSPC, Errno::IO, Errno::TIMEDOUT, Errno::ACCESS]);
                let fate = dice.pick(&[Fate::Fail(errno), Fate::Fail(errno), Fate::Lost(errno)]);
                scenario.traps.push(trap(&mut dice, world, saves, fate));
            }
            if weather == Weather::Sweep {
                let name = dice.pick(&["fdatasync", "fsync_dir"]);
                let data = Site::Data { name, key: dice.pick(&KEYS), left: dice.below(saves + 1) as u32 };
                let at = 1 + dice.rank(40);
                let commit = Site::Deciding { stage: "commit", at, left: dice.below(saves) as u32 };
                let site = if dice.once_in(2) { data } else { commit };
                let rank = if matches!(site, Site::Data { .. }) { rank } else { 0 };
                scenario.traps.push((rank, Trap { site, fate: Fate::Sweep }));
            }
            if weather == Weather::Slow || is_storm {
                let slow = Fate::Slow(dice.time(Duration::from_secs(60)));
                scenario.traps.push((0, Trap { site: deciding(&mut dice, saves), fate: slow }));
            }
        }
        // Where files were removed, a loss of power leaves no promise to keep.
        let blackouts = if weather == Weather::Sweep { 0 } else { 2 };
        for _ in 0..blackouts {
            let fate = Fate::Blackout { seed: dice.next() };
            scenario.traps.push(trap(&mut dice, world, saves, fate));
        }
        scenario
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
        self.saves[0].left_out = Some((dice.rank(self.topology.world()), elsewhere));
    }

    /// A job of so many ranks that saves below `run` so many times, with nothing in its way.
    pub(crate) fn calm(dice: &mut Dice, world: u32, run: &str, saves: u64) -> Scenario {
        let topology = Topology::new(world, 1 + dice.rank(4), 2 + dice.rank(3)).expect("a world of ranks");
        let mut meeting = [0; 16];
        meeting.copy_from_slice(&dice.bytes(16));
        let mut scenario = Scenario {
            weather: Weather::Calm,
            topology,
            meeting,
            saves: Vec::new(),
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
        let mischief = dice.pick(&allowed.collect::<Vec<_>>());
        self.mischief = self.truth.culprit(mischief, dice).map(|rank| (rank, mischief));
        // A rank that does not write its replica reads it only to compare it.
        if matches!(mischief, Mischief::OtherBytes | Mischief::Unreadable) {
            self.prove = Prove::EverySave;
        }
        self.is_lazy |= mischief == Mischief::Touched;
    }
}

fn trap(dice: &mut Dice, world: u32, saves: u64, fate: Fate) -> (u32, Trap) {
    if dice.once_in(2) {
        return (0, Trap { site: deciding(dice, saves), fate });
    }
    let name = dice.pick(&["create_new", "fallocate", "pwrite", "ftruncate", "fdatasync", "fsync_dir", "mkdir"]);
    let site = Site::Data { name, key: dice.pick(&KEYS), left: dice.below(saves + 1) as u32 };
    (dice.rank(world), Trap { site, fate })
}

fn deciding(dice: &mut Dice, saves: u64) -> Site {
    let (stage, calls) = dice.pick(&[("commit", 40), ("commit", 40), ("commit", 40), ("open", 3)]);
    Site::Deciding { stage, at: 1 + dice.rank(calls), left: dice.below(saves) as u32 }
}
