//! The first stack of a new program, as exec makes it: argc, argv, envp, auxv, strings.
//!
//! Pure. It is read by the C library's start-up; its layout is that of the System V ABI.

/// What goes on the stack.
#[derive(Clone, Debug, Default)]
pub struct Contents<'a> {
    pub arguments: &'a [String],
    pub environment: &'a [String],
    /// Pairs of the auxiliary vector that are plain numbers, without AT_NULL.
    pub pairs: &'a [(u64, u64)],
    pub platform: &'a str,
    pub random: [u8; 16],
}

/// AT_PLATFORM, AT_RANDOM and AT_EXECFN point to strings on the stack.
const AT_PLATFORM: u64 = 15;
const AT_RANDOM: u64 = 25;
const AT_EXECFN: u64 = 31;
const ALIGN: u64 = 16;

/// A string or an argument has a zero byte, or the contents do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfit;

/// Bytes for the top of a stack that ends at `top`, and the stack pointer (where they begin).
pub fn build(contents: &Contents, top: u64, limit_bytes: usize) -> Result<(u64, Vec<u8>), Unfit> {
    let strings = strings(contents)?;
    let strings_at = (top.checked_sub(strings.bytes.len() as u64).ok_or(Unfit)?) & !(ALIGN - 1);
    let pointer = |offset: usize| strings_at + offset as u64;
    let mut words = vec![contents.arguments.len() as u64];
    words.extend(strings.arguments.iter().map(|offset| pointer(*offset)));
    words.push(0);
    words.extend(strings.environment.iter().map(|offset| pointer(*offset)));
    words.push(0);
    words.extend(contents.pairs.iter().flat_map(|(key, value)| [*key, *value]));
    words.extend([AT_PLATFORM, pointer(strings.platform), AT_RANDOM, pointer(strings.random)]);
    if let Some(name) = strings.arguments.first() {
        words.extend([AT_EXECFN, pointer(*name)]);
    }
    words.extend([0, 0]);
    let below = (words.len() * 8) as u64;
    let start = strings_at.checked_sub(below).ok_or(Unfit)? & !(ALIGN - 1);
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.resize(usize::try_from(strings_at - start).map_err(|_| Unfit)?, 0);
    bytes.extend(strings.bytes);
    if bytes.len() > limit_bytes { Err(Unfit) } else { Ok((start, bytes)) }
}

/// Concatenated strings, and where each begins.
#[derive(Default)]
struct Strings {
    bytes: Vec<u8>,
    arguments: Vec<usize>,
    environment: Vec<usize>,
    platform: usize,
    random: usize,
}

impl Strings {
    fn put(&mut self, text: &str) -> Result<usize, Unfit> {
        if text.as_bytes().contains(&0) {
            return Err(Unfit);
        }
        let at = self.bytes.len();
        self.bytes.extend_from_slice(text.as_bytes());
        self.bytes.push(0);
        Ok(at)
    }
}

fn strings(contents: &Contents) -> Result<Strings, Unfit> {
    let mut strings = Strings { bytes: contents.random.to_vec(), ..Strings::default() };
    for text in contents.arguments {
        let at = strings.put(text)?;
        strings.arguments.push(at);
    }
    for text in contents.environment {
        let at = strings.put(text)?;
        strings.environment.push(at);
    }
    strings.platform = strings.put(contents.platform)?;
    Ok(strings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOP: u64 = 0x7000_0000;

    fn word(bytes: &[u8], index: usize) -> u64 {
        u64::from_le_bytes(bytes[8 * index..8 * index + 8].try_into().expect("a word"))
    }

    fn text(bytes: &[u8], start: u64, at: u64) -> String {
        let from = usize::try_from(at - start).expect("on the stack");
        let end = bytes[from..].iter().position(|byte| *byte == 0).expect("an end");
        String::from_utf8(bytes[from..from + end].to_vec()).expect("text")
    }

    proptest! {
        #[test]
        fn everything_is_found_where_the_abi_says(
            arguments in proptest::collection::vec("[a-z =]{0,9}", 1..5),
            environment in proptest::collection::vec("[A-Z]{1,5}=[a-z]{0,9}", 0..5),
            pairs in proptest::collection::vec((1u64..14, any::<u64>()), 0..5),
        ) {
            let contents = Contents {
                arguments: &arguments, environment: &environment, pairs: &pairs,
                platform: "here", random: [7; 16],
            };
            let (start, bytes) = build(&contents, TOP, 1 << 16).expect("it fits");
            prop_assert_eq!(start % 16, 0);
            prop_assert!(start + bytes.len() as u64 <= TOP);
            prop_assert_eq!(word(&bytes, 0), arguments.len() as u64);
            for (i, argument) in arguments.iter().enumerate() {
                prop_assert_eq!(&text(&bytes, start, word(&bytes, 1 + i)), argument);
            }
            let after = 1 + arguments.len();
            prop_assert_eq!(word(&bytes, after), 0);
            for (i, variable) in environment.iter().enumerate() {
                prop_assert_eq!(&text(&bytes, start, word(&bytes, after + 1 + i)), variable);
            }
            let after = after + 1 + environment.len();
            prop_assert_eq!(word(&bytes, after), 0);
            for (i, (key, value)) in pairs.iter().enumerate() {
                prop_assert_eq!(word(&bytes, after + 1 + 2 * i), *key);
                prop_assert_eq!(word(&bytes, after + 2 + 2 * i), *value);
            }
            let platform = after + 1 + 2 * pairs.len();
            prop_assert_eq!(word(&bytes, platform), AT_PLATFORM);
            prop_assert_eq!(text(&bytes, start, word(&bytes, platform + 1)), "here");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let arguments = ["x".repeat(100)];
        let contents = Contents { arguments: &arguments, ..Contents::default() };
        assert_eq!(build(&contents, TOP, 64), Err(Unfit));
        let arguments = ["a\0b".to_owned()];
        let contents = Contents { arguments: &arguments, ..Contents::default() };
        assert_eq!(build(&contents, TOP, 1 << 16), Err(Unfit));
    }
}
