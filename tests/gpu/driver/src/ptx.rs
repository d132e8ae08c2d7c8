//! Runs kernels from their PTX text, one thread after another, so that tests run the very text that devices run.
//!
//! It knows the instructions that the engine's kernels use and refuses all others by name. As a device does, it refuses
//! loads and additions that are not aligned or reach outside of an allocation, and as a device may, it gives rubbish
//! for a register that was never written. The meanings are those of NVIDIA's "Parallel Thread Execution ISA".

use std::collections::HashMap;
use std::sync::Arc;

use crate::answer::{Answer, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, MISALIGNED_ADDRESS};
use crate::memory::Memory;

/// Instructions after which a thread is taken to hang.
const STEPS_MAX: usize = 1 << 20;

/// What a register holds that was never written.
const RUBBISH: u64 = 0xdbdb_dbdb_dbdb_dbdb;

/// Modules and functions, by handle and device.
#[derive(Default)]
pub(crate) struct Kernels {
    pub(crate) modules: HashMap<(usize, usize), Arc<Kernel>>,
    /// Each with its module's handle.
    pub(crate) functions: HashMap<(usize, usize), (usize, Arc<Kernel>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    Predicate,
    U32,
    U64,
}

impl Type {
    fn of_register(name: &str) -> Option<Type> {
        [(".pred", Type::Predicate), (".u32", Type::U32), (".u64", Type::U64)]
            .into_iter()
            .find_map(|(known, of)| (known == name).then_some(of))
    }

    /// The bits that a register of this type has.
    fn mask(self) -> u64 {
        match self {
            Type::Predicate => 1,
            Type::U32 => u64::from(u32::MAX),
            Type::U64 => u64::MAX,
        }
    }
}

/// Registers that say which thread it is, in the order of [`Kernel::run`]'s values. They are the first ones.
const SPECIAL: [&str; 5] = ["%tid.x", "%ntid.x", "%ctaid.x", "%ctaid.y", "%nctaid.y"];

type Compute = fn([u64; 3]) -> u64;

/// Instructions that only compute: the types of the result and of what it is computed from. Shifts by more bits than
/// there are give 0; what does not fit in the result is cut off.
const COMPUTATIONS: [(&str, Type, &[Type], Compute); 26] = [
    ("mov.u32", Type::U32, &[Type::U32], |[a, ..]| a),
    ("mov.u64", Type::U64, &[Type::U64], |[a, ..]| a),
    ("cvt.u64.u32", Type::U64, &[Type::U32], |[a, ..]| a),
    ("cvt.u32.u64", Type::U32, &[Type::U64], |[a, ..]| a),
    ("add.u32", Type::U32, &[Type::U32; 2], |[a, b, _]| a.wrapping_add(b)),
    ("add.u64", Type::U64, &[Type::U64; 2], |[a, b, _]| a.wrapping_add(b)),
    ("sub.u32", Type::U32, &[Type::U32; 2], |[a, b, _]| a.wrapping_sub(b)),
    ("sub.u64", Type::U64, &[Type::U64; 2], |[a, b, _]| a.wrapping_sub(b)),
    ("min.u64", Type::U64, &[Type::U64; 2], |[a, b, _]| a.min(b)),
    ("mul.lo.u32", Type::U32, &[Type::U32; 2], |[a, b, _]| a.wrapping_mul(b)),
    ("mul.lo.u64", Type::U64, &[Type::U64; 2], |[a, b, _]| a.wrapping_mul(b)),
    ("mad.lo.u32", Type::U32, &[Type::U32; 3], |[a, b, c]| a.wrapping_mul(b).wrapping_add(c)),
    ("mad.lo.u64", Type::U64, &[Type::U64; 3], |[a, b, c]| a.wrapping_mul(b).wrapping_add(c)),
    ("mad.wide.u32", Type::U64, &[Type::U32, Type::U32, Type::U64], |[a, b, c]| a.wrapping_mul(b).wrapping_add(c)),
    ("and.b64", Type::U64, &[Type::U64; 2], |[a, b, _]| a & b),
    ("or.b64", Type::U64, &[Type::U64; 2], |[a, b, _]| a | b),
    ("xor.b64", Type::U64, &[Type::U64; 2], |[a, b, _]| a ^ b),
    ("shl.b32", Type::U32, &[Type::U32; 2], |[a, b, _]| a.checked_shl(b as u32).unwrap_or(0)),
    ("shl.b64", Type::U64, &[Type::U64, Type::U32], |[a, b, _]| a.checked_shl(b as u32).unwrap_or(0)),
    ("shr.u64", Type::U64, &[Type::U64, Type::U32], |[a, b, _]| a.checked_shr(b as u32).unwrap_or(0)),
    ("selp.u64", Type::U64, &[Type::U64, Type::U64, Type::Predicate], |[a, b, p]| if p == 1 { a } else { b }),
    ("setp.eq.u64", Type::Predicate, &[Type::U64; 2], |[a, b, _]| u64::from(a == b)),
    ("setp.ne.u64", Type::Predicate, &[Type::U64; 2], |[a, b, _]| u64::from(a != b)),
    ("setp.lt.u64", Type::Predicate, &[Type::U64; 2], |[a, b, _]| u64::from(a < b)),
    ("setp.gt.u64", Type::Predicate, &[Type::U64; 2], |[a, b, _]| u64::from(a > b)),
    ("setp.ge.u64", Type::Predicate, &[Type::U64; 2], |[a, b, _]| u64::from(a >= b)),
];

/// Loads from global memory: bytes of a value, and how many.
const LOADS: [(&str, usize, usize); 3] = [("ld.global.u8", 1, 1), ("ld.global.u64", 8, 1), ("ld.global.v2.u64", 8, 2)];

#[derive(Clone, Copy)]
enum Source {
    Register(usize),
    Number(u64),
}

/// An address: a register and what is added to it.
#[derive(Clone, Copy)]
struct Place {
    register: usize,
    offset: u64,
}

enum Work {
    Compute {
        to: usize,
        mask: u64,
        from: [Source; 3],
        by: Compute,
    },
    Parameter {
        to: usize,
        number: usize,
    },
    Load {
        to: Vec<usize>,
        bytes: usize,
        from: Place,
    },
    /// `red.global.add.u64`.
    Add {
        to: Place,
        value: usize,
    },
    Branch {
        to: usize,
    },
    Return,
}

struct Instruction {
    /// The predicate that it depends on, and which value lets it run.
    guard: Option<(usize, u64)>,
    work: Work,
}

/// One kernel: what a module consists of here.
pub(crate) struct Kernel {
    pub(crate) name: String,
    /// All of 64 bits.
    pub(crate) parameters: Vec<String>,
    registers: usize,
    instructions: Vec<Instruction>,
}

impl Kernel {
    /// The kernel of a module's text.
    ///
    /// # Errors
    /// What it does not know, by name.
    pub(crate) fn parse(text: &str) -> Result<Kernel, String> {
        let lines = text.lines().map(|line| line.split("//").next().unwrap_or(""));
        let text: String = lines.flat_map(|line| [line, "\n"]).collect();
        let (head, rest) = text.split_once(".visible .entry").ok_or("expected one `.visible .entry`")?;
        for line in head.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if !line.starts_with(".version ") && !line.starts_with(".target ") && line != ".address_size 64" {
                return Err(format!("unknown directive `{line}`"));
            }
        }
        let (name, rest) = rest.split_once('(').ok_or("expected parameters")?;
        let (parameters, rest) = rest.split_once(')').ok_or("expected `)` behind the parameters")?;
        let parameter = |text: &str| {
            let name = text.trim().strip_prefix(".param .u64 ").map(|name| name.trim().to_owned());
            name.ok_or_else(|| format!("unknown parameter `{}`", text.trim()))
        };
        let parameters: Vec<String> = parameters.split(',').map(parameter).collect::<Result<_, _>>()?;
        let body = rest.trim().strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        let mut parser = Parser::new(&parameters);
        parser.body(body.ok_or("expected one body in braces")?)?;
        let (registers, instructions) = (parser.registers.len(), parser.finish()?);
        Ok(Kernel { name: name.trim().to_owned(), parameters, registers, instructions })
    }

    /// Runs all threads of a grid (x, y) of blocks of so many threads.
    ///
    /// # Errors
    /// That of a device for the first thread that does what it must not.
    pub(crate) fn run(&self, grid: [u32; 2], threads: u32, arguments: &[u64], memory: &mut Memory) -> Answer {
        let mut registers = vec![0; self.registers];
        for run in 0..grid[0] {
            for part in 0..grid[1] {
                for thread in 0..threads {
                    registers.fill(RUBBISH);
                    let special = [thread, threads, run, part, grid[1]].map(u64::from);
                    registers[..SPECIAL.len()].copy_from_slice(&special);
                    self.run_thread(&mut registers, arguments, memory)?;
                }
            }
        }
        Ok(())
    }

    fn run_thread(&self, registers: &mut [u64], arguments: &[u64], memory: &mut Memory) -> Answer {
        let mut at = 0;
        for _ in 0..STEPS_MAX {
            let Some(Instruction { guard, work }) = self.instructions.get(at) else { return Ok(()) };
            at += 1;
            if guard.is_some_and(|(predicate, value)| registers[predicate] & 1 != value) {
                continue;
            }
            match work {
                Work::Compute { to, mask, from, by } => {
                    let value = |source: Source| match source {
                        Source::Register(register) => registers[register],
                        Source::Number(number) => number,
                    };
                    registers[*to] = by(from.map(value)) & mask;
                }
                Work::Parameter { to, number } => registers[*to] = arguments[*number],
                Work::Load { to, bytes, from } => {
                    let loaded = global(memory, registers, *from, bytes * to.len())?;
                    for (to, value) in to.iter().zip(loaded.chunks(*bytes)) {
                        registers[*to] = number(value);
                    }
                }
                Work::Add { to, value } => {
                    let value = registers[*value];
                    let place = global(memory, registers, *to, 8)?;
                    let sum = number(place).wrapping_add(value);
                    place.copy_from_slice(&sum.to_le_bytes());
                }
                Work::Branch { to } => at = *to,
                Work::Return => return Ok(()),
            }
        }
        Err(LAUNCH_TIMEOUT)
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Bytes of the device's memory, as one access.
fn global<'a>(memory: &'a mut Memory, registers: &[u64], at: Place, bytes: usize) -> Result<&'a mut [u8], u32> {
    let address = registers[at.register].wrapping_add(at.offset) as usize;
    if !address.is_multiple_of(bytes) {
        return Err(MISALIGNED_ADDRESS);
    }
    let end = address.checked_add(bytes).ok_or(ILLEGAL_ADDRESS)?;
    memory.bytes(address..end).map_err(|_| ILLEGAL_ADDRESS)
}

struct Parser<'a> {
    parameters: &'a [String],
    registers: HashMap<String, (usize, Type)>,
    labels: HashMap<String, usize>,
    /// With the label that a branch goes to.
    instructions: Vec<(Instruction, Option<String>)>,
}

impl<'a> Parser<'a> {
    fn new(parameters: &'a [String]) -> Parser<'a> {
        let special = SPECIAL.iter().enumerate().map(|(number, name)| ((*name).to_owned(), (number, Type::U32)));
        Parser { parameters, registers: special.collect(), labels: HashMap::new(), instructions: Vec::new() }
    }

    fn body(&mut self, body: &str) -> Result<(), String> {
        for statement in body.split(';') {
            let mut statement = statement.trim();
            while let Some((label, rest)) = statement.split_once(':') {
                self.labels.insert(label.trim().to_owned(), self.instructions.len());
                statement = rest.trim();
            }
            match statement.strip_prefix(".reg ") {
                Some(registers) => self.declare(registers)?,
                None if statement.is_empty() => {}
                None => self.instruction(statement).map_err(|why| format!("{why} in `{statement}`"))?,
            }
        }
        Ok(())
    }

    fn declare(&mut self, registers: &str) -> Result<(), String> {
        let (of, names) = registers.trim().split_once(' ').ok_or("expected registers behind their type")?;
        let of = Type::of_register(of).ok_or_else(|| format!("unknown type `{of}`"))?;
        for name in names.split(',').map(str::trim) {
            let number = self.registers.len();
            if self.registers.insert(name.to_owned(), (number, of)).is_some() {
                return Err(format!("register `{name}` is declared twice"));
            }
        }
        Ok(())
    }

    fn register(&self, name: &str, of: Type) -> Result<usize, String> {
        match self.registers.get(name) {
            Some((number, found)) if *found == of => Ok(*number),
            Some((_, found)) => Err(format!("expected `{name}` of type {of:?}, found {found:?}")),
            None => Err(format!("unknown register `{name}`")),
        }
    }

    /// One that can be written.
    fn result(&self, name: &str, of: Type) -> Result<usize, String> {
        let number = self.register(name, of)?;
        if number < SPECIAL.len() { Err(format!("`{name}` cannot be written")) } else { Ok(number) }
    }

    fn source(&self, name: &str, of: Type) -> Result<Source, String> {
        if name.starts_with('%') {
            return self.register(name, of).map(Source::Register);
        }
        let number = match name.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => name.parse(),
        };
        number.map(Source::Number).map_err(|_| format!("unknown number `{name}`"))
    }

    /// `[%register]` or `[%register+number]`.
    fn place(&self, text: &str) -> Result<Place, String> {
        let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        let inner = inner.ok_or_else(|| format!("expected an address, found `{text}`"))?;
        let (name, offset) = inner.split_once('+').unwrap_or((inner, "0"));
        let offset = offset.trim().parse().map_err(|_| format!("unknown offset `{offset}`"))?;
        Ok(Place { register: self.register(name.trim(), Type::U64)?, offset })
    }

    fn instruction(&mut self, statement: &str) -> Result<(), String> {
        let (guard, statement) = match statement.strip_prefix('@') {
            None => (None, statement),
            Some(guarded) => {
                let (name, rest) = guarded.split_once(' ').ok_or("expected an instruction behind its predicate")?;
                let (name, value) = name.strip_prefix('!').map_or((name, 1), |name| (name, 0));
                (Some((self.register(name, Type::Predicate)?, value)), rest.trim())
            }
        };
        let (name, operands) = statement.split_once(' ').unwrap_or((statement, ""));
        let operands = split(operands);
        let operands: Vec<&str> = operands.iter().map(String::as_str).collect();
        let (work, label) = match (name, operands.as_slice()) {
            ("ret", []) => (Work::Return, None),
            ("bra", [label]) => (Work::Branch { to: 0 }, Some((*label).to_owned())),
            ("ld.param.u64", [to, from]) => {
                let number = self.parameters.iter().position(|known| format!("[{known}]") == *from);
                let number = number.ok_or_else(|| format!("unknown parameter `{from}`"))?;
                (Work::Parameter { to: self.result(to, Type::U64)?, number }, None)
            }
            ("red.global.add.u64", [to, value]) => {
                (Work::Add { to: self.place(to)?, value: self.register(value, Type::U64)? }, None)
            }
            (_, operands) => (self.load(name, operands).unwrap_or_else(|| self.computation(name, operands))?, None),
        };
        self.instructions.push((Instruction { guard, work }, label));
        Ok(())
    }

    /// The load of that name, if it is one.
    fn load(&self, name: &str, operands: &[&str]) -> Option<Result<Work, String>> {
        let &(_, bytes, count) = LOADS.iter().find(|(known, ..)| *known == name)?;
        let load = || {
            let [to, from] = operands else { return Err("expected a register and an address".to_owned()) };
            let names: Vec<&str> = to.trim_matches(['{', '}']).split(',').map(str::trim).collect();
            if names.len() != count {
                return Err(format!("expected {count} registers, found {}", names.len()));
            }
            let to = names.iter().map(|name| self.result(name, Type::U64)).collect::<Result<_, _>>()?;
            Ok(Work::Load { to, bytes, from: self.place(from)? })
        };
        Some(load())
    }

    fn computation(&self, name: &str, operands: &[&str]) -> Result<Work, String> {
        let known = COMPUTATIONS.iter().find(|(known, ..)| *known == name);
        let &(_, of, types, by) = known.ok_or_else(|| format!("unknown instruction `{name}`"))?;
        let [to, sources @ ..] = operands else { return Err("expected operands".to_owned()) };
        if sources.len() != types.len() {
            return Err(format!("expected {} operands, found {}", types.len() + 1, operands.len()));
        }
        let mut from = [Source::Number(0); 3];
        for ((place, source), of) in from.iter_mut().zip(sources).zip(types) {
            *place = self.source(source, *of)?;
        }
        Ok(Work::Compute { to: self.result(to, of)?, mask: of.mask(), from, by })
    }

    fn finish(self) -> Result<Vec<Instruction>, String> {
        let labels = self.labels;
        let resolved = |(mut instruction, label): (Instruction, Option<String>)| {
            if let Some(label) = label {
                let to = *labels.get(&label).ok_or_else(|| format!("unknown label `{label}`"))?;
                instruction.work = Work::Branch { to };
            }
            Ok(instruction)
        };
        self.instructions.into_iter().map(resolved).collect()
    }
}

/// Operands between commas; those in braces are one.
fn split(operands: &str) -> Vec<String> {
    let (mut found, mut depth) = (vec![String::new()], 0);
    for letter in operands.trim().chars() {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        match (letter, depth, found.last_mut()) {
            (',', 0, _) => found.push(String::new()),
            (_, _, Some(last)) => last.push(letter),
            (_, _, None) => {}
        }
    }
    found.iter().map(|operand| operand.trim().to_owned()).filter(|operand| !operand.is_empty()).collect()
}
