//! What a QEMU command line says about the guest's memory: what cannot work with far memory is
//! refused by name, and what stays local is told. Pure.
//!
//! Options come as QEMU takes them: `-device` or `--device`, its value as `driver,key=value` or as
//! a JSON object. What is not known here is left to QEMU.

use std::ffi::OsString;

use farpool_units::parse_bytes;
use serde_json::Value;

/// Why a command line is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option}: {reason}; {remedy}")]
pub struct Refusal {
    /// The option with its value, as it was given.
    pub option: String,
    pub reason: &'static str,
    pub remedy: &'static str,
}

/// A rule by which options are refused.
struct Rule {
    options: &'static [&'static str],
    sign: Sign,
    why: Why,
}

/// By what of its value an option is known.
enum Sign {
    /// Its kind, such as a device's driver, begins so.
    Kind(&'static [&'static str]),
    /// One of these keys is on.
    Key(&'static [&'static str]),
}

/// A reason and its remedy.
#[derive(Clone, Copy)]
struct Why {
    reason: &'static str,
    remedy: &'static str,
}

const HUGE_PAGES: Why = Why {
    reason: "pages of hugetlbfs cannot be far",
    remedy: "leave it out; huge pages of the kernel's own choice need no option",
};

const RULES: [Rule; 8] = [
    Rule {
        options: &["device", "netdev", "net", "chardev"],
        sign: Sign::Kind(&["vhost-user"]),
        why: Why {
            reason: "another process maps the guest's memory, and would see holes where it is far",
            remedy: "use a device that QEMU emulates, such as virtio-net-pci with -netdev tap or \
                     user, virtio-blk-pci or virtio-9p-pci",
        },
    },
    Rule {
        options: &["object"],
        sign: Sign::Kind(&["x-vfio-user-server"]),
        why: Why {
            reason: "another process maps the guest's memory, and would see holes where it is far",
            remedy: "use a device that QEMU emulates",
        },
    },
    Rule {
        options: &["device", "netdev", "net"],
        sign: Sign::Kind(&["vfio-", "vhost-vdpa", "pvrdma", "x-pci-proxy"]),
        why: Why {
            reason: "the device reads and writes the guest's memory by itself, so that all of it \
                     is pinned and none can be far",
            remedy: "use a device that QEMU emulates, or run this guest without farpool",
        },
    },
    Rule {
        options: &["object"],
        sign: Sign::Kind(&["sev-", "tdx-guest", "memory-backend-epc"]),
        why: Why {
            reason: "the guest's memory is encrypted or protected by the processor, which lets \
                     nobody move it",
            remedy: "run this guest without farpool",
        },
    },
    Rule {
        options: &["overcommit", "realtime"],
        sign: Sign::Key(&["mem-lock", "mlock"]),
        why: Why { reason: "locked memory cannot be far", remedy: "leave it out" },
    },
    Rule { options: &["object"], sign: Sign::Key(&["hugetlb"]), why: HUGE_PAGES },
    Rule {
        options: &["global"],
        sign: Sign::Key(&["migration.x-postcopy-ram", "migration.postcopy-ram"]),
        why: Why {
            reason: "QEMU's postcopy needs the guest's page faults, which farpool serves",
            remedy: "migrate without postcopy",
        },
    },
    Rule {
        options: &["global"],
        sign: Sign::Key(&["migration.x-background-snapshot", "migration.background-snapshot"]),
        why: Why {
            reason: "QEMU's background snapshot needs the guest's page faults, which farpool serves",
            remedy: "take snapshots without it",
        },
    },
];

impl Rule {
    fn applies(&self, option: &str, fields: &Fields) -> bool {
        self.options.contains(&option)
            && match self.sign {
                Sign::Kind(kinds) => kinds.iter().any(|kind| fields.kind.starts_with(kind)),
                Sign::Key(keys) => keys.iter().any(|key| fields.is_on(key)),
            }
    }
}

/// Why a guest cannot move to another host.
const NOT_ALL_OF_M: Refusal = Refusal {
    option: String::new(),
    reason: "a guest that can migrate gets its memory from farpool",
    remedy: "give all of it with -m alone, as in -m 4G, or leave --migratable and --incoming out",
};

/// QEMU's options for a guest's memory of this length that can move to another host: for QEMU it is
/// in a file.
pub fn movable_memory(bytes: u64, file: &str) -> [String; 4] {
    // It begins at a superpage, wherever QEMU maps it.
    let object = format!(
        "memory-backend-file,id=farpool-guest,size={bytes},mem-path={},share=on,align=16M",
        escaped(file)
    );
    ["-object", &object, "-machine", "memory-backend=farpool-guest"].map(str::to_owned)
}

/// QEMU's default for `-m`.
const MEMORY_BYTES_DEFAULT: u64 = 128 << 20;

/// An option that gives the guest memory which stays local.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalMemory {
    pub option: String,
    /// None if that cannot be told.
    pub bytes: Option<u64>,
}

/// What a command line says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    options: Vec<(String, String)>,
}

/// An option's value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Fields {
    /// The driver of a device, the type of an object or of a backend.
    kind: String,
    pairs: Vec<(String, String)>,
}

impl CommandLine {
    /// Reads a command line without the program's name.
    pub fn read<'a>(words: impl IntoIterator<Item = &'a str>) -> CommandLine {
        let mut options = Vec::new();
        let mut words = words.into_iter().peekable();
        while let Some(word) = words.next() {
            let Some(name) = option_name(word) else { continue };
            let value = words.next_if(|next| option_name(next).is_none()).unwrap_or_default();
            options.push((name.to_owned(), value.to_owned()));
        }
        CommandLine { options }
    }

    /// Checks that the guest's memory can be far. `is_hugetlbfs`: whether a path is on that file
    /// system.
    ///
    /// # Errors
    /// The first option that forbids it.
    pub fn check(&self, is_hugetlbfs: impl Fn(&str) -> bool) -> Result<(), Refusal> {
        for (option, value) in &self.options {
            let fields = Fields::read(value);
            let path = match option.as_str() {
                "mem-path" => Some(value.as_str()),
                "object" => fields.get("mem-path"),
                _ => None,
            };
            let rule = RULES.iter().find(|rule| rule.applies(option, &fields));
            let huge = path.is_some_and(&is_hugetlbfs).then_some(HUGE_PAGES);
            if let Some(Why { reason, remedy }) = rule.map(|rule| rule.why).or(huge) {
                return Err(Refusal { option: format!("-{option} {value}"), reason, remedy });
            }
        }
        Ok(())
    }

    /// Memory of the guest that stays local: of a file, or shared with other processes. The kernel
    /// moves only anonymous private memory.
    pub fn local_memory(&self) -> Vec<LocalMemory> {
        let of = |(option, value): &(String, String)| {
            let bytes = match option.as_str() {
                "object" => {
                    let fields = Fields::read(value);
                    fields.is_local_memory().then(|| fields.get("size").and_then(parse_bytes))
                }
                "mem-path" => Some(self.memory_bytes()),
                _ => None,
            };
            bytes.map(|bytes| LocalMemory { option: format!("-{option} {value}"), bytes })
        };
        self.options.iter().filter_map(of).collect()
    }

    /// The memory of `-m`.
    fn memory_bytes(&self) -> Option<u64> {
        let option = self.options.iter().rev().find(|(option, _)| option == "m");
        let Some((_, value)) = option else { return Some(MEMORY_BYTES_DEFAULT) };
        let fields = Fields::read(value);
        let size = fields.get("size").unwrap_or(&fields.kind);
        // Here a number without a unit is in MiB.
        let is_bare = size.bytes().all(|byte| byte.is_ascii_digit());
        if is_bare { size.parse::<u64>().ok()?.checked_mul(1 << 20) } else { parse_bytes(size) }
    }

    /// The length of the guest's memory, if it is all of `-m`, so that it can be replaced.
    ///
    /// # Errors
    /// An option that gives it other memory, or lets it come from elsewhere already.
    pub fn replaceable_memory(&self) -> Result<u64, Refusal> {
        for (option, value) in &self.options {
            let fields = Fields::read(value);
            let gives_memory = match option.as_str() {
                "mem-path" | "incoming" => true,
                "machine" | "M" => fields.get("memory-backend").is_some(),
                "object" => fields.kind.starts_with("memory-backend-"),
                "numa" => fields.get("memdev").is_some() || fields.get("mem").is_some(),
                "m" => fields.get("maxmem").is_some(),
                _ => false,
            };
            if gives_memory {
                return Err(Refusal { option: format!("-{option} {value}"), ..NOT_ALL_OF_M });
            }
        }
        self.memory_bytes().filter(|bytes| *bytes > 0).ok_or(Refusal {
            option: "-m".to_owned(),
            reason: "its size cannot be read",
            remedy: "write it as in -m 4G",
        })
    }

    /// Files with options, which are not looked at here.
    pub fn option_files(&self) -> Vec<&str> {
        let is_file = |(option, _): &&(String, String)| option == "readconfig";
        self.options.iter().filter(is_file).map(|(_, value)| value.as_str()).collect()
    }
}

/// The name of an option. None for a value, of which a single `-` is one.
fn option_name(word: &str) -> Option<&str> {
    let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
    name.starts_with(|first: char| first.is_ascii_alphabetic()).then_some(name)
}

impl Fields {
    fn read(value: &str) -> Fields {
        if let Ok(Value::Object(object)) = serde_json::from_str(value) {
            return Fields::of_json(&object);
        }
        let mut fields = Fields::default();
        for (number, part) in parts(value).into_iter().enumerate() {
            match part.split_once('=') {
                None if number == 0 => fields.kind = part,
                None => fields.pairs.push((part, "on".to_owned())),
                Some((key, value)) => fields.pairs.push((key.to_owned(), value.to_owned())),
            }
        }
        fields.join_property();
        if fields.kind.is_empty() {
            let kind = ["driver", "qom-type", "type"].iter().find_map(|key| fields.get(key));
            fields.kind = kind.unwrap_or_default().to_owned();
        }
        fields
    }

    fn of_json(object: &serde_json::Map<String, Value>) -> Fields {
        let text = |value: &Value| match value {
            Value::Bool(true) => "on".to_owned(),
            Value::Bool(false) => "off".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let pairs = object.iter().map(|(key, value)| (key.clone(), text(value)));
        let mut fields = Fields { kind: String::new(), pairs: pairs.collect() };
        let kind = ["driver", "qom-type", "type"].iter().find_map(|key| fields.get(key));
        fields.kind = kind.unwrap_or_default().to_owned();
        fields
    }

    /// Adds the key that a long `-global driver=D,property=P,value=V` is about: `D.P`.
    fn join_property(&mut self) {
        let of_key = ["driver", "property", "value"].map(|key| self.get(key).map(str::to_owned));
        if let [Some(driver), Some(property), Some(value)] = of_key {
            self.pairs.push((format!("{driver}.{property}"), value));
        }
    }

    /// Whether this object is memory that stays local.
    fn is_local_memory(&self) -> bool {
        match self.kind.as_str() {
            "memory-backend-memfd" | "memory-backend-file" | "memory-backend-shm" => true,
            kind => kind.starts_with("memory-backend-") && self.is_on("share"),
        }
    }

    /// The last value of a key, which is the one that QEMU takes.
    fn get(&self, key: &str) -> Option<&str> {
        let pair = self.pairs.iter().rev().find(|(known, _)| known == key);
        pair.map(|(_, value)| value.as_str())
    }

    fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| matches!(value, "on" | "yes" | "true" | "y"))
    }
}

/// The parts between commas; two commas are one in a part.
fn parts(value: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut letters = value.chars().peekable();
    while let Some(letter) = letters.next() {
        let is_end = letter == ',' && letters.next_if_eq(&',').is_none();
        match parts.last_mut() {
            Some(part) if !is_end => part.push(letter),
            _ => parts.push(String::new()),
        }
    }
    parts
}

/// Makes QEMU leave memory that can be far until the guest uses it: touched at once, it would pass
/// the limit for a moment, and all of it would travel to the blade for nothing. Returns the options
/// that were changed.
pub fn without_prealloc(words: &mut Vec<OsString>) -> Vec<String> {
    let mut told = Vec::new();
    let is_called = |word: &OsString, name: &str| word.to_str().and_then(option_name) == Some(name);
    let has_file = words.iter().any(|word| is_called(word, "mem-path"));
    let mut is_object = false;
    words.retain_mut(|word| {
        if is_called(word, "mem-prealloc") && !has_file {
            told.push("-mem-prealloc".to_owned());
            return false;
        }
        if is_object && let Some(changed) = word.to_str().and_then(object_without_prealloc) {
            told.push(format!("-object {}", word.to_string_lossy()));
            *word = changed.into();
        }
        is_object = is_called(word, "object");
        true
    });
    told
}

/// The value without prealloc. None if nothing is to be changed.
fn object_without_prealloc(value: &str) -> Option<String> {
    let fields = Fields::read(value);
    let can_be_far = fields.kind == "memory-backend-ram" && !fields.is_local_memory();
    if !can_be_far || !fields.is_on("prealloc") {
        return None;
    }
    if let Ok(Value::Object(mut object)) = serde_json::from_str(value) {
        object.insert("prealloc".into(), false.into());
        return Some(Value::Object(object).to_string());
    }
    let is_prealloc = |part: &str| part == "prealloc" || part.starts_with("prealloc=");
    let changed = parts(value).into_iter().map(|part| match is_prealloc(&part) {
        true => "prealloc=off".to_owned(),
        false => escaped(&part),
    });
    Some(changed.collect::<Vec<_>>().join(","))
}

/// A path as part of a value.
pub fn escaped(path: &str) -> String {
    path.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn refusal(line: &str) -> Option<Refusal> {
        let words = line.split_whitespace();
        CommandLine::read(words).check(|path| path.starts_with("/dev/hugepages")).err()
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let refused = [
            ("-netdev vhost-user,id=n,chardev=c", "another process maps"),
            ("-netdev type=vhost-user,id=n", "another process maps"),
            ("--device vhost-user-fs-pci,tag=x", "another process maps"),
            ("-device {\"driver\":\"vhost-user-blk-pci\",\"chardev\":\"c\"}", "another process"),
            ("-m 1G -device vfio-pci,host=01:00.0", "pinned"),
            ("-device driver=vfio-pci,host=01:00.0", "pinned"),
            ("-netdev vhost-vdpa,id=n,vhostdev=/dev/vhost-vdpa-0", "pinned"),
            ("-object sev-guest,id=s", "encrypted"),
            ("-object {\"qom-type\":\"tdx-guest\",\"id\":\"t\"}", "encrypted"),
            ("-overcommit mem-lock=on", "locked"),
            ("-realtime mlock=on", "locked"),
            ("-object memory-backend-memfd,id=m,size=1G,hugetlb=on", "hugetlbfs"),
            ("-object {\"qom-type\":\"memory-backend-memfd\",\"hugetlb\":true}", "hugetlbfs"),
            ("-object memory-backend-file,id=m,mem-path=/dev/hugepages/x", "hugetlbfs"),
            ("-mem-path /dev/hugepages", "hugetlbfs"),
            ("-global migration.x-postcopy-ram=on", "postcopy"),
            ("-global driver=migration,property=postcopy-ram,value=on", "postcopy"),
            ("-global migration.x-background-snapshot=true", "background snapshot"),
        ];
        for (line, reason) in refused {
            let refusal = refusal(line).unwrap_or_else(|| panic!("{line} is not refused"));
            assert!(refusal.reason.contains(reason), "{line}: {refusal}");
            let option = refusal.option.trim_start_matches('-');
            assert!(line.contains(option) && !refusal.remedy.is_empty(), "{line}: {refusal}");
        }
    }

    #[test]
    fn what_works_is_not_refused() {
        let lines = [
            "-m 4G -smp 2 -cpu max -display none -nodefaults",
            "-netdev tap,id=n,vhost=on -device virtio-net-pci,netdev=n",
            "-device virtio-blk-pci,drive=d -drive if=none,id=d,file=a.img,aio=io_uring",
            "-object memory-backend-ram,id=m,size=1G,prealloc=on -machine memory-backend=m",
            "-object memory-backend-memfd,id=m,size=1G,share=on,hugetlb=off",
            "-object memory-backend-file,id=m,size=1G,mem-path=/tmp/vhost-user",
            "-overcommit mem-lock=off,cpu-pm=on -global migration.x-postcopy-ram=off",
            "-append mem-path=/dev/hugepages -name vhost-user -global PIIX4_PM.disable_s3=1",
            "-serial - -monitor stdio -device virtio-balloon",
            "",
        ];
        for line in lines {
            assert_eq!(refusal(line), None, "{line}");
        }
    }

    #[test]
    fn a_value_that_looks_like_an_option_is_one() {
        let line = CommandLine::read(["-m", "-device", "vfio-pci", "disk.img", "-S"]);
        let known = |name: &str| line.options.iter().any(|(option, _)| option == name);
        assert!(known("m") && known("device") && known("S") && line.options.len() == 3);
    }

    #[test]
    fn what_stays_local_is_told_with_its_size() {
        let local = |line: &str| {
            let memory = CommandLine::read(line.split_whitespace()).local_memory();
            memory.into_iter().map(|it| it.bytes.map(|bytes| bytes >> 20)).collect::<Vec<_>>()
        };
        assert_eq!(local("-object memory-backend-memfd,id=m,size=1G"), [Some(1024)]);
        assert_eq!(local("-object memory-backend-memfd,share=off,size=1.5g"), [Some(1536)]);
        assert_eq!(local("-object memory-backend-file,mem-path=/x,size=64M"), [Some(64)]);
        let json = "{\"qom-type\":\"memory-backend-ram\",\"share\":true,\"size\":1048576}";
        assert_eq!(local(&format!("-object {json}")), [Some(1)]);
        assert_eq!(local("-object memory-backend-shm,id=m,size=much"), [None]);
        assert_eq!(local("-m 1G -mem-path /x -m size=2G,slots=2"), [Some(2048)]);
        assert_eq!(local("-m 256 -mem-path /x"), [Some(256)]);
        assert_eq!(local("-mem-path /x"), [Some(128)]);
        let far = "-m 1G -object memory-backend-ram,id=m,size=1G -object rng-random,id=r,share=on";
        assert_eq!(local(far), []);
    }

    #[test]
    fn memory_of_m_alone_can_be_replaced() {
        let of = |line: &str| CommandLine::read(line.split_whitespace()).replaceable_memory();
        assert_eq!(of("-m 256 -S"), Ok(256 << 20));
        assert_eq!(of("-machine q35 -m size=2G -object rng-random,id=r"), Ok(2 << 30));
        assert_eq!(of("-smp 2"), Ok(128 << 20));
        for line in [
            "-m 1G -mem-path /x",
            "-m 1G -object memory-backend-ram,id=m,size=1G",
            "-m 1G -machine q35,memory-backend=m",
            "-m 1G -numa node,memdev=m",
            "-m 1G,slots=2,maxmem=2G",
            "-m 1G -incoming defer",
            "-m much",
        ] {
            let refusal = of(line).expect_err(line);
            assert!(line.contains(refusal.option.trim_end()), "{line}: {refusal}");
        }
        let options = movable_memory(1 << 20, "/a,b");
        assert!(options[1].contains("size=1048576,mem-path=/a,,b,share=on"), "{options:?}");
    }

    #[test]
    fn memory_that_can_be_far_is_not_touched_at_the_start() {
        let words = |line: &str| line.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        let changed = |line: &str| {
            let mut all = words(line);
            let told = without_prealloc(&mut all);
            let all: Vec<_> = all.iter().map(|word| word.to_string_lossy().into_owned()).collect();
            (all.join(" "), told.len())
        };
        let (line, told) = changed("-m 1G -object memory-backend-ram,prealloc=on,id=a,,b -S");
        assert_eq!(line, "-m 1G -object memory-backend-ram,prealloc=off,id=a,,b -S");
        assert_eq!(told, 1);
        assert_eq!(changed("-m 1G -mem-prealloc -S"), ("-m 1G -S".to_owned(), 1));
        let object = "{\"prealloc\":true,\"qom-type\":\"memory-backend-ram\"}";
        let (line, told) = changed(&format!("-object {object}"));
        assert!(line.contains("\"prealloc\":false") && told == 1, "{line}");
        for line in [
            "-object memory-backend-ram,prealloc=off,id=a",
            "-object memory-backend-memfd,prealloc=on,id=a",
            "-object memory-backend-ram,prealloc=on,share=on",
            "-append prealloc=on -mem-path /x -mem-prealloc",
        ] {
            assert_eq!(changed(line), (line.to_owned(), 0));
        }
        let odd = OsString::from_vec(vec![b'-', b'a', 0xff]);
        let mut all = vec![odd.clone(), "x".into()];
        assert!(without_prealloc(&mut all).is_empty());
        assert_eq!(all, [odd, "x".into()]);
    }

    #[test]
    fn two_commas_are_one_in_a_value() {
        assert_eq!(parts("a,,b,c"), ["a,b", "c"]);
        assert_eq!(parts(""), [""]);
        assert_eq!(parts(",,,"), [",", ""]);
        assert_eq!(parts(&escaped("/a,b,,c")), ["/a,b,,c"]);
        let path = "-mem-path /dev/hugepages,x";
        assert_eq!(refusal(path).map(|it| it.reason), Some(HUGE_PAGES.reason));
    }
}
